"""Histories for the tests of logs: random ones, and a short one of one adapter."""

from functools import cache
from pathlib import Path

import msgspec

from loradock.controller.core.actions import Action
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.storage import DISK, Storage
from loradock.controller.log.writer import Log
from loradock.messages.records import FORMAT, ControllerStarted, Header, Input, Record
from loradock.messages.reports import (
    AdapterChecked,
    EngineInventory,
    SlotWritten,
    WeightsLoaded,
    WeightsStaged,
)
from loradock.messages.requests import HoldAdapter, ReleaseAdapter
from tests.support.simulation.workload import random_history

_decode = msgspec.msgpack.Decoder(Record).decode

SEGMENT_BYTES = 900
"""A history has several segments of this size."""

LIMITS = Limits(max_loras=2, max_cpu_loras=4)
HISTORY: tuple[Input, ...] = (
    ControllerStarted(1),
    EngineInventory("engine", 1, "model", 2, 1 << 40),
    HoldAdapter("r-1", "upper"),
    AdapterChecked(1, "fingerprint", 8, 100, 50),
    WeightsLoaded(2),
    WeightsStaged(3),
    SlotWritten(4),
    ReleaseAdapter("r-2", "upper"),
)
"""An adapter is loaded, held and released."""


@cache
def history(seed: int, steps: int = 60) -> tuple[Limits, tuple[Record, ...]]:
    """Return the limits and the records of a random history; the same ones for a seed."""
    deployment = random_history(seed, steps).deployment
    return deployment.limits, tuple(_decode(data) for data in deployment.inputs)


def header_of(limits: Limits) -> Header:
    """Return the header of a log under these limits."""
    return Header(FORMAT, RULES, "lru", limits_to(limits), 0)


def fold(
    limits: Limits, records: tuple[Record, ...], policy: str = "lru"
) -> tuple[Controller, list[list[Action]]]:
    """Return a controller that has handled the records, and the actions of each."""
    controller = Controller(limits, policy)
    return controller, [
        controller.handle(record.input, record.time_ns, record.body, record.report_seq)
        for record in records
    ]


def write_history(directory: Path, seed: int = 3, storage: Storage = DISK) -> tuple[Record, ...]:
    """Write a history with a digest in every tenth record; return its records."""
    limits, records = history(seed, 100)
    controller = Controller(limits)
    with Log(directory, header_of(limits), segment_bytes_max=SEGMENT_BYTES, storage=storage) as log:
        for number, record in enumerate(records):
            digest = "" if number % 10 else controller.digest()
            log.append([msgspec.structs.replace(record, digest=digest)], 1)
            controller.handle(record.input, record.time_ns, record.body, record.report_seq)
    return records
