"""The figure `control.old_events`: events from the middle of a long log, against recent ones.

A controller without an engine serves a log of a million inputs; a client reads its events.
"""

import tempfile
import time
from itertools import islice
from pathlib import Path

from benchmarks.feed import CoreFeed, serve_traffic
from benchmarks.figures import Figure, interleave
from benchmarks.serving import serving
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.client import Client
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.events import EventWriter
from loradock.controller.log.writer import Log
from loradock.controller.server.config import ServerConfig
from loradock.messages.events import Published
from loradock.messages.records import FORMAT, Header, Record

INPUTS = 1_000_000
EVENTS_PER_READ = 1024
READS = 50
ROUNDS = 5
LIMITS = Limits(max_loras=32, max_cpu_loras=64)


def old_events() -> Figure:
    """Measure the time for `EVENTS_PER_READ` events of the middle and of the end."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        _write_log(Path(name) / "log")
        config = ServeConfig(ServerConfig(name, LIMITS), ServeOptions(engine="external"))
        with serving(config), Client(name, timeout_s=300) as client:
            newest = client.status().events_seq
            first = newest // 2 - READS * EVENTS_PER_READ // 2
            old, recent = interleave(
                lambda: _median_ms(client, first, EVENTS_PER_READ),
                lambda: _median_ms(client, newest - EVENTS_PER_READ, 0),
                ROUNDS,
            )
    return Figure(
        "control.old_events",
        old,
        "ms",
        f"the last {EVENTS_PER_READ:,} events: {recent:.2f} ms",
        old / recent,
        "ratio <= 3",
        old / recent <= 3,
    )


def _median_ms(client: Client, since: int, step: int) -> float:
    """Return the median time of reads, each of which begins `step` events after the last."""
    times = []
    for number in range(READS):
        began = since + number * step
        started = time.perf_counter()
        with client.events(began, follow=False) as stream:
            items = list(islice(stream, EVENTS_PER_READ))
        times.append(time.perf_counter() - started)
        expected = list(range(began + 1, began + EVENTS_PER_READ + 1))
        if [item.seq for item in items if isinstance(item, Published)] != expected:
            raise RuntimeError(f"the events after {began} are not those that were published")
    return sorted(times)[READS // 2] * 1000


def _write_log(directory: Path) -> None:
    """Write a log and its events."""
    feed, time_ns = CoreFeed(LIMITS, record=True), 0
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    with (
        Log(directory, header, sync="never") as log,
        EventWriter(directory) as events,
    ):
        while time_ns < INPUTS:
            serve_traffic(feed, 5_000, 64)
            log.append(
                [Record(time_ns + place, *entry) for place, entry in enumerate(feed.inputs)], 1
            )
            events.add(feed.events)
            time_ns += len(feed.inputs)
            feed.inputs.clear()
            feed.events.clear()
