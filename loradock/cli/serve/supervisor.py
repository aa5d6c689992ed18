"""`loradock serve`: the controller and its engine as child processes, restarted after end or hang.

The supervisor opens no socket: no message passes through it. A child survives the other child's end
but not the supervisor's, which it detects by itself. Each child reports the steps of its main loop
on a shared page, from which the supervisor finds that it hangs.
"""

import os
import secrets
import select
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple

import msgspec
import structlog
from msgspec import Struct

from loradock.cli.serve.children import Child
from loradock.cli.serve.config import ServeConfig
from loradock.controller.server.config import Supervision
from loradock.controller.server.keys import DirectoryRefused, KeyStore, new_pair
from loradock.controller.server.supervision import RESTART, STOP_ALL
from loradock.gateway.options import GatewayConfig
from loradock.messages.addresses import endpoint
from loradock.messages.engine_options import EngineProcess, EngineStart
from loradock.processes.key_files import KeyFileError, share_key_pair
from loradock.processes.progress import Progress
from loradock.processes.subprocesses import (
    EXIT_CONFIG,
    EXIT_FAILED,
    EXIT_LOG,
    EXIT_SOCKET,
    engine_command,
    process_command,
)

_FINAL: Final = frozenset({EXIT_CONFIG, EXIT_LOG, EXIT_SOCKET})
"""Exit statuses after which a restart does not help."""

log = structlog.get_logger("serve")


class Supervisor:
    """Keeps its children running until a signal comes or one of them can't run."""

    def __init__(
        self,
        children: Sequence[Child],
        parent_fd: int,
        restarts_fd: int = -1,
        restartable: Child | None = None,
    ) -> None:
        """`restarts_fd`: where process ids of `restartable` are read that have to be restarted."""
        self._children = children
        self._parent_fd = parent_fd
        self._restarts_fd = restarts_fd
        self._restartable = restartable
        self._signals, self._wake = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self.reason = ""
        """Why a child can't run; empty while all can."""

    def run(self) -> int:
        """Run until a signal (returns 0) or until a child can't run (returns an exit status)."""
        signal.set_wakeup_fd(self._wake)
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: None)
        try:
            ended = self._loop()
        finally:
            for child in self._stop_order():
                child.stop()
        if ended is None:
            return 0
        name, status, why = ended
        self.reason = f"{name}: {why or 'see its messages above'}"
        log.error("a child can't run", child=name, status=status, reason=self.reason)
        return status if status in _FINAL else EXIT_FAILED

    def _stop_order(self) -> list[Child]:
        """Return the children in the order in which they end.

        A dock leaves its fleet first. The controller ends before the engine, whose end would be a
        loss to it otherwise, and after the gateway, whose requests it answers.
        """
        first = ("member", "gateway")
        return sorted(
            self._children,
            key=lambda child: first.index(child.name) if child.name in first else len(first),
        )

    def _loop(self) -> tuple[str, int, str] | None:
        """Return the child that can't run, its last exit status and why; None after a signal."""
        while True:
            self._start_due()
            poller = select.poll()
            poller.register(self._signals, select.POLLIN)
            if self._restarts_fd >= 0:
                poller.register(self._restarts_fd, select.POLLIN)
            running = {child.fd: child for child in self._children if child.fd >= 0}
            for fd in running:
                poller.register(fd, select.POLLIN)
            for fd, _ in poller.poll(self._timeout_ms()):
                if fd == self._signals:
                    log.info("stopping")
                    return None
                if fd == self._restarts_fd:
                    if self._restart():
                        log.info("stopping: a client has stopped the server")
                        return None
                    continue
                child = running[fd]
                status = child.reap()
                log.warning("child ended", child=child.name, status=status)
                if status in _FINAL or not child.can_run:
                    return child.name, status, child.reason
            for child in self._children:
                child.kill_if_hung()

    def _restart(self) -> bool:
        """Kill the child that the controller reports; it is started again as after any end.

        Returns whether every child has to end instead.
        """
        (pid,) = RESTART.unpack(os.read(self._restarts_fd, RESTART.size))
        if pid == STOP_ALL:
            return True
        if self._restartable is not None:
            self._restartable.kill_if_of(pid)
        return False

    def _start_due(self) -> None:
        now = time.monotonic()
        for child in self._children:
            if child.fd < 0 and child.start_at_s <= now:
                child.start(self._parent_fd)

    def _timeout_ms(self) -> int:
        """Return the time until the next tick or the next start."""
        now = time.monotonic()
        due = [child.start_at_s - now for child in self._children if child.fd < 0]
        left_ms = [max(0, int(left_s * 1000) + 1) for left_s in due]
        return min([*left_ms, *(child.tick_ms for child in self._children)])


class Ended(NamedTuple):
    """The end of a server: the exit status, and the reason unless it was ended on request."""

    status: int
    reason: str = ""


def serve(config: ServeConfig) -> Ended:
    """Run controller and engine until a signal; return how they ended."""
    # Nothing is ever written: children see the end of file when this process ends.
    parent_fd, write_fd = os.pipe()
    # Both ends stay open here, so that no end of a child closes the pipe.
    restarts_fd, restart_fd = os.pipe2(os.O_NONBLOCK)
    try:
        children = _children(config, parent_fd, restart_fd)
        engine = next((child for child in children if child.name == "engine"), None)
        supervisor = Supervisor(children, parent_fd, restarts_fd, engine)
        return Ended(supervisor.run(), supervisor.reason)
    except (DirectoryRefused, KeyFileError) as error:
        log.error("can't serve here", error=str(error))
        return Ended(EXIT_SOCKET, str(error))
    finally:
        for fd in (write_fd, parent_fd, restarts_fd, restart_fd):
            os.close(fd)


def _children(config: ServeConfig, parent_fd: int, restart_fd: int) -> list[Child]:
    options, own, of_engine = config.options, Progress.share(), Progress.share()
    managed = options.engine == "managed"
    # An engine that is started elsewhere reports to its own supervisor, if it has one.
    key = new_pair() if managed else None
    supervision = Supervision(
        parent_fd,
        restart_fd,
        own.path,
        of_engine.path if managed else "",
        key.public if key else "",
        secrets.token_hex(4) if managed else "",
        options.log_format,
        options.log_level,
    )
    server = msgspec.structs.replace(config.server, supervision=supervision)
    command = process_command("controller", server)
    # It starts snapshotters, and ends a snapshotter that hangs.
    children = [Child("controller", command, own, options, (restart_fd,), has_helpers=True)]
    if key:
        command = engine_command(engine_process(config, supervision, share_key_pair(key)))
        children.append(Child("engine", command, of_engine, options))
    if config.gateway:
        page = Progress.share()
        gateway = msgspec.structs.replace(
            config.gateway, parent_fd=parent_fd, progress=page.path, log_format=options.log_format
        )
        children.append(Child("gateway", process_command("gateway", gateway), page, options))
        if options.join:
            command = process_command("member", _member(config, gateway))
            children.append(Child("member", command, options=options))
    return children


def _member(config: ServeConfig, gateway: GatewayConfig) -> Struct:
    """Return the configuration of the process that makes this server a dock of a fleet."""
    # Its libraries are an extra.
    from loradock.fleet.member import MemberConfig  # noqa: PLC0415

    return MemberConfig(
        fleet=gateway.fleet,
        host=gateway.host,
        port=gateway.port,
        slots=config.server.limits.max_loras,
        directory=gateway.directory,
        model=Path(config.options.model).name,
        log_format=gateway.log_format,
        parent_fd=gateway.parent_fd,
    )


def engine_process(config: ServeConfig, supervision: Supervision, key: str) -> EngineProcess:
    """Return the configuration of the engine's process; `key` is the file of its key pair."""
    options, limits = config.options, config.server.limits
    directory = Path(config.server.directory)
    store = KeyStore(directory)
    store.server_pair()
    start = EngineStart(
        connect=endpoint(directory.absolute(), "engine.sock"),
        model=options.model,
        adapter_roots=options.adapter_roots,
        tensor_parallel_size=options.tensor_parallel_size,
        max_loras=limits.max_loras,
        device_bytes_max=limits.device_bytes_max,
        pinned_bytes_max=limits.pinned_bytes_max,
        key=key,
        server_key=str(store.server_public_path),
        log_format=options.log_format,
        log_level=options.log_level,
    )
    return EngineProcess(
        start=start,
        lora=config.lora,
        engine=config.engine,
        # A pid and not the pipe, which torchrun does not pass on to the ranks.
        parent_pid=os.getpid(),
        progress=supervision.engine_progress,
        step_timeout_ms=options.step_timeout_ms,
        launch_id=supervision.launch_id,
    )
