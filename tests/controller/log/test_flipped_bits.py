"""A single flipped bit of a frame is found wherever it is, and nothing else is taken for one."""

from random import Random

import pytest

from loradock.controller.log.flipped_bits import (
    START_BYTES_MAX,
    Flip,
    SearchTooLongError,
    flipped_bit,
    with_flip,
)
from loradock.controller.log.format import CHAIN_START, ChainLink, frame_header, frame_records
from loradock.messages.records import Record, TimerFired
from tests.support.seeds import fresh_seed
from tests.support.simulation.log_examples import HEADER, make_records

HEAD, LINK = frame_header(HEADER, CHAIN_START)
FRAMES, _ = frame_records(make_records(12), 3, LINK)
UNKNOWN = ChainLink(0, 0, b"")


def search(
    data: bytes, offset: int, link: ChainLink = LINK, is_header: bool = False
) -> Flip | None:
    return flipped_bit(data, offset, link, is_header, START_BYTES_MAX)


@pytest.mark.parametrize("following", [b"", b"LDR1 torn", b"".join(FRAMES[1:])])
def test_any_bit_of_a_record_is_found(following: bytes) -> None:
    data, start = HEAD + FRAMES[0] + following, len(HEAD)
    for offset in range(start, start + len(FRAMES[0])):
        for bit in range(8):
            flip = Flip(offset, bit)
            assert search(with_flip(data, flip), start) == flip


@pytest.mark.parametrize("link", [CHAIN_START, UNKNOWN])
def test_any_bit_of_a_header_is_found_also_without_the_segment_before_it(link: ChainLink) -> None:
    for offset in range(len(HEAD)):
        for bit in range(8):
            flip = Flip(offset, bit)
            assert search(with_flip(HEAD + FRAMES[0], flip), 0, link, is_header=True) == flip


def test_two_flipped_bits_are_not_mended() -> None:
    seed = fresh_seed()
    rng, size = Random(seed), len(FRAMES[0])
    for _ in range(300):
        first, second = rng.sample(range(8 * size), 2)
        data = with_flip(FRAMES[0], Flip(first // 8, first % 8))
        assert search(with_flip(data, Flip(second // 8, second % 8)), 0) is None


def test_a_part_of_a_frame_is_a_torn_tail() -> None:
    for cut in range(len(FRAMES[0])):
        assert search(FRAMES[0][:cut], 0) is None
        for zeros in (cut % 7, 200):
            torn = FRAMES[0][:cut] + bytes(zeros)
            found = search(torn, 0)
            # A last byte with one bit set may be missing: the zero in its place is one flip away.
            assert found is None or with_flip(torn, found).startswith(FRAMES[0])


def test_a_whole_frame_that_does_not_continue_is_not_made_to() -> None:
    for frame in FRAMES[1:]:
        assert search(frame, 0) is None
    one_off = ChainLink(LINK.seq, LINK.epoch, bytes([LINK.checksum[0] ^ 1]) + LINK.checksum[1:])
    assert search(FRAMES[0], 0, one_off) is None
    assert search(FRAMES[0], 0, ChainLink(LINK.seq, 4, LINK.checksum)) is None


def test_a_search_has_a_bound() -> None:
    (frame,), _ = frame_records([Record(1, TimerFired(), "d" * 10_000)], 1, LINK)
    damaged = with_flip(frame, Flip(9_000, 3))
    with pytest.raises(SearchTooLongError):
        flipped_bit(damaged, 0, LINK, False, 8 * 10_000 * 10_000)
    assert flipped_bit(damaged, 0, LINK, False, 9 * 10_000 * 10_000) == Flip(9_000, 3)
    # Only a body is searched bit by bit.
    for offset in (0, 5, 13, 20, 30, 35):
        assert flipped_bit(with_flip(frame, Flip(offset, 3)), 0, LINK, False, 0) == Flip(offset, 3)
