"""Properties of the header: accepted files read as in the format's library; others are refused."""

import json
import json.scanner
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize
from safetensors.torch import save

from loradock.engine.adapters.bounded_parsing import C_TEXT_MAX, DIGITS_MAX
from loradock.engine.adapters.problems import shown
from loradock.engine.adapters.safetensors_header import (
    LENGTH_BYTES,
    header_length,
    parse_header,
)
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds
from loradock.engine.errors import AdapterUnsound, code_of
from loradock.messages.errors import ErrorCode
from tests.support.engine.adapter_examples import stored

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.bool]


def parsed(
    raw: bytes, bounds: AdapterBounds = DEFAULT_BOUNDS
) -> list[tuple[str, list[int], bytes]]:
    """Return the names, shapes and bytes that the parser finds in a file."""
    length = header_length(raw[:LENGTH_BYTES], len(raw), bounds)
    found = parse_header(raw[LENGTH_BYTES : LENGTH_BYTES + length], len(raw), bounds)
    return [(t.name, list(t.shape), raw[t.start : t.start + t.size_bytes]) for t in found]


def by_library(raw: bytes) -> list[tuple[str, list[int], bytes]]:
    return [(name, list(t["shape"]), bytes(t["data"])) for name, t in deserialize(raw)]


SHAPES = st.lists(st.integers(1, 5), min_size=0, max_size=3)
FILES = st.dictionaries(
    st.text("abc._", min_size=1, max_size=6),
    st.tuples(SHAPES, st.sampled_from(DTYPES)),
    min_size=1,
    max_size=5,
).map(lambda tensors: save({n: torch.ones(shape).to(d) for n, (shape, d) in tensors.items()}))


@settings(max_examples=60)
@given(FILES)
def test_files_of_the_library_are_read_as_by_the_library(raw: bytes) -> None:
    assert sorted(parsed(raw)) == sorted(by_library(raw))


@settings(max_examples=100)
@given(FILES, st.data())
def test_a_damaged_file_is_refused_or_read_as_the_library_reads_it(
    raw: bytes, data: st.DataObject
) -> None:
    damaged = bytearray(raw)
    for _ in range(data.draw(st.integers(1, 3))):
        header_end = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES], "little")
        index = data.draw(st.integers(0, min(len(damaged), header_end) - 1))
        damaged[index] = data.draw(st.sampled_from(b'0123456789{}[],:" aF' + bytes([0, 255])))
    if data.draw(st.booleans()):
        damaged = damaged[: data.draw(st.integers(0, len(damaged)))]
    try:
        ours = parsed(bytes(damaged))
    except AdapterUnsound:
        return
    assert sorted(ours) == sorted(by_library(bytes(damaged)))


def entry(shape: Any = (2, 3), start: Any = 0, end: Any = 24, dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def many(count: int) -> dict[str, Any]:
    return {str(i): entry((0,), 0, 0) for i in range(count)}


DATA = bytes(24)
MALFORMED: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "is cut off"),
    "a pointer of Git LFS": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a2146\nsize 12345\n",
        "is a pointer of Git LFS, without the weights",
    ),
    "half a length": (b"\x10\0\0", "is cut off"),
    "a length and no header": (stored(b"", length=100), "is cut off"),
    "a length of 2**64": (stored({"a": entry()}, DATA, 2**64 - 1), "is cut off"),
    "an empty header": (stored(b"", DATA), "starts with b''"),
    "text": (stored(b"not json", DATA), "starts with b'n'"),
    "an array": (stored(b"[1]", DATA), "starts with b'['"),
    "half an object": (stored(b'{"a"', DATA), "is malformed"),
    "not UTF-8": (stored(b'{"\xff": 1}', DATA), "is malformed"),
    "UTF-16": (stored("{}".encode("utf-16-le"), DATA), "is malformed"),
    "nested": (stored(b'{"a":' * 100 + b"1" + b"}" * 100, DATA), "is nested deeper than 32"),
    "nested arrays": (stored(b'{"a":' + b"[" * 9000 + b"]" * 9000 + b"}"), "is nested deeper"),
    "a name twice": (
        stored(f'{{"a": {json.dumps(entry())}, "a": {json.dumps(entry())}}}'.encode(), DATA),
        "'a' occurs in it more than once",
    ),
    "NaN": (stored(b'{"a": NaN}', DATA), "NaN is not a JSON number"),
    "a huge number": (stored(b'{"a": ' + b"9" * 5000 + b"}", DATA), "is malformed"),
    "a number for a tensor": (
        stored({"a": 1}, DATA),
        "a must have dtype, shape and data_offsets, got 1",
    ),
    "a field too many": (stored({"a": {**entry(), "x": 1}}, DATA), "a must have dtype, shape"),
    "a field too few": (stored({"a": {"dtype": "F32"}}, DATA), "a must have dtype, shape"),
    "a dtype unknown": (stored({"a": entry(dtype="F7")}, DATA), "dtype 'F7'"),
    "a dtype that is a list": (stored({"a": entry(dtype=["F32"])}, DATA), "dtype ['F32']"),
    "a shape of floats": (stored({"a": entry(shape=[2.0, 3])}, DATA), "shape [2.0, 3]"),
    "a shape of bools": (stored({"a": entry(shape=[True, 6])}, DATA), "shape [True, 6]"),
    "a shape below 0": (stored({"a": entry(shape=[-2, -3])}, DATA), "shape [-2, -3]"),
    "a shape that is a text": (stored({"a": entry(shape="6")}, DATA), "shape '6'"),
    "a shape of 9": (stored({"a": entry(shape=[1] * 8 + [6])}, DATA), "up to 8 lengths"),
    "an empty tensor": (stored({"a": entry([0, 3], 0, 0)}), "at least 1"),
    "a million empty tensors": (stored(many(100_000)), "tensors; at most"),
    "lengths that wrap": (stored({"a": entry([2**32, 2**32], 0, 0)}), "needs"),
    "lengths that are too long": (stored({"a": entry([2**60, 1], 0, 0)}), "lengths"),
    "offsets below 0": (stored({"a": entry(start=-24, end=0)}, DATA), "got [-24, 0]"),
    "offsets turned": (stored({"a": entry(start=24, end=0)}, DATA), "needs 24 bytes"),
    "one offset": (stored({"a": {**entry(), "data_offsets": [0]}}, DATA), "a start and an end"),
    "too few bytes named": (stored({"a": entry(end=20)}, DATA), "needs 24 bytes"),
    "too few bytes there": (
        stored({"a": entry()}, DATA[:-1]),
        "is cut off (97 bytes declared, 96 there)",
    ),
    "too many bytes there": (stored({"a": entry()}, DATA + b"x"), "end at byte"),
    "a hole before": (stored({"a": entry(start=4, end=28)}, bytes(28)), "follow each other"),
    "a hole between": (
        stored({"a": entry(), "b": entry(start=28, end=52)}, bytes(52)),
        "b starts at byte",
    ),
    "overlapping": (
        stored({"a": entry(), "b": entry(start=12, end=36)}, bytes(36)),
        "follow each other",
    ),
    "the same bytes twice": (stored({"a": entry(), "b": entry()}, DATA), "follow each other"),
    "metadata with a number": (
        stored({"__metadata__": {"a": 1}, "b": entry()}, DATA),
        "strings as values",
    ),
    "metadata that is a list": (
        stored({"__metadata__": [], "b": entry()}, DATA),
        "strings as values",
    ),
    "no name": (stored({"": entry()}, DATA), "is not a tensor name"),
    "a name with a line end": (stored({"a\n": entry()}, DATA), "is not a tensor name"),
    "a name with half a character": (stored({"\ud800": entry()}, DATA), "is not a tensor name"),
    "a long name": (stored({"a" * 600: entry()}, DATA), "at most 512"),
}


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_file_is_refused_with_its_fault(name: str) -> None:
    raw, text = MALFORMED[name]
    with pytest.raises(AdapterUnsound) as caught:
        parsed(raw)
    assert text in str(caught.value)
    assert len(str(caught.value)) < 1000


def test_bounds_are_enforced() -> None:
    raw = save({str(i): torch.ones(1) for i in range(20)})
    assert len(parsed(raw)) == 20
    for bounds in (AdapterBounds(tensors_max=19), AdapterBounds(header_bytes_max=100)):
        with pytest.raises(AdapterUnsound, match="at most"):
            parsed(raw, bounds)


LONG_NUMBERS = {
    "length": b'{"a":{"dtype":"F32","shape":[%s],"data_offsets":[0,4]}}',
    "offset": b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[-%s,4]}}',
    "fraction": b'{"a":{"dtype":"F32","shape":[1.%s],"data_offsets":[0,4]}}',
    "another field": b'{"__metadata__":{"x":%s}}',
}


@pytest.mark.parametrize("place", LONG_NUMBERS)
def test_long_numbers_are_refused_before_anything_is_decoded(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(json, "JSONDecoder", lambda **_: pytest.fail("the header was decoded"))
    header = LONG_NUMBERS[place] % (b"9" * (DIGITS_MAX + 1))
    with pytest.raises(AdapterUnsound, match=f"more than {DIGITS_MAX} digits in a row") as caught:
        parse_header(header, len(header) + 12, DEFAULT_BOUNDS)
    assert code_of(caught.value) == ErrorCode.DOES_NOT_FIT


def small_tensors(count: int) -> dict[str, Any]:
    return {f"tensor.{i}": entry((1,), 4 * i, 4 * i + 4) for i in range(count)}


SMALL = 60_000
LONG_HEADERS: dict[str, tuple[Callable[[], bytes], str]] = {
    "60,000 small tensors": (lambda: stored(small_tensors(SMALL), bytes(4 * SMALL)), ""),
    "120,000 members": (
        lambda: stored(dict.fromkeys(map(str, range(120_000)), 1)),
        "names 120000 tensors",
    ),
    "300,000 arrays": (lambda: stored({"a": [[]] * 300_000}), "a must have"),
    "15 MB of long numbers": (lambda: stored({"a": [10**63] * 230_000}), "a must have"),
    "15 MB of longer numbers": (
        lambda: stored(b'{"a":[1' + (b"," + b"9" * 4299) * 3_488 + b"]}"),
        "more than 64 digits",
    ),
}


@pytest.mark.parametrize("name", LONG_HEADERS)
def test_a_long_header_is_decoded_where_other_threads_take_turns(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, refusal = LONG_HEADERS[name]
    raw = make()
    held = [0]

    def observed(decoder: json.JSONDecoder) -> Any:
        scan = json.scanner.c_make_scanner(decoder)

        def scan_once(text: str, start: int) -> tuple[Any, int]:
            value, end = scan(text, start)
            held.append(end - start)
            return value, end

        return scan_once

    monkeypatch.setattr(json.scanner, "make_scanner", observed)
    if refusal:
        with pytest.raises(AdapterUnsound, match=refusal) as caught:
            parsed(raw)
        assert code_of(caught.value) == ErrorCode.DOES_NOT_FIT
    else:
        assert len(parsed(raw)) == SMALL
    assert max(held) <= C_TEXT_MAX


def test_a_short_header_is_decoded_by_the_same_rules_as_a_long_one() -> None:
    for padding in (0, C_TEXT_MAX):
        for header in (b'{"a": NaN%s}', b'{"a": 1, "a": 1%s}', b'{"a": 1,%s}', b'{"a": [1%s}'):
            with pytest.raises(AdapterUnsound, match="malformed"):
                parsed(stored(header % (b" " * padding)))
        raw = stored(json.dumps({"a": entry()}).encode() + b" " * padding, DATA)
        assert parsed(raw) == [("a", [2, 3], DATA)]


def test_what_an_error_shows_of_a_value_is_all_that_is_formatted() -> None:
    formatted = []

    class Value:
        def __repr__(self) -> str:
            formatted.append(self)
            return "v\xe9"

    assert shown([Value() for _ in range(10_000)]).startswith("[v\\xe9, v\\xe9, ")
    assert len(formatted) < 100
    assert shown({"a": ["b", 1, None, 2.5]}) == "{'a': ['b', 1, None, 2.5]}"


def test_tensors_may_have_the_names_of_an_entrys_fields() -> None:
    names = ["data_offsets", "dtype", "shape"]
    raw = save({name: torch.ones(1) for name in names})
    assert sorted(name for name, _, _ in parsed(raw)) == names


def test_the_library_accepts_files_that_are_refused_here() -> None:
    """If the library refuses these itself one day, the parser can be shortened."""
    for name in ("a name twice", "an empty tensor"):
        try:
            by_library(MALFORMED[name][0])
        except SafetensorError:
            pytest.fail(f"the library refuses {name!r} now")
