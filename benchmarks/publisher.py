"""A process that publishes events as a busy controller does, for `control.events`.

Each frame contains one group of events.
"""

import sys
import time
from pathlib import Path

from loradock.controller.server.event_stream import EventStream
from loradock.controller.server.transport import Transport
from loradock.messages.events import AdapterActivated, Published
from loradock.messages.wire import EVENTS

EVENTS_PER_GROUP = 64
EVENTS_COUNT = 400_000


def main() -> None:
    """Run `python -m benchmarks.publisher DIRECTORY`: wait for a subscriber, publish, wait."""
    directory = Path(sys.argv[1])
    with Transport(directory) as transport:
        (directory / "log").mkdir()
        stream = EventStream(directory / "log")
        for _ in range(20):
            transport.publish(EVENTS.encode((), 1, 0))
            time.sleep(0.1)
        for first in range(1, EVENTS_COUNT, EVENTS_PER_GROUP):
            for seq in range(first, first + EVENTS_PER_GROUP):
                stream.add(Published(seq, 1, AdapterActivated("adapter-1", 3, seq)))
            batch = stream.take_batch()
            transport.publish(EVENTS.encode(batch, 1, batch[-1].seq))
        time.sleep(30)


if __name__ == "__main__":
    main()
