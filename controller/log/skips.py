"""Inputs that a later record of the log skips, found ahead of a replay."""

from pathlib import Path
from typing import Final

from loradock.controller.log.segments import Segment, segment_paths
from loradock.controller.log.storage import DISK, Storage
from loradock.messages.ids import Seq
from loradock.messages.records import InputSkipped

_TAG: Final = InputSkipped.__name__.encode()


def skipped_inputs(directory: Path, storage: Storage = DISK, first_seq: Seq = 0) -> frozenset[Seq]:
    """Return the inputs that records from `first_seq` on skip; raises `LogError`.

    A segment is decoded only if the name of the message occurs in its bytes.
    """
    paths = segment_paths(directory, storage)
    while len(paths) > 1 and int(paths[1].stem) <= first_seq:
        del paths[0]
    found: set[Seq] = set()
    for path in paths:
        if _TAG not in storage.read(path):
            continue
        segment = Segment(path, None, path is paths[-1], storage)
        for _, _, record in segment.records(first_seq):
            if isinstance(record.input, InputSkipped):
                found.add(record.input.seq)
    return frozenset(found)
