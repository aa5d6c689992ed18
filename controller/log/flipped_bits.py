"""Search for a single flipped bit in a frame, so that it can be flipped back.

A frame that is one bit away from one that continues the chain was written whole, so its record may
have been acknowledged. A flip in its head is decided by the chain or by few checksums. For a flip
in its body, each bit is tried.
"""

from collections.abc import Iterable
from typing import Final, NamedTuple

import xxhash

from loradock.controller.log.format import (
    HEAD_BYTES,
    MARKER,
    RECORD_BYTES_MAX,
    ChainLink,
    whole_frame,
)

START_BYTES_MAX: Final = 1 << 33
"""Bound on the bytes that a search hashes at a start: some seconds, for a body of 32 kB."""

REPAIR_BYTES_MAX: Final = 1 << 40
"""Bound on the bytes that a search hashes in a repair: some minutes, for a body of 360 kB."""

# The fields of a frame's head, as offsets in bytes; see `loradock.controller.log.format`.
_CHECKSUM: Final = range(4, 12)
_LENGTH: Final = range(12, 16)
_SEQ: Final = range(16, 24)
_EPOCH: Final = range(24, 32)
_PREVIOUS: Final = range(32, 40)


class Flip(NamedTuple):
    """A flipped bit: number `bit` (0 is the lowest) of the byte at `offset`."""

    offset: int
    bit: int


def _bits(offsets: Iterable[int]) -> list[Flip]:
    return [Flip(offset, bit) for offset in offsets for bit in range(8)]


_LENGTH_BITS: Final = _bits(_LENGTH)
_EPOCH_BITS: Final = _bits(_EPOCH)
_PREVIOUS_BITS: Final = _bits(_PREVIOUS)


class SearchTooLongError(Exception):
    """The bytes may be a frame with one flipped bit, but it is too long for the search's bound."""


def flipped_bit(
    data: bytes, offset: int, link: ChainLink, is_header: bool, bytes_max: int
) -> Flip | None:
    """Return the bit whose flip makes the bytes at `offset` continue `link`; None if none does.

    The checksum of `link` is empty if the segment before a header is not known. Raises
    `SearchTooLongError` if the search would hash more than `bytes_max`.
    """
    if offset + HEAD_BYTES > len(data):
        return None
    rest = bytearray(data[offset:])
    seq = link.seq if is_header else link.seq + 1
    differing = [
        *_differences(rest, 0, MARKER),
        *_differences(rest, _SEQ.start, seq.to_bytes(len(_SEQ), "big")),
        *_differences(rest, _PREVIOUS.start, link.checksum),
    ]
    if len(differing) > 1:
        return None
    undecided = _LENGTH_BITS if link.checksum else _LENGTH_BITS + _PREVIOUS_BITS
    found = _first_valid(rest, differing or undecided, link, is_header)
    if found is None and not differing:
        found = _beyond_length(rest, link, is_header, bytes_max)
    return None if found is None else Flip(offset + found.offset, found.bit)


def with_flip(data: bytes, flip: Flip) -> bytes:
    """Return `data` with one bit flipped."""
    changed = bytearray(data)
    changed[flip.offset] ^= 1 << flip.bit
    return bytes(changed)


def _differences(rest: bytearray, offset: int, due: bytes) -> list[Flip]:
    """Return the bits in which the bytes at `offset` differ from those that are due there."""
    if rest.startswith(due, offset):
        return []
    return [
        flip
        for flip in _bits(range(offset, offset + len(due)))
        if (rest[flip.offset] ^ due[flip.offset - offset]) >> flip.bit & 1
    ]


def _first_valid(
    rest: bytearray, flips: Iterable[Flip], link: ChainLink, is_header: bool
) -> Flip | None:
    """Return the first flip after which `rest` begins with the frame that continues `link`."""
    for flip in flips:
        rest[flip.offset] ^= 1 << flip.bit
        is_valid = _continues(rest, link, is_header)
        rest[flip.offset] ^= 1 << flip.bit
        if is_valid:
            return flip
    return None


def _continues(rest: bytearray, link: ChainLink, is_header: bool) -> bool:
    frame = whole_frame(rest, 0)
    if frame is None:
        return False
    if is_header and not link.checksum:
        return frame.before.seq == link.seq
    if is_header:
        return frame.before == link
    seq, epoch, checksum = frame.before
    return seq == link.seq + 1 and epoch >= link.epoch and checksum == link.checksum


def _beyond_length(
    rest: bytearray, link: ChainLink, is_header: bool, bytes_max: int
) -> Flip | None:
    """Return the flip in the epoch, checksum or body of a frame, whose length is right."""
    size = int.from_bytes(rest[_LENGTH.start : _LENGTH.stop], "big")
    end = HEAD_BYTES + size
    if size > RECORD_BYTES_MAX or end > len(rest):
        return None
    covered, stated = rest[_CHECKSUM.stop : end], bytes(rest[_CHECKSUM.start : _CHECKSUM.stop])
    digest = xxhash.xxh3_64_digest
    differing = _differences(rest, _CHECKSUM.start, digest(covered))
    if len(differing) == 1:
        return differing[0]
    in_epoch = _first_valid(rest, _EPOCH_BITS, link, is_header)
    if in_epoch is not None:
        return in_epoch
    if 8 * size * len(covered) > bytes_max:
        raise SearchTooLongError
    for index in range(HEAD_BYTES - _CHECKSUM.stop, len(covered)):
        for bit in range(8):
            covered[index] ^= 1 << bit
            if digest(covered) == stated:
                return Flip(_CHECKSUM.stop + index, bit)
            covered[index] ^= 1 << bit
    return None
