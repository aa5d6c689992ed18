"""Damages of a log's files: what a start and `log repair` do after each, and what it costs.

The log has four segments of 16 records and two snapshots, after records 24 and 56. Each damage is
done to each of its files.
"""

import os
import shutil
import sqlite3
from collections.abc import Callable
from contextlib import closing
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import msgspec
import xxhash
from structlog.testing import capture_logs

from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import LimitsError
from loradock.controller.log.events import events_path
from loradock.controller.log.format import (
    LogError,
    LogForeign,
    frame_header,
    whole_frame,
)
from loradock.controller.log.repair import RepairPlan, repair
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import LOCK_NAME, NO_SYNC_FAILED, segment_path
from loradock.controller.log.snapshots import read_snapshot, snapshot_path
from loradock.controller.log.snapshotter import SnapshotOrder, make_snapshot
from loradock.controller.log.writer import Log
from loradock.controller.server.admin import SettingsFile
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.event_stream import EventStream
from loradock.controller.server.inputs import recover
from loradock.controller.server.process import _open_log
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.messages.records import FORMAT
from tests.support.simulation.log_examples import flip
from tests.support.simulation.logged_histories import header_of, history
from tests.support.sources import ROOT

RECORDS: Final = 64
SEGMENT_RECORDS: Final = 16
SNAPSHOTS: Final = (24, 56)
SEED: Final = 3
OTHER_SEED: Final = 4

FILES: Final = {
    "segment 1": segment_path(Path(), 1).name,
    "segment 2": segment_path(Path(), 17).name,
    "segment 3": segment_path(Path(), 33).name,
    "segment 4": segment_path(Path(), 49).name,
    "older snapshot": snapshot_path(Path(), 24).name,
    "newer snapshot": snapshot_path(Path(), 56).name,
    "events.sqlite": events_path(Path()).name,
    "no-sync-failed": NO_SYNC_FAILED,
    "snapshotter.lock": LOCK_NAME,
}
"""The names of the log's files; the segments begin with records 1, 17, 33 and 49."""


@cache
def digests(seed: int = SEED) -> tuple[str, ...]:
    """Return the digests of the states before the first record and after each."""
    limits, records = history(seed, 100)
    controller = Controller(limits)
    found = [controller.digest()]
    for record in records[:RECORDS]:
        controller.handle(record.input, record.time_ns, record.body, record.report_seq)
        found.append(controller.digest())
    return tuple(found)


def write_log(directory: Path, seed: int = SEED) -> None:
    """Write the log; that of another seed is another log with files of the same names."""
    limits, records = history(seed, 100)
    for first in range(0, RECORDS, SEGMENT_RECORDS):
        # The bound on a segment's size is exceeded, so each group begins one.
        with Log(directory, header_of(limits), segment_bytes_max=1) as log:
            group = records[first : first + SEGMENT_RECORDS]
            pairs = zip(group, digests(seed)[first:], strict=False)
            log.append([msgspec.structs.replace(r, digest=digest) for r, digest in pairs], 1)
    for seq in SNAPSHOTS:
        make_snapshot(directory, SnapshotOrder(seq, Retention("keep")))


# The damages


def lost(path: Path, _other: Path) -> None:
    path.unlink()


def emptied(path: Path, _other: Path) -> None:
    os.truncate(path, 0)


def cut_by_a_byte(path: Path, _other: Path) -> None:
    os.truncate(path, max(0, path.stat().st_size - 1))


def a_bit_flipped(path: Path, _other: Path) -> None:
    """In the middle; in an empty file there is no bit."""
    if size := path.stat().st_size:
        flip(path, size // 2, 3)


def three_bits_flipped(path: Path, _other: Path) -> None:
    """Near the beginning, in the middle and in the last byte."""
    if size := path.stat().st_size:
        for offset in (min(50, size - 1), size // 2, size - 1):
            flip(path, offset, offset % 8)


def duplicated(path: Path, _other: Path) -> None:
    """Copied to the name of the record after its own; the content of other files is doubled."""
    if path.stem.isdigit():
        shutil.copy(path, path.with_stem(f"{int(path.stem) + 1:020}"))
    else:
        path.write_bytes(path.read_bytes() * 2)


def swapped(path: Path, _other: Path) -> None:
    """With the next file of the list, the last with the first."""
    names = [*FILES.values()]
    partner = path.with_name(names[(names.index(path.name) + 1) % len(names)])
    spare = path.with_name("spare")
    path.rename(spare)
    partner.rename(path)
    spare.rename(partner)


def from_another_log(path: Path, other: Path) -> None:
    shutil.copy(other / path.name, path)


def of_another_version(path: Path, _other: Path) -> None:
    """With another format's number; files without such a number are as version 0.1 wrote them."""
    if path.suffix == ".log":
        data = path.read_bytes()
        first = whole_frame(data, 0)
        assert first is not None
        header = msgspec.structs.replace(header_of(history(SEED, 100)[0]), format=FORMAT + 1)
        frame, _ = frame_header(header, first.before)
        path.write_bytes(frame + data[first.end :])
    elif path.suffix == ".snap":
        snapshot = msgspec.structs.replace(read_snapshot(path), format=FORMAT + 1)
        body = msgspec.msgpack.encode(snapshot)
        path.write_bytes(path.read_bytes()[:4] + xxhash.xxh3_128_digest(body) + body)
    elif path.suffix == ".sqlite":
        with closing(sqlite3.connect(path)) as connection:
            connection.execute("PRAGMA user_version = 99")
    else:
        path.write_bytes(b"")


def a_fifo(path: Path, _other: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def a_directory(path: Path, _other: Path) -> None:
    path.unlink()
    path.mkdir()


DAMAGES: Final[dict[str, Callable[[Path, Path], None]]] = {
    "lost": lost,
    "emptied": emptied,
    "cut by a byte": cut_by_a_byte,
    "a bit flipped": a_bit_flipped,
    "three bits flipped": three_bits_flipped,
    "duplicated": duplicated,
    "swapped with the next": swapped,
    "from another log": from_another_log,
    "of another version": of_another_version,
    "a FIFO": a_fifo,
    "a directory": a_directory,
}


# The outcomes

START: Final = "loradock serve"
REPAIR: Final = "loradock log repair --yes"
MOVE: Final = "move the file to another directory"


class Outcome(NamedTuple):
    """What leads from a damage to a serving controller, which then has `records` records.

    `texts` is what the starts printed, `plan` what the repair did.
    """

    commands: tuple[str, ...]
    records: int
    digest: str
    texts: tuple[str, ...]
    plan: RepairPlan | None

    @property
    def lost(self) -> str:
        """The acknowledged inputs that are lost, by number."""
        first = self.records + 1
        if first > RECORDS:
            return "none"
        return f"{first}" if first == RECORDS else f"{first} to {RECORDS}"


def start(directory: Path, texts: list[str]) -> tuple[int, str] | None:
    """Start as a controller does, up to its first record: number of records and digest.

    None if it refuses to. What it prints is added to `texts`.
    """
    limits, _ = history(SEED, 100)
    config = ServerConfig(str(directory), limits)
    with capture_logs() as lines:
        try:
            with (
                _open_log(config, SettingsFile(directory, limits, "lru")) as opened,
                closing(EventStream(opened.directory)) as events,
            ):
                snapshots = SnapshotProcess(opened.directory, 0, Retention())
                controller, _ = recover(config, opened, events, snapshots)
                events.end_recovery(controller.world.events_seq)
        except (LogError, LimitsError) as error:
            texts.append(str(error))
            return None
        finally:
            texts += [str(line) for line in lines if line["log_level"] == "warning"]
    return controller.world.seq, controller.digest()


def outcome(directory: Path, damaged: Path) -> Outcome:
    """Do what an operator does: start; if that is refused repair, after moving a foreign file."""
    texts: list[str] = []
    commands: list[str] = []
    plan: RepairPlan | None = None
    started = start(directory, texts)
    if started is None:
        try:
            plan = repair(directory / "log")
        except LogForeign as error:
            texts.append(str(error))
            damaged.rename(directory / damaged.name)
            commands.append(MOVE)
            plan = repair(directory / "log")
        if plan is not None:
            commands.append(REPAIR)
        started = start(directory, texts)
    if started is None:
        raise AssertionError(f"no command leads to a serving controller: {texts}")
    return Outcome((*commands, START), *started, tuple(texts), plan)


def outcomes(directory: Path) -> dict[tuple[str, str], Outcome]:
    """Do each damage to each file, in a copy of the log below `directory`."""
    write_log(directory / "whole" / "log")
    write_log(directory / "other" / "log", OTHER_SEED)
    found = {}
    for file, name in FILES.items():
        for damage, do in DAMAGES.items():
            copy = directory / f"{file} {damage}"
            shutil.copytree(directory / "whole", copy)
            do(copy / "log" / name, directory / "other" / "log")
            found[file, damage] = outcome(copy, copy / "log" / name)
    return found


# The table of docs/operating.md

BEGIN: Final = "<!-- damages: generated by make damages -->\n"
OTHERS: Final = "any other"
END: Final = "<!-- end of the damages -->\n"


def table(found: dict[tuple[str, str], Outcome]) -> str:
    """Return the outcomes in Markdown; files and damages with one outcome share a row."""
    rows: dict[tuple[str, str, str], list[str]] = {}
    for file in FILES:
        by_outcome: dict[tuple[tuple[str, ...], str], list[str]] = {}
        for damage in DAMAGES:
            cell = found[file, damage]
            by_outcome.setdefault((cell.commands, cell.lost), []).append(damage)
        for (commands, lost), damages in by_outcome.items():
            others = lost == "none" and commands == (START,) and len(damages) > 3
            text = OTHERS if others else ", ".join(damages)
            sequence = ", then ".join(f"`{one}`" if one != MOVE else one for one in commands)
            rows.setdefault((text, sequence, lost), []).append(file)
    lines = [
        "| file | damage | what leads to a serving controller | lost inputs |",
        "|---|---|---|---|",
    ]
    ordered = sorted(rows.items(), key=lambda row: row[0][0] == OTHERS)
    lines += [f"| {', '.join(files)} | {' | '.join(row)} |" for row, files in ordered]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Write the table into docs/operating.md."""
    page = ROOT / "docs" / "operating.md"
    text = page.read_text()
    head, tail = text.split(BEGIN)[0], text.split(END)[1]
    with TemporaryDirectory() as directory:
        page.write_text(head + BEGIN + table(outcomes(Path(directory))) + END + tail)


if __name__ == "__main__":
    main()
