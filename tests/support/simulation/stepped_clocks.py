"""A real server in a thread, whose clocks are stepped by a test."""

import gc
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from loradock.controller.log.writer import Log
from loradock.controller.server.admin import SettingsFile
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.inputs import Clocks
from loradock.controller.server.process import _open_log
from loradock.controller.server.server import Server
from loradock.controller.server.transport import Transport
from loradock.messages import requests
from tests.support.parallel.processes import LIMITS
from tests.support.simulation.shell_examples import RawClient
from tests.support.waiting import HANG_S

MS_NS: Final = 1_000_000
HOUR_NS: Final = 3_600_000 * MS_NS


class SteppedClocks:
    """Clocks that stand still between the steps of a test, in nanoseconds."""

    def __init__(self, wall_ns: int = 1_700_000_000_000_000_000) -> None:
        self.wall_ns = wall_ns
        self.steady_ns = 5_000 * MS_NS

    @property
    def clocks(self) -> Clocks:
        return Clocks(lambda: self.wall_ns, lambda: self.steady_ns)

    def advance(self, duration_ms: int) -> None:
        """Let time pass."""
        self.wall_ns += duration_ms * MS_NS
        self.steady_ns += duration_ms * MS_NS

    def jump(self, step_ns: int) -> None:
        """Set the wall clock forward, or back by a negative step."""
        self.wall_ns += step_ns


@contextmanager
def serving(
    directory: Path,
    clocks: Clocks,
    transport_type: type[Transport] = Transport,
    **options: Any,
) -> Iterator["RequestClient"]:
    """Serve `directory` in a thread, and yield a client; the server ends with the context."""
    config = ServerConfig(str(directory), LIMITS, sync="never", checked=True, **options)
    parent_fd, write_fd = os.pipe()
    failures: list[BaseException] = []

    def run(transport: Transport, opened: Log) -> None:
        try:
            Server(config, transport, opened, clocks).run(parent_fd)
        except BaseException as error:
            failures.append(error)
        finally:
            gc.unfreeze()

    with transport_type(directory) as transport:
        thread = threading.Thread(
            target=run,
            args=(
                transport,
                _open_log(config, SettingsFile(directory, config.limits, config.policy)),
            ),
        )
        thread.start()
        try:
            with RequestClient(directory) as client:
                # The same client in every epoch.
                client.token = b"stepped time"
                yield client
        finally:
            os.close(write_fd)
            thread.join(HANG_S)
            os.close(parent_fd)
    assert not failures, failures


class RequestClient(RawClient):
    """A client that knows which of its requests were answered."""

    def answers(self) -> list[requests.Reply]:
        """Return the replies that arrived, once the server has seen the clocks' latest step.

        A query is answered after the inputs of the iteration that received it.
        """
        return self.replies_until(requests.ShowStatus(self.new_id()))

    def outcomes(self) -> list[tuple[Any, ...]]:
        """Return request id and code of the replies that arrived; an empty code is success."""
        return [(reply.request_id, str(getattr(reply, "code", ""))) for reply in self.answers()]
