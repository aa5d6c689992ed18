"""docs/wire.md: it is up to date, and its frames are read by the code that it describes."""

import re

import msgspec
import pytest

from loradock.messages.wire import TOKEN_BYTES
from tests.support.simulation.message_examples import EXAMPLES, members
from tests.wire_format import GROUPS, PAGE, Group, wire_page

TEXT = PAGE.read_text()
HEX_LINE = re.compile(r"((?:[0-9a-f]{2} )*[0-9a-f]{2})(?: {2,}.*)?")


def section(title: str) -> str:
    """Return the text below a title, up to the next one of any level."""
    [found] = re.findall(rf"^##+ {title}\n(.*?)(?=^##|\Z)", TEXT, flags=re.M | re.S)
    return found


def shown_bytes(title: str) -> bytes:
    """Return the bytes in the block of a section."""
    [block] = re.findall(r"```text\n(.*?)```", section(title), flags=re.S)
    matches = map(HEX_LINE.fullmatch, block.splitlines())
    return b"".join(bytes.fromhex(match[1]) for match in matches if match)


def test_the_page_is_up_to_date() -> None:
    assert wire_page(TEXT) == TEXT, "run `make wire`"


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_a_frame_of_the_page_is_read(group: Group) -> None:
    frame = shown_bytes(group.title)
    group.channel.decode(frame)
    # The places in the page's table of the header.
    assert frame[:2] == b"LD"
    assert frame[3:4].decode() in section("Frames")
    body = 20 + (TOKEN_BYTES if group.title == "Requests" else 0)
    msgspec.msgpack.decode(frame[body:])


@pytest.mark.parametrize("group", GROUPS, ids=lambda group: group.title)
def test_the_bytes_of_each_message_are_its_example(group: Group) -> None:
    decode = msgspec.msgpack.Decoder(group.union).decode
    for member in members(group.union):
        assert decode(shown_bytes(member.__name__)) == EXAMPLES[member]


def test_links_within_the_page_lead_to_its_titles() -> None:
    titles = {title.lower().replace(" ", "-") for title in re.findall(r"^##+ (.+)$", TEXT, re.M)}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= titles
