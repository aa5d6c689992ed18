"""How much one turn takes from a socket, on the controller's side and on the engine's."""

from typing import Any

import pytest
import zmq

from controller.shell import transport
from engine.worker import worker

LONG = b"x" * (24 << 20)


class Queued:
    """A socket in which frames wait already, each of a message of its own."""

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


def controllers_turn(queued: Any) -> int:
    return len(list(transport._receive(queued)))


def engines_turn(queued: Any) -> int:
    before = len(queued.frames)
    # What waits here is no command: it is counted, and nobody else is asked.
    worker.Worker(None, queued, worker.Wakeup(), ())._receive()  # type: ignore[arg-type]
    return before - len(queued.frames)


@pytest.mark.parametrize("turn", [controllers_turn, engines_turn])
@pytest.mark.parametrize(
    ("frames", "turns"),
    [
        ([], [0, 0]),
        ([b""] * 3, [3, 0]),
        ([LONG] * 7, [3, 3, 1, 0]),
        ([LONG, b"", b"", LONG, LONG, b"", LONG], [5, 2, 0]),
    ],
)
def test_a_turn_takes_so_many_bytes_and_leaves_the_rest(
    turn: Any, frames: list[bytes], turns: list[int]
) -> None:
    assert transport.BYTES_PER_TURN == worker.BYTES_MAX == 64 << 20
    queued = Queued(*frames)
    assert [turn(queued) for _ in turns] == turns


@pytest.mark.parametrize(
    ("turn", "frames_max"),
    [(controllers_turn, transport.FRAMES_PER_TURN), (engines_turn, worker.FRAMES_MAX)],
)
def test_a_turn_takes_so_many_frames(turn: Any, frames_max: int) -> None:
    queued = Queued(*[b"x"] * (frames_max + 5))
    assert [turn(queued), turn(queued), turn(queued)] == [frames_max, 5, 0]
