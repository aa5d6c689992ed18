"""The pipe to the supervisor: what is written, also where it is full or closed."""

import os

from loradock.controller.server.supervision import RESTART, STOP_ALL, SupervisorLink
from loradock.processes.progress import Progress


def test_requests_are_read_in_order_and_a_full_or_closed_pipe_is_no_error() -> None:
    reader, writer = os.pipe2(os.O_NONBLOCK)
    link = SupervisorLink(Progress(), Progress(), writer)
    link.restart(4711)
    link.stop_all()
    read = [RESTART.unpack(os.read(reader, RESTART.size))[0] for _ in range(2)]
    assert read == [4711, STOP_ALL]
    for _ in range(100_000 // RESTART.size):
        link.restart(1)
    os.close(reader)
    link.stop_all()
    os.close(writer)


def test_without_a_supervisor_nothing_is_written() -> None:
    SupervisorLink(Progress(), Progress()).stop_all()
