"""The bytes on the wire: they never change, are read back equal, and are safe to decode.

`golden/messages.json` contains, for every message, all encodings that it has had, oldest first; the
last is written by this version, and all of them are read. Entries are added, never changed:

- A new message: write its example in `message_examples.py`, then run
  `PYTHONPATH=. python tests/messages/test_wire.py`; it adds what is missing and nothing else.
- A new field at the end, with a default: set it in the example, then run the same with the names
  of the longer messages (`request of protocol 2/LoadAdapter record of format 2/LoadAdapter`). The
  old bytes stay.
- A command that is no longer sent, and whose loss has no effect: remove its entry and its report's.
- Any other change needs a new `PROTOCOL_VERSION` or `FORMAT`, which is part of the new names.

Frames of protocol 1 (`request/LoadAdapter`) are refused by their version.
"""

import json
import random
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.messages import wire
from loradock.messages.commands import Command
from loradock.messages.errors import ErrorCode
from loradock.messages.events import Event, Published
from loradock.messages.records import Header, Input, Record
from loradock.messages.reports import Report
from loradock.messages.requests import (
    Reply,
    Request,
)
from loradock.messages.wire import (
    COMMANDS,
    EVENTS,
    PROTOCOL_VERSION,
    REPLIES,
    REPORTS,
    REQUESTS,
    WireError,
)
from tests.support.seeds import fresh_seed
from tests.support.simulation.message_examples import (
    EXAMPLES,
    VARIANTS,
    example_of,
    members,
    strategy,
)

GOLDEN = Path(__file__).parents[1] / "golden" / "messages.json"
TOKEN = b"a client's t"
EPOCH, SEQ, TIME_NS = 3, 2**40 + 7, 1_700_000_000_000_000_001
HEAD_BYTES = dict.fromkeys((REPLIES, COMMANDS, REPORTS, EVENTS), 20) | {REQUESTS: 32}
BATCHES = (REQUESTS, REPLIES, EVENTS)
PROTOCOL_1_CHANNELS = ("request", "reply", "command", "report", "event batch")
UNIONS = {REQUESTS: Request, REPLIES: Reply, COMMANDS: Command, REPORTS: Report, EVENTS: Event}
CHANNELS = {channel.name: channel for channel in UNIONS}


class Golden(msgspec.Struct, frozen=True):
    """A message with its encoder and decoder."""

    value: Any
    encode: Any
    decode: Any


def encode_on(channel: Any, message: Any) -> bytes:
    if channel is REQUESTS:
        return REQUESTS.encode(message, EPOCH, SEQ, TOKEN)
    frame: bytes = channel.encode(message, EPOCH, SEQ)
    return frame


def on_channel(channel: Any, message: Any) -> Golden:
    message = Published(SEQ, TIME_NS, message) if channel is EVENTS else message
    value = (message,) if channel in BATCHES else message
    return Golden(value, lambda v: encode_on(channel, v), lambda b: channel.decode(b).message)


def in_log(value: Any) -> Golden:
    decode = msgspec.msgpack.Decoder(type(value)).decode
    return Golden(value, msgspec.msgpack.Encoder().encode, decode)


CASES: dict[str, Golden] = {
    f"{channel.name} of protocol 2/{member.__name__}": on_channel(channel, EXAMPLES[member])
    for channel, union in UNIONS.items()
    for member in members(union)
    if member in EXAMPLES
}
CASES |= {
    name.replace("/", " of protocol 2/"): on_channel(CHANNELS[name.split("/")[0]], message)
    for name, message in VARIANTS.items()
}
for member in members(Input):
    if member in EXAMPLES:
        record = Record(TIME_NS, EXAMPLES[member], "d1", 2**64 - 1, SEQ)
        CASES |= {f"record of format 2/{member.__name__}": in_log(record)}
CASES["header"] = in_log(EXAMPLES[Header])


def golden_entries() -> dict[str, list[str]]:
    return json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}


def begins_with(longer: Any, shorter: Any) -> bool:
    """Every array of `shorter` is the beginning of its counterpart in `longer`; maps are equal."""
    if isinstance(longer, list) and isinstance(shorter, list):
        return len(longer) >= len(shorter) and all(map(begins_with, longer, shorter))
    return bool(longer == shorter)


def channel_of(name: str) -> Any:
    """Return the channel of a case; None for what is in the log."""
    return CHANNELS.get(name.split(" of ", maxsplit=1)[0])


def body_of(name: str, data: bytes) -> Any:
    return msgspec.msgpack.decode(data[HEAD_BYTES.get(channel_of(name), 0) :])


def is_of_protocol_1(name: str) -> bool:
    return name.split("/", maxsplit=1)[0] in PROTOCOL_1_CHANNELS


def test_every_message_has_an_example() -> None:
    for union in (*UNIONS.values(), Input):
        for member in members(union):
            example_of(member)


def test_the_golden_file_has_every_message_and_no_other() -> None:
    current = [name for name in golden_entries() if not is_of_protocol_1(name)]
    assert sorted(current) == sorted(CASES)


def test_frames_of_protocol_1_are_refused_by_their_version() -> None:
    old = {name: data for name, data in golden_entries().items() if is_of_protocol_1(name)}
    assert len(old) > 80
    for name, entries in old.items():
        for data in map(bytes.fromhex, entries):
            error = str(refused(CHANNELS[name.split("/")[0]], data))
            assert error == "protocol version 1; this side uses version 2"


@pytest.mark.parametrize("name", CASES)
def test_bytes_are_the_golden_ones(name: str) -> None:
    case, written = CASES[name], golden_entries().get(name)
    assert written, f"{name} has no golden bytes; this file's docstring says how to add them"
    assert case.encode(case.value).hex() == written[-1]
    assert case.decode(bytes.fromhex(written[-1])) == case.value


@pytest.mark.parametrize("name", CASES)
def test_older_bytes_are_still_read(name: str) -> None:
    for data in map(bytes.fromhex, golden_entries()[name]):
        again = CASES[name].encode(CASES[name].decode(data))
        assert begins_with(body_of(name, again), body_of(name, data))


def test_an_example_uses_every_field() -> None:
    for kind, example in EXAMPLES.items():
        for field in msgspec.structs.fields(kind):
            assert getattr(example, field.name) != field.default, f"{kind.__name__}.{field.name}"


@pytest.mark.parametrize("name", CHANNELS)
@given(data=st.data(), epoch=st.integers(0, 2**63 - 1), seq=st.integers(0, 2**63 - 1))
@settings(max_examples=100)
def test_a_message_is_decoded_unchanged(name: str, data: Any, epoch: int, seq: int) -> None:
    channel = CHANNELS[name]
    kind = strategy(Published if channel is EVENTS else UNIONS[channel])
    batches = st.lists(kind, min_size=channel is not EVENTS, max_size=3).map(tuple)
    message = data.draw(batches if channel in BATCHES else kind)
    assert channel.decode(channel.encode(message, epoch, seq)) == (epoch, seq, message)


@given(record=strategy(Record))
@settings(max_examples=100)
def test_a_record_is_decoded_unchanged(record: Record) -> None:
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(record), type=Record) == record


def refused(channel: Any, frame: bytes) -> WireError:
    with pytest.raises(WireError) as caught:
        channel.decode(frame)
    assert caught.value.code is ErrorCode.MALFORMED
    assert str(caught.value)
    return caught.value


def head(channel: Any) -> bytes:
    return encode_on(channel, ())[: HEAD_BYTES[channel]]


def frames_of_every_message() -> list[tuple[Any, bytes]]:
    return [
        (channel_of(name), case.encode(case.value))
        for name, case in CASES.items()
        if channel_of(name) is not None
    ]


@pytest.mark.parametrize("name", CHANNELS)
def test_foreign_frames_are_refused(name: str) -> None:
    channel, others = CHANNELS[name], set(CHANNELS.values()) - {CHANNELS[name]}
    good = next(frame for owner, frame in frames_of_every_message() if owner is channel)
    assert "protocol version 3" in str(refused(channel, good[:2] + b"\x03" + good[3:]))
    assert PROTOCOL_VERSION == 2
    assert "not a LoRADock frame" in str(refused(channel, b"XX" + good[2:]))
    assert "not a LoRADock frame" in str(refused(channel, b""))
    for other in others:
        assert "channel" in str(refused(other, good))


def test_a_frame_cut_anywhere_is_refused() -> None:
    for channel, frame in frames_of_every_message():
        for end in range(len(frame)):
            refused(channel, frame[:end])


def test_trailing_bytes_are_refused() -> None:
    for channel, frame in frames_of_every_message():
        refused(channel, frame + b"\x00")
        refused(channel, frame + frame)


def test_more_elements_than_fields_are_refused() -> None:
    for channel, frame in frames_of_every_message():
        head_bytes = HEAD_BYTES[channel]
        elements = msgspec.msgpack.decode(frame[head_bytes:])
        longer = [[*elements[0], 0]] if channel in BATCHES else [*elements, 0]
        refused(channel, frame[:head_bytes] + msgspec.msgpack.encode(longer))


@pytest.mark.parametrize(("channel", "bytes_max"), [(REQUESTS, 1 << 20), (COMMANDS, 34 << 20)])
def test_a_frame_beyond_its_bound_is_not_read(channel: Any, bytes_max: int) -> None:
    frame = head(channel) + bytes(bytes_max - HEAD_BYTES[channel] + 1)
    error = str(refused(channel, frame))
    assert f"of {bytes_max + 1} bytes" in error
    assert f"at most {bytes_max}" in error
    assert "at most" not in str(refused(channel, frame[:-1]))


Place = tuple[int, ...]


def parts_of(value: Any) -> list[Any]:
    """Return the elements of an array, or the keys and values of a map alternately."""
    if isinstance(value, dict):
        return [part for item in value.items() for part in item]
    return value if isinstance(value, list) else []


def places(value: Any, above: Place = ()) -> list[Place]:
    """Return every position in a message's body, including tags and nested values."""
    parts = enumerate(parts_of(value))
    return [above, *(place for i, part in parts for place in places(part, (*above, i)))]


def with_value(value: Any, place: Place, hostile: bytes) -> bytes:
    """Return the body with the part at `place` replaced by raw bytes."""
    if not place:
        return hostile
    parts = [
        with_value(part, place[1:], hostile) if i == place[0] else msgspec.msgpack.encode(part)
        for i, part in enumerate(parts_of(value))
    ]
    head, size = (b"\xde", len(value)) if isinstance(value, dict) else (b"\xdc", len(parts))
    return head + size.to_bytes(2, "big") + b"".join(parts)


HOSTILE_VALUES = {
    "nested arrays": b"\x91" * 1_000_000 + b"\xc0",
    "nested maps": b"\x81\xa0" * 500_000 + b"\xc0\xc0",
    "nested map keys": b"\x81" * 500_000 + b"\xc0" * 500_001,
    "array of 2**32 - 1": b"\xdd\xff\xff\xff\xff",
    "map of 2**32 - 1": b"\xdf\xff\xff\xff\xff",
    "string of 2**32 - 1": b"\xdb\xff\xff\xff\xff",
    "bytes of 2**32 - 1": b"\xc6\xff\xff\xff\xff",
    "extension of 2**32 - 1": b"\xc9\xff\xff\xff\xff\x01",
    "no UTF-8": b"\xa4\xff\xfe\x80\xc1",
    "a surrogate": b"\xa3\xed\xa0\x80",
    "a byte without meaning": b"\xc1",
    "a timestamp": b"\xd6\xff\x00\x00\x00\x00",
}


def refused_or_read_each(frame: bytes) -> tuple[Request, ...]:
    """Return the requests of a frame that are read one by one."""
    try:
        return REQUESTS.decode_each(frame).requests
    except WireError:
        return ()


def refused_everywhere(hostile: bytes) -> None:
    for channel, frame in frames_of_every_message():
        head_bytes = HEAD_BYTES[channel]
        body = msgspec.msgpack.decode(frame[head_bytes:])
        for place in places(body):
            hostile_frame = frame[:head_bytes] + with_value(body, place, hostile)
            error = refused(channel, hostile_frame)
            if channel is REQUESTS:
                assert not refused_or_read_each(hostile_frame)
            assert "at most" not in str(error), "refused for its size before it was read"


@pytest.mark.parametrize("hostile", HOSTILE_VALUES.values(), ids=HOSTILE_VALUES)
def test_a_hostile_value_in_any_field_is_refused(hostile: bytes) -> None:
    refused_everywhere(hostile)


def test_nesting_does_not_overflow_the_stack_of_a_small_thread() -> None:
    # Python 3.13 counts levels of C code instead of looking at the stack: 256 KiB are too few.
    before = threading.stack_size(512 * 1024)
    try:
        with ThreadPoolExecutor(1) as pool:
            pool.submit(refused_everywhere, HOSTILE_VALUES["nested arrays"]).result()
    finally:
        threading.stack_size(before)


def read_or_refused(channel: Any, frame: bytes) -> Any:
    """Return the message, None if the frame is refused; any other error fails the test."""
    try:
        return channel.decode(frame).message
    except WireError:
        return None


@given(body=st.binary(max_size=200))
@settings(max_examples=300)
def test_random_bodies_are_refused_or_read(body: bytes) -> None:
    for channel in CHANNELS.values():
        message = read_or_refused(channel, head(channel) + body)
        if message is not None:
            assert channel.decode(channel.encode(message)).message == message


def test_frames_with_wrong_bytes_are_refused_or_read() -> None:
    rng = random.Random(fresh_seed())
    for channel, frame in frames_of_every_message():
        for _ in range(100):
            wrong = bytearray(frame)
            for _ in range(rng.randint(1, 4)):
                wrong[rng.randrange(len(wrong))] = rng.randrange(256)
            read_or_refused(channel, bytes(wrong))


@given(st.lists(st.binary(max_size=12), max_size=12), st.integers(1, 20))
def test_messages_share_frames_in_order_and_as_many_as_fit(
    bodies: list[bytes], bytes_max: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(wire, "BATCH_MAX", 4)
        found = wire.batches(bodies, bytes_max)
    assert [body for batch in found for body in batch] == bodies
    for batch in found:
        assert 1 <= len(batch) <= 4
        assert len(batch) == 1 or sum(map(len, batch)) <= bytes_max
    for batch, (first, *_) in pairwise(found):
        assert len(batch) == 4 or sum(map(len, batch)) + len(first) > bytes_max


def add_entries(longer: list[str]) -> None:
    """Add missing golden bytes, and new ones after the old ones of the named messages."""
    entries = golden_entries()
    for name, case in CASES.items():
        data, written = case.encode(case.value).hex(), entries.setdefault(name, [])
        if not written or (name in longer and written[-1] != data):
            written.append(data)
            print(f"added {name}")
    GOLDEN.write_text(json.dumps(entries, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    add_entries(sys.argv[1:])
