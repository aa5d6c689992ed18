"""The bounds on one iteration's frames, in the controller and in the engine."""

from typing import Any

import pytest
import zmq

from controller.shell import transport
from engine.worker import worker

LONG = b"x" * (24 << 20)


class Queued:
    """A socket in which frames are queued, one per message."""

    def __init__(self, *frames: bytes) -> None:
        self.frames = list(frames)
        self._peer_is_next = True

    def recv(self, _flags: int) -> bytes:
        if not self.frames:
            raise zmq.Again
        self._peer_is_next = not self._peer_is_next
        return self.frames.pop(0) if self._peer_is_next else b"peer"

    def recv_multipart(self, _flags: int) -> list[bytes]:
        if not self.frames:
            raise zmq.Again
        return [self.frames.pop(0)]

    def getsockopt(self, _option: int) -> int:
        return 0


def read_by_controller(queued: Any) -> int:
    return len(list(transport._receive(queued)))


def read_by_engine(queued: Any) -> int:
    before = len(queued.frames)
    # The frames are not commands: they are counted, and the engine gets none.
    worker.Worker(None, queued, worker.Wakeup(), ())._receive()  # type: ignore[arg-type]
    return before - len(queued.frames)


@pytest.mark.parametrize("read", [read_by_controller, read_by_engine])
@pytest.mark.parametrize(
    ("frames", "counts"),
    [
        ([], [0, 0]),
        ([b""] * 3, [3, 0]),
        ([LONG] * 7, [3, 3, 1, 0]),
        ([LONG, b"", b"", LONG, LONG, b"", LONG], [5, 2, 0]),
    ],
)
def test_an_iteration_reads_a_bounded_number_of_bytes(
    read: Any, frames: list[bytes], counts: list[int]
) -> None:
    assert transport.BYTES_PER_ITERATION == worker.BYTES_MAX == 64 << 20
    queued = Queued(*frames)
    assert [read(queued) for _ in counts] == counts


@pytest.mark.parametrize(
    ("read", "frames_max"),
    [(read_by_controller, transport.FRAMES_PER_ITERATION), (read_by_engine, worker.FRAMES_MAX)],
)
def test_an_iteration_reads_a_bounded_number_of_frames(read: Any, frames_max: int) -> None:
    queued = Queued(*[b"x"] * (frames_max + 5))
    assert [read(queued), read(queued), read(queued)] == [frames_max, 5, 0]
