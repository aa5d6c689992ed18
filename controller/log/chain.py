"""The longest chain of records in the files of a corrupt log, by checksums and not by file names.

Corruption leaves pieces of files whose frames continue one another. The pieces are joined where one
continues another, in whatever file it is, and after a snapshot where one continues its last record.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from msgspec import Struct
from msgspec.structs import replace

from loradock.controller.log.format import (
    CHAIN_START,
    UNDECODABLE,
    ChainLink,
    LogError,
    Scan,
    decode_record,
    frame_body,
    frame_header,
    read_header,
    whole_frame,
    whole_frames,
)
from loradock.controller.log.snapshots import MARKS_MAX, Snapshot
from loradock.controller.log.storage import Storage
from loradock.messages.ids import Seq
from loradock.messages.records import FORMAT, Header


class Piece(Struct, frozen=True, eq=False):
    """Frames in a file, from `begin` to `end`; the first continues `before`, `link` is the end.

    `header` is the first frame's if that is a segment's header.
    """

    file: Path
    begin: int
    end: int
    before: ChainLink
    link: ChainLink
    header: Header | None = None

    @property
    def is_named(self) -> bool:
        """True if it is the beginning of a segment in the file of its name."""
        is_first = self.header is not None and self.begin == 0
        return is_first and self.file.name == f"{self.before.seq + 1:020}.log"


class Chain(NamedTuple):
    """Pieces that continue one another.

    With `snapshot` they continue its last record, in the middle of a segment whose beginning is
    corrupt. Otherwise the first begins with a header.
    """

    pieces: tuple[Piece, ...] = ()
    snapshot: Snapshot | None = None

    @property
    def end(self) -> ChainLink:
        """The link after the last record."""
        if self.pieces:
            return self.pieces[-1].link
        return CHAIN_START if self.snapshot is None else self.snapshot.position.link


def pieces_in(file: Path, data: bytes) -> Iterator[Piece]:
    """Yield the pieces of a file; raises `LogForeign` for the format of another version."""
    offset = 0
    while (found := next(whole_frames(data, offset), None)) is not None:
        begin, frame = found
        header, before = _header_of(frame.body, file), frame.before
        if header is None:
            before = before._replace(seq=before.seq - 1)
        scan = Scan(data, frame.end, frame.link)
        for _ in scan.frames():
            pass
        yield Piece(file, begin, scan.offset, before, scan.link, header)
        offset = scan.offset


def _header_of(body: bytes, file: Path) -> Header | None:
    """Return the header in a frame that continues no record, None for a record."""
    try:
        decode_record(body)
    except UNDECODABLE:
        return read_header(body, file)
    return None


def _scan_of(piece: Piece, storage: Storage) -> Scan:
    """Return a scan of a piece's records; it begins after its header, if it has one."""
    data = storage.read(piece.file)[: piece.end]
    if piece.header is None:
        return Scan(data, piece.begin, piece.before)
    header = whole_frame(data, piece.begin)
    if header is None:
        raise LogError(f"{piece.file}: it has changed while it was read")
    return Scan(data, header.end, header.link)


class Chains:
    """The chains that a log's pieces form, and its snapshots, which verify, on them."""

    def __init__(
        self, pieces: Sequence[Piece], snapshots: Sequence[Snapshot], storage: Storage
    ) -> None:
        self._pieces = pieces
        self._snapshots = snapshots
        self._starting_at: dict[tuple[Seq, bytes], list[Piece]] = defaultdict(list)
        for piece in pieces:
            self._starting_at[piece.before.seq, piece.before.checksum].append(piece)
        self._next: dict[Piece, Piece] = {}
        self._end: dict[Piece, Seq] = {}
        # The last first: what continues a piece is known then.
        for piece in sorted(pieces, key=lambda p: (-p.link.seq, p.before.seq != p.link.seq)):
            follower = self._best_after(piece.link)
            self._end[piece] = piece.link.seq if follower is None else self._end[follower]
            if follower is not None:
                self._next[piece] = follower
        self._places = {
            snapshot.seq: list(_places(snapshot.position.link, pieces, storage))
            for snapshot in snapshots
        }

    def _best_after(self, link: ChainLink) -> Piece | None:
        found = [p for p in self._starting_at[link.seq, link.checksum] if p in self._end]
        return max(found, key=lambda p: (self._end[p], p.is_named), default=None)

    def _from(self, first: Piece | None) -> Iterator[Piece]:
        while first is not None:
            yield first
            first = self._next.get(first)

    def longest(self) -> Chain:
        """Return the chain that a log continues with: the one that ends last.

        Of several, it is one that needs no new segment, and of those the one that begins first.
        """
        whole = max(self._whole(), key=lambda c: (c.end.seq, -c.pieces[0].before.seq), default=None)
        after = max(self._after_snapshots(whole), key=lambda c: c.end.seq, default=None)
        if whole is None or (after is not None and after.end.seq > whole.end.seq):
            return after or Chain()
        return whole

    def _whole(self) -> Iterator[Chain]:
        """Yield the chains that begin with the first record, or have a snapshot on them."""
        for piece in self._pieces:
            if piece.header is not None:
                chain = Chain(tuple(self._from(piece)))
                if piece.before == CHAIN_START or self.on(chain):
                    yield chain

    def _after_snapshots(self, whole: Chain | None) -> Iterator[Chain]:
        """Yield the chains after each snapshot, the newest first."""
        own = self.on(whole) if whole is not None else []
        for snapshot in sorted(self._snapshots, key=lambda s: -s.seq):
            if not all(_precedes(other, snapshot) for other in own):
                continue
            following = [tuple(self._from(self._best_after(snapshot.position.link)))]
            for piece, rest in self._places[snapshot.seq]:
                later = tuple(self._from(self._next.get(piece)))
                following.append((rest, *later) if rest is not None else later)
            pieces = max(following, key=lambda pieces: pieces[-1].link.seq if pieces else 0)
            yield Chain(pieces, snapshot)

    def on(self, chain: Chain) -> list[Snapshot]:
        """Return the snapshots that a log with this chain can be continued from."""
        if chain.snapshot is not None:
            return [chain.snapshot]
        pieces, begin = set(chain.pieces), chain.pieces[0].before if chain.pieces else None
        return [
            snapshot
            for snapshot in self._snapshots
            if snapshot.position.link == begin
            or any(piece in pieces for piece, _ in self._places[snapshot.seq])
        ]


def _precedes(earlier: Snapshot, later: Snapshot) -> bool:
    """Return whether two snapshots can be of one log: the later knows the earlier's numbers."""
    if earlier.seq >= later.seq or len(later.marks) >= MARKS_MAX // 2:
        return True
    return earlier.marks[-1] in later.marks


def _places(
    link: ChainLink, pieces: Iterable[Piece], storage: Storage
) -> Iterator[tuple[Piece, Piece | None]]:
    """Yield the pieces in which this link occurs, and the rest of each after it."""
    for piece in pieces:
        if not piece.before.seq <= link.seq <= piece.link.seq:
            continue
        scan = _scan_of(piece, storage)
        if scan.link.seq < link.seq:
            with closing(scan.frames()) as frames:
                for seq, _, _ in frames:
                    if seq == link.seq:
                        break
        if scan.link.checksum == link.checksum:
            is_end = scan.offset == piece.end
            rest = None if is_end else replace(piece, begin=scan.offset, before=link, header=None)
            yield piece, rest


def reframed(
    snapshot: Snapshot, pieces: Iterable[Piece], storage: Storage
) -> Iterator[tuple[Seq, bytes]]:
    """Yield first record and content of new segments, with the records that follow a snapshot."""
    header = Header(FORMAT, snapshot.rules, snapshot.policy, snapshot.limits, 0)
    link = start = snapshot.position.link
    frame, link = frame_header(replace(header, first_seq=start.seq + 1), start)
    frames = [frame]
    for piece in pieces:
        if piece.header is not None:
            if link.seq > start.seq:
                yield start.seq + 1, b"".join(frames)
                start = link
            frame, link = frame_header(replace(piece.header, first_seq=start.seq + 1), start)
            frames = [frame]
        for seq, epoch, body in _scan_of(piece, storage).frames():
            frame, link = frame_body(body, seq, epoch, link)
            frames.append(frame)
    yield start.seq + 1, b"".join(frames)
