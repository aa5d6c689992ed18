"""Declared options: their names, values and checks, the reference page, and sizes."""

import re
from dataclasses import dataclass
from typing import Annotated, Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import NODEFAULT

from loradock.messages.options import check_options, format_size, option, options_of, parse_size
from tests import option_page

ALL = [found for page in option_page.SECTIONS for found in options_of(page.owner)]


@pytest.mark.parametrize("found", ALL, ids=lambda found: found.flag)
def test_an_option_says_what_holds_without_it(found):
    assert re.search(r"[.)]$", found.help), found.help
    has_value = found.kind is not bool and not found.shown(found.default)
    is_zero = found.default == 0
    is_explained = re.search(r"Default:|Needed", found.help) is not None
    assert is_explained or is_zero or not has_value or found.default is NODEFAULT, found


def test_a_name_is_declared_once_per_command():
    for command in {page.command for page in option_page.SECTIONS}:
        owners = [page.owner for page in option_page.SECTIONS if page.command == command]
        flags = [found.flag for owner in owners for found in options_of(owner)]
        assert len(flags) == len(set(flags))
        variables = [found.variable for owner in owners for found in options_of(owner)]
        assert all(variables) or "--api-key" in flags


@dataclass(frozen=True)
class Example:
    """Options of each kind."""

    count: Annotated[int, option("Number.", ge=1, le=9)] = 1
    wait_ms: Annotated[int, option("Time.", ge=1, le=60_000, unit="seconds")] = 250
    room_bytes_max: Annotated[int, option("Size.", ge=0, unit="bytes")] = 1 << 20
    kind: Annotated[str, option("Kind.", choices=("a", "b"))] = "a"
    is_on: Annotated[bool | None, option("Switch.")] = None
    names: Annotated[tuple[str, ...], option("Name.")] = ()
    shares: Annotated[dict[str, int] | None, option("Share.", metavar="NAME=NUMBER")] = None
    not_an_option: int = 0


def test_options_are_named_by_their_fields():
    flags = ["--count", "--wait", "--room-bytes", "--kind", "--is-on", "--name", "--share"]
    assert [found.flag for found in options_of(Example)] == flags
    assert options_of(Example)[1].variable == "LORADOCK_WAIT"


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("count", "9", 9),
        ("wait_ms", "1.5", 1500),
        ("room_bytes_max", "2 KiB", 2048),
        ("kind", "b", "b"),
        ("names", ["a", "b"], ("a", "b")),
        ("names", None, ()),
        ("shares", ["a=1", "b=2"], {"a": 1, "b": 2}),
        ("shares", None, None),
        ("is_on", None, None),
    ],
)
def test_a_text_becomes_the_value_of_a_field(field: str, text: Any, value: Any):
    found = next(one for one in options_of(Example) if one.field == field)
    parsed = found.parse_text(text) if isinstance(text, str) else found.parse(text)
    assert parsed == value
    check_options(Example(**{field: value}))


@pytest.mark.parametrize(
    ("field", "text", "error"),
    [
        ("count", "10", "--count must be an integer from 1 to 9, got 10"),
        ("count", "x", "--count must be an integer from 1 to 9, got x"),
        ("wait_ms", "61", "--wait must be a number of seconds from 0.001 to 60, got 61"),
        ("wait_ms", "inf", "--wait must be a number of seconds from 0.001 to 60, got inf"),
        ("kind", "c", "--kind must be one of a, b, got c"),
        ("shares", ["a"], "--share must be NAME=NUMBER, got 'a'"),
        ("shares", ["a=-1"], "--share must be NAME=NUMBER, got 'a=-1'"),
        ("shares", ["a=1", "a=2"], "--share has a twice: 1 and 2"),
    ],
)
def test_a_wrong_text_is_answered_with_what_is_allowed(field: str, text: Any, error: str):
    found = next(one for one in options_of(Example) if one.field == field)
    with pytest.raises(ValueError, match=f"^{re.escape(error)}$"):
        found.parse_text(text) if isinstance(text, str) else found.parse(text)


@pytest.mark.parametrize(
    ("field", "value", "needed"),
    [
        ("count", 0, "an integer from 1 to 9"),
        ("count", True, "an integer from 1 to 9"),
        ("count", 1.0, "an integer from 1 to 9"),
        ("kind", "c", "one of a, b"),
        ("kind", 1, "one of a, b"),
        ("is_on", 1, "true or false"),
        ("names", ["a"], "a list"),
        ("room_bytes_max", -1, "an integer of at least 0"),
    ],
)
def test_a_program_is_told_what_a_field_must_be(field: str, value: Any, needed: str):
    with pytest.raises(
        ValueError, match=f"^{field} must be {needed}, got {value!r}$".replace("[", r"\[")
    ):
        check_options(Example(**{field: value}))


@given(st.integers(0, 2**22), st.sampled_from(["", "B", "KiB", "MiB", "GiB", "TiB"]))
def test_a_size_is_parsed_in_any_spelling(number, unit):
    power = ["B", "KiB", "MiB", "GiB", "TiB"].index(unit or "B")
    for text in (f"{number}{unit}", f" {number} {unit.lower()} ", f"{number}.0{unit.upper()}"):
        assert parse_size(text) == number * 1024**power


@given(st.integers(0, 2**53))
def test_a_formatted_size_is_short_and_within_half_a_percent(size_bytes):
    shown = format_size(size_bytes)
    assert len(shown) <= len("0.976 TiB") or size_bytes >= 1000 * 1024**4
    number, unit = shown.split()
    read = float(number) * 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(read - size_bytes) <= 0.005 * size_bytes


def test_sizes_by_example():
    for text, size_bytes in {
        "64MiB": 64 << 20,
        "1.5 GiB": 3 << 29,
        "0.5KiB": 512,
        "2GB": 2 * 10**9,
        "3kB": 3000,
        "4096": 4096,
        "0.1 TB": 10**11,
    }.items():
        assert parse_size(text) == size_bytes
    for size_bytes, text in {
        0: "0 B",
        999: "999 B",
        1000: "0.977 KiB",
        1536: "1.5 KiB",
        64 << 20: "64 MiB",
        1 << 30: "1 GiB",
        1023 << 20: "0.999 GiB",
    }.items():
        assert format_size(size_bytes) == text


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("64M", "powers of 1024"),
        ("64 X", "powers of 1024"),
        ("0.3B", "not an integer"),
        ("1.0001KiB", "not an integer"),
        ("", "not a size"),
        ("-1", "not a size"),
        ("1e9", "not a size|unit"),
        ("MiB", "not a size"),
        ("1 2", "not a size"),
        ("0x10", "not a size"),
        ("٣", "not a size"),
        ("8388608TiB", "more than any machine has"),
        (f"{'9' * 400}GiB", "more than any machine has"),
    ],
)
def test_what_is_not_a_size_is_refused(text, reason):
    with pytest.raises(ValueError, match=reason):
        parse_size(text)
