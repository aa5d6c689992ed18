"""The controller's process: the real server and log over a simulated transport and disk."""

from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Final

from loradock.controller.core.limits import RULES, limits_to
from loradock.controller.core.world import World
from loradock.controller.log.format import LogError
from loradock.controller.log.writer import Log
from loradock.controller.server.access import Access
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.server import Server
from loradock.controller.server.supervision import SupervisorLink
from loradock.messages.records import FORMAT, Header
from tests.support.campaign.disk import SimulatedCrash, SimulatedDisk
from tests.support.campaign.engine_process import SimulatedProgress
from tests.support.campaign.machine import MACHINE, MS, RESTART_FD, SECOND
from tests.support.campaign.network import Link
from tests.support.campaign.scheduler import Scheduler, Wakeup

DIRECTORY: Final = Path("/loradock")
LOG_DIRECTORY: Final = DIRECTORY / "log"


class SimulatedTransport:
    """The public methods of `loradock.controller.server.transport.Transport`, over links."""

    def __init__(
        self, on_reply: Callable[[bytes, bytes], None], on_events: Callable[[bytes], None]
    ):
        self.access = Access()
        self.requests: deque[tuple[bytes, str, bytes]] = deque()
        self.reports: deque[tuple[bytes, bytes]] = deque()
        self.clients: dict[bytes, Link] = {}
        self.engines: dict[bytes, Link] = {}
        self.subscribers: list[Link] = []
        self._on_reply = on_reply
        self._on_events = on_events
        self._watched: dict[int, None] = {}
        self._replies: list[tuple[bytes, bytes]] = []

    @property
    def has_requests(self) -> bool:
        return bool(self.requests)

    def watch(self, fd: int) -> None:
        self._watched[fd] = None

    def unwatch(self, fd: int) -> None:
        del self._watched[fd]

    def poll(self, _timeout_ms: int) -> set[int]:
        return {fd for fd in self._watched if MACHINE.is_ready(fd)}

    def receive_requests(self) -> Iterator[tuple[bytes, str, bytes]]:
        while self.requests:
            yield self.requests.popleft()

    def receive_reports(self) -> Iterator[tuple[bytes, bytes]]:
        while self.reports:
            yield self.reports.popleft()

    def reply(self, client: bytes, frame: bytes) -> None:
        self._replies.append((client, frame))

    def is_local(self, _route: bytes) -> bool:
        return True

    def can_reply(self, _client: bytes) -> bool:
        return True

    def flush(self) -> tuple[bytes, ...]:
        for client, frame in self._replies:
            self._on_reply(client, frame)
            link = self.clients.get(client)
            if link is not None:
                link.send(frame)
        self._replies.clear()
        return ()

    def command(self, engine: bytes, frame: bytes) -> None:
        link = self.engines.get(engine)
        if link is not None:
            link.send(frame)

    def publish(self, frame: bytes) -> None:
        self._on_events(frame)
        for link in self.subscribers:
            link.send(frame)


class ControllerProcess:
    """The lives of a controller, one after another, on one disk.

    `on_end` is called when a life ends without a kill: by a failed disk or a crash in a write.
    `on_iteration` is called with the state, and whether the process has worked without a pause
    since the last call.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        config: ServerConfig,
        disk: SimulatedDisk,
        transport_of: Callable[[], SimulatedTransport],
        on_end: Callable[[], None],
        on_iteration: Callable[[World, bool], None],
    ) -> None:
        self.config = config
        self.disk = disk
        self.transport: SimulatedTransport | None = None
        self.starts = 0
        self.engine_progress: Any = SimulatedProgress()
        self.wakeup = Wakeup(scheduler, self._iterate)
        self._scheduler = scheduler
        self._transport_of = transport_of
        self._on_end = on_end
        self._on_iteration = on_iteration
        self._iterated_ns = 0
        self._server: Server | None = None

    @property
    def is_running(self) -> bool:
        return self._server is not None

    @property
    def world(self) -> World:
        """The running controller's state, for reading only."""
        assert self._server is not None
        return self._server._controller.world

    @property
    def snapshot_until(self) -> int:
        """The record up to which the running controller orders a snapshot; 0 for none."""
        assert self._server is not None
        return self._server.snapshot_until

    def start(self) -> None:
        """Recover and begin an epoch; raises `LogError`, and `SimulatedCrash` on the way."""
        assert self._server is None
        self.disk.crash()
        self.starts += 1
        self._scheduler.note("start controller")
        transport: Any = self._transport_of()
        progress: Any = SimulatedProgress()
        opened = open_log(self.config, self.disk)
        supervisor = SupervisorLink(progress, self.engine_progress, RESTART_FD)
        server = Server(self.config, transport, opened, MACHINE.clocks, supervisor)
        server._start_epoch()
        # What a life has waited after its last record is forgotten, as `inputs` describes.
        self._iterated_ns = -SECOND
        self._server, self.transport = server, transport
        self.wakeup.request(0)

    def start_with_crash(self, operations: int) -> None:
        """Start, but let the process end after this number of disk operations."""
        self.disk.crash()
        self.disk.crash_after = operations
        self.start()

    def kill(self) -> None:
        """End the process at once."""
        self._scheduler.note("kill controller")
        self._forget()

    def _forget(self) -> None:
        self._server = self.transport = None
        self.disk.crash()
        self.wakeup.end()

    def _iterate(self) -> None:
        """Run one iteration of the server's loop, as its `run` does."""
        server, transport = self._server, self.transport
        if server is None or transport is None:
            return
        self._scheduler.note("controller")
        is_continuous = MACHINE.now_ns - self._iterated_ns < SECOND
        self._iterated_ns = MACHINE.now_ns
        try:
            server._iterate(transport.poll(0))
            self.wakeup.request(server._timeout_ms() * MS + MS // 20)
            self._on_iteration(self.world, is_continuous and not self.disk.is_full)
        except (SimulatedCrash, LogError) as error:
            self._scheduler.note(f"controller ended: {type(error).__name__}")
            self._forget()
            self._on_end()


def open_log(config: ServerConfig, disk: SimulatedDisk) -> Log:
    """Open the log for writing, as the controller's process does."""
    header = Header(FORMAT, RULES, config.policy, limits_to(config.limits), 0)
    return Log(
        LOG_DIRECTORY,
        header,
        sync=config.sync,
        segment_bytes_max=config.segment_bytes_max,
        storage=disk,
    )
