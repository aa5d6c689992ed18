"""Published events by their number, in a sqlite database that is made from the log.

The log is the truth, and the database follows it: a snapshot's replay writes the events, and a lost
or corrupt database is removed and written again from the log's first record, if that is there. A
row is an event in msgpack after the xxh3_64 of it, seeded with its number.

The database has a rollback journal and no write-ahead log: after a failed sync the journal puts the
old pages back, whereas a write-ahead log would have pages that are only in memory and count as
written. Readers wait for a commit, which writes `CHUNK_BYTES` at most.
"""

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

import msgspec
import xxhash

from loradock.controller.log.format import UNDECODABLE, LogError, LogForeign
from loradock.controller.log.segments import EVENTS_NAME
from loradock.controller.log.storage import CHUNK_BYTES, DISK, Storage, UnreadableError
from loradock.messages.events import Published
from loradock.messages.ids import Seq

SCHEMA: Final = 1
"""The number of the schema, in the database's `user_version`; 0 is an empty database."""

_CHECKSUM_BYTES: Final = 8
_DELETED_PER_COMMIT: Final = 1024
_SEQ_MAX: Final = 2**63 - 1
_ARRAY: Final = b"\xdd"
"""The first byte of an array in msgpack with a length of 32 bits."""

_CREATE: Final = "CREATE TABLE IF NOT EXISTS events (seq INTEGER PRIMARY KEY, event BLOB NOT NULL)"
_INSERT: Final = "INSERT OR REPLACE INTO events VALUES (?, ?)"
# A corrupt row can have any type.
_SELECT: Final = (
    "SELECT seq, CAST(coalesce(event, '') AS BLOB) FROM events WHERE seq >= ? ORDER BY seq LIMIT ?"
)

# The general error is that of statements which do not fit the schema.
_CORRUPT: Final = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)

_encode: Final = msgspec.msgpack.Encoder().encode
_decode: Final = msgspec.msgpack.Decoder(tuple[Published, ...]).decode


class EventsCorrupt(LogError):  # noqa: N818 - named after the event, as its relatives
    """The database has other bytes than those that were written."""

    def __init__(self, path: Path, reason: object) -> None:
        super().__init__(
            f"{path} is corrupt: {reason}; `loradock log compact` makes it again from the log"
        )


def events_path(directory: Path) -> Path:
    """Return the path of a log's database of events."""
    return directory / EVENTS_NAME


@contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Raise the errors of sqlite as errors of the log."""
    try:
        yield
    except UnreadableError as error:
        raise LogError(f"{path}: {error}") from error
    except sqlite3.Error as error:
        if getattr(error, "sqlite_errorcode", 0) & 0xFF in _CORRUPT:
            raise EventsCorrupt(path, error) from error
        raise LogError(f"{path}: {error}") from error


def _schema_of(connection: sqlite3.Connection, path: Path) -> int:
    """Return the schema's number; raises `LogForeign` for one of another version."""
    (schema,) = connection.execute("PRAGMA user_version").fetchone()
    if schema not in (0, SCHEMA):
        raise LogForeign(f"{path}: schema {schema}; this version reads schema {SCHEMA}")
    return int(schema)


class EventReader:
    """Reads events by number while another process can write or remove them.

    Each call opens the database, so it sees the last commit. Raises `LogError` and `OSError`.
    """

    def __init__(self, directory: Path, storage: Storage = DISK) -> None:
        self._path = events_path(directory)
        self._storage = storage

    @property
    def oldest_seq(self) -> Seq:
        """The number of the oldest event, 0 if there is none."""
        return self._seq("SELECT min(seq) FROM events")

    @property
    def newest_seq(self) -> Seq:
        """The number of the newest event, 0 if there is none."""
        return self._seq("SELECT max(seq) FROM events")

    def next_seq(self, seq: Seq) -> Seq:
        """Return the first number from `seq` on whose event is there, 0 if there is none."""
        return self._seq("SELECT min(seq) FROM events WHERE seq >= ?", min(seq, _SEQ_MAX))

    def read(self, first_seq: Seq, count_max: int) -> tuple[Published, ...]:
        """Return up to `count_max` events from number `first_seq` on, without a gap.

        The result is empty if event `first_seq` is not there, and ends before one that is corrupt;
        `EventsCorrupt` is raised if that is the first.
        """
        rows = self._rows(_SELECT, min(first_seq, _SEQ_MAX), count_max)
        bodies: list[bytes] = []
        for due, (seq, row) in enumerate(rows, start=first_seq):
            if seq != due:
                break
            body = row[_CHECKSUM_BYTES:]
            if xxhash.xxh3_64_digest(body, seed=seq) == row[:_CHECKSUM_BYTES]:
                bodies.append(body)
            elif bodies:
                break
            else:
                raise EventsCorrupt(self._path, f"event {seq} is not the one that was written")
        try:
            return _decode(b"".join((_ARRAY, len(bodies).to_bytes(4, "big"), *bodies)))
        except UNDECODABLE as error:
            raise LogForeign(
                f"{self._path}: its events are intact, but unknown here: {error}"
            ) from error

    def problem(self, count_max: int) -> str:
        """Return what is wrong with the database, '' if nothing; all of it is read.

        `count_max` events are in memory at once.
        """
        try:
            [(found,)] = self._rows("PRAGMA integrity_check(1)") or [("ok",)]
            if found != "ok":
                return str(EventsCorrupt(self._path, found))
            seq = self.oldest_seq
            while seq:
                seq = self.next_seq(self.read(seq, count_max)[-1].seq + 1)
        except LogError as error:
            return str(error)
        return ""

    def _seq(self, statement: str, *values: int) -> Seq:
        rows = self._rows(statement, *values)
        seq = (rows[0][0] or 0) if rows else 0
        if not isinstance(seq, int):
            raise EventsCorrupt(self._path, f"{seq!r} is not an event's number")
        return seq

    def _rows(self, statement: str, *values: int) -> list[tuple[Any, ...]]:
        """Return the rows of a query, none without a database."""
        with _errors_of(self._path):
            try:
                connection = self._storage.connect(self._path)
            except FileNotFoundError:
                return []
            with closing(connection):
                is_empty = not _schema_of(connection, self._path)
                return [] if is_empty else connection.execute(statement, values).fetchall()


class EventWriter:
    """Writes events to a log's database, for one process at a time.

    What was added is durable once its `with` statement has ended without an exception. A database
    that is corrupt or of another version is removed first; `removed` is why, '' if none was. Raises
    `LogError` and `OSError`.
    """

    def __init__(self, directory: Path, storage: Storage = DISK) -> None:
        self._path = events_path(directory)
        self._storage = storage
        self._rows: list[tuple[Seq, bytes]] = []
        self._bytes = 0
        self.removed = ""
        try:
            self._connection = self._connect()
        except (EventsCorrupt, LogForeign) as error:
            self.removed = str(error)
            storage.remove(self._path)
            self._connection = self._connect()

    def _connect(self) -> sqlite3.Connection:
        with _errors_of(self._path):
            connection = self._storage.connect(self._path, create=True)
            try:
                # Commits are durable when they return.
                connection.execute("PRAGMA synchronous = EXTRA")
                if not _schema_of(connection, self._path):
                    connection.execute(_CREATE)
                    connection.execute(f"PRAGMA user_version = {SCHEMA}")
                    connection.commit()
                connection.execute("SELECT max(seq) FROM events")
            except BaseException:
                connection.close()
                raise
            return connection

    def add(self, events: Sequence[Published]) -> None:
        """Add events, which replace those with their numbers: the log may have been cut since."""
        for event in events:
            body = _encode(event)
            self._rows.append((event.seq, xxhash.xxh3_64_digest(body, seed=event.seq) + body))
            self._bytes += len(body)
            if self._bytes >= CHUNK_BYTES:
                self._commit()

    @property
    def newest_seq(self) -> Seq:
        """The number of the newest event that was committed, 0 if there is none."""
        with self._errors():
            [(seq,)] = self._connection.execute("SELECT max(seq) FROM events")
        return seq or 0

    def cut_after(self, seq: Seq) -> None:
        """Drop the events after number `seq`: a log that was cut can have others there."""
        self._delete("seq > ?", seq)

    def drop_before(self, seq: Seq) -> None:
        """Drop the events before number `seq`."""
        self._delete("seq < ?", seq)

    def _delete(self, condition: str, seq: Seq) -> None:
        self._commit()
        some = f"SELECT seq FROM events WHERE {condition} LIMIT {_DELETED_PER_COMMIT}"  # noqa: S608
        with self._errors():
            while self._connection.execute(
                f"DELETE FROM events WHERE seq IN ({some})",  # noqa: S608 - our own conditions
                (seq,),
            ).rowcount:
                self._connection.commit()
            self._connection.rollback()

    def _commit(self) -> None:
        rows, self._rows, self._bytes = self._rows, [], 0
        if rows:
            with self._errors():
                self._connection.executemany(_INSERT, rows)
                self._connection.commit()

    @contextmanager
    def _errors(self) -> Iterator[None]:
        """Raise the errors of sqlite as errors of the log; a corrupt database is removed."""
        try:
            with _errors_of(self._path):
                yield
        except EventsCorrupt:
            self._connection.close()
            self._storage.remove(self._path)
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if kind is None:
                self._commit()
        finally:
            self._connection.close()
