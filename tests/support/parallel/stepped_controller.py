"""A controller process whose wall clock a test sets: `stepped_controller OFFSET CONFIG`.

OFFSET is a file with the clock's error in nanoseconds, 8 bytes, which is read at every use. The
rest of the arguments are those of `loradock.controller.server.process`.
"""

import mmap
import struct
import sys
import time
from functools import partial
from pathlib import Path

from loradock.controller.server import process
from loradock.controller.server.inputs import SYSTEM_CLOCKS
from loradock.controller.server.server import Server

_OFFSET = struct.Struct("<q")


class SteppedClock:
    """A wall clock's error, on a page that a test and its processes share."""

    def __init__(self, path: Path) -> None:
        if not path.exists():
            path.write_bytes(bytes(_OFFSET.size))
        with path.open("r+b") as file:
            self._page = mmap.mmap(file.fileno(), _OFFSET.size)

    def step(self, step_ns: int) -> None:
        """Set the clock forward, or back by a negative step."""
        [before] = _OFFSET.unpack(self._page[:])
        self._page[:] = _OFFSET.pack(before + step_ns)

    def wall_ns(self) -> int:
        return time.time_ns() + _OFFSET.unpack(self._page[:])[0]


def main() -> int:
    clock = SteppedClock(Path(sys.argv.pop(1)))
    clocks = SYSTEM_CLOCKS._replace(wall_ns=clock.wall_ns)
    process.Server = partial(Server, clocks=clocks)  # type: ignore[misc, assignment]
    return process.main()


if __name__ == "__main__":
    sys.exit(main())
