"""The server itself, as its operator sees and changes it: status, settings and end.

Settings that were changed while a server ran are in a file of its directory. They are current again
after a restart with the same options. A start with other options discards them: what its command
line specifies is newer.
"""

import os
import time
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from loradock.controller.core.context import Refusal
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.limits import (
    FIXED,
    LOGGED_NAMES,
    Limits,
    LimitsError,
    limits_from,
    limits_to,
)
from loradock.controller.core.views import show_adapter, show_status
from loradock.controller.log.storage import write_file
from loradock.controller.server.diagnostics import Diagnostics
from loradock.controller.server.engine_link import EngineLink
from loradock.controller.server.inputs import LogHealth
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.messages import VERSION, control, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import RequestId

STOPPING_RETRY_MS: Final = 1000

SETTINGS_FILE: Final = "settings.json"

SETTINGS_BYTES_MAX: Final = 1 << 20

_NS_PER_MS: Final = 1_000_000

log = structlog.get_logger("controller")


class Admin:
    """The server as its operator sees it: its status, its requests, its settings and its end.

    `is_local`: whether a connection of an engine is of this machine. `loading_text`: how far an
    engine that is not attached yet has read its model.
    """

    def __init__(  # noqa: PLR0913, PLR0917 - one per collaborator
        self,
        controller: Controller,
        diagnostics: Diagnostics,
        link: EngineLink,
        snapshots: SnapshotProcess,
        health: LogHealth,
        is_local: Callable[[bytes], bool],
        loading_text: Callable[[], str],
    ) -> None:
        self._controller = controller
        self._diagnostics = diagnostics
        self._link = link
        self._snapshots = snapshots
        self._health = health
        self._loading_text = loading_text
        self._is_local = is_local
        self._stop_at_ns = 0

    @property
    def is_stopping(self) -> bool:
        """True if new requests are refused."""
        return self._stop_at_ns != 0

    def may_end(self, now_ns: int) -> bool:
        """Return whether a stopping server has nothing left to wait for."""
        if not self.is_stopping:
            return False
        return not self._has_awaited_request() or now_ns >= self._stop_at_ns

    def _has_awaited_request(self) -> bool:
        """Return whether a client waits: adapters of the start are loaded at the next one too."""
        pending = self._controller.world.pending_requests
        return any(not request_id.startswith(control.PRELOAD) for request_id in pending)

    def ends_in_ns(self, now_ns: int) -> int | None:
        """Return when a stopping server ends at the latest; None for one that does not stop."""
        return max(0, self._stop_at_ns - now_ns) if self.is_stopping else None

    def refuse(self, request_id: RequestId) -> requests.Refused:
        """Return the refusal of a new request while the server stops."""
        running = len(self._controller.world.pending_requests)
        return requests.Refused(
            request_id,
            ErrorCode.STOPPING,
            f"no new requests are accepted; {running} in progress are waited for",
            STOPPING_RETRY_MS,
        )

    def stop(self, message: control.StopServer) -> control.ServerStopping:
        """Refuse new requests from now on, and end when none is pending or the time is over."""
        # A repetition does not move the end, and a shorter time does.
        stop_at_ns = time.monotonic_ns() + message.timeout_ms * _NS_PER_MS
        self._stop_at_ns = min(self._stop_at_ns or stop_at_ns, stop_at_ns)
        return control.ServerStopping(
            message.request_id, len(self._controller.world.pending_requests)
        )

    def changed(self, message: control.ChangeSettings) -> tuple[Limits, str]:
        """Return the limits and the policy that a change leads to; raises `Refusal`."""
        controller = self._controller
        policy = message.policy or controller.policy_name
        given = {LOGGED_NAMES.get(name, name): value for name, value in message.limits.items()}
        try:
            limits = limits_from(limits_to(controller.limits) | given)
        except LimitsError as error:
            raise Refusal(ErrorCode.MALFORMED, str(error)) from error
        if policy not in POLICIES:
            known = ", ".join(sorted(POLICIES))
            raise Refusal(ErrorCode.MALFORMED, f"policy {policy!r} is not known; known are {known}")
        refusal = controller.change_refusal(limits)
        if refusal:
            raise Refusal(ErrorCode.CONFLICT, refusal)
        return limits, policy

    def answer(self, message: control.ServerQuery) -> requests.Reply:
        """Return the answer to a query."""
        now = time.monotonic_ns()
        match message:
            case control.ListRequests():
                pending = self._controller.world.pending_requests
                views = self._diagnostics.times.views(
                    islice(self._diagnostics.pending(), message.limit), now
                )
                return control.RequestsListed(message.request_id, views, len(pending))
            case control.ListSlow():
                times = self._diagnostics.times
                operations, waits = times.slow_operations.views(now), times.slow_requests.views(now)
                return control.SlowListed(message.request_id, operations, waits)
            case control.ShowSettings():
                return self.settings(message.request_id)

    def show_adapter(self, message: requests.ShowAdapter) -> requests.Reply:
        """Return the versions of a name, and why its latest operation failed.

        Raises `Refusal` for a name that is not known and has not failed.
        """
        failure = self._diagnostics.failures.view(message.adapter, time.monotonic_ns())
        try:
            shown = show_adapter(self._controller.world, message)
        except Refusal as refusal:
            if failure is None:
                raise
            text = f"{refusal.message}; the last attempt failed: {failure.code} {failure.message}"
            return requests.Refused(message.request_id, refusal.code, text, details=failure.details)
        engine = self._link.statistics
        return msgspec.structs.replace(
            shown,
            failure=failure,
            batching=engine.batching,
            batching_refusal=engine.batching_refusal,
        )

    def _unready_reason(self) -> str:
        """Return why new work can't be taken; empty if it can."""
        if self.is_stopping:
            return "the server is stopping"
        if self._health.error:
            return "the log can't be written"
        if self._controller.world.engine:
            return ""
        return ": ".join(filter(None, ("no engine is attached", self._loading_text())))

    def settings(self, request_id: RequestId) -> control.SettingsShown:
        """Return the current limits and policy."""
        limits, policy = limits_to(self._controller.limits), self._controller.policy_name
        fixed = tuple([LOGGED_NAMES[name] for name in FIXED])
        return control.SettingsShown(request_id, limits, policy, fixed)

    def status(
        self, message: requests.ShowStatus, sees: Callable[[str], bool] | None
    ) -> requests.StatusShown:
        """Return the status with what is known about the engine, the log and the processes.

        `sees`: which names the client can see; None: all.
        """
        link, world, diagnostics = self._link, self._controller.world, self._diagnostics
        status = show_status(self._controller, message, link.running, sees)
        snapshots = self._snapshots
        age_ns = world.time_ns - snapshots.snapshot_time_ns if snapshots.snapshot_seq else 0
        # The process id of an engine on another machine is that of some other process here.
        engine_pid = status.engine_pid if self._is_local(link.peer) else 0
        return msgspec.structs.replace(
            status,
            version=VERSION,
            uptime_ms=(time.monotonic_ns() - diagnostics.started_ns) // _NS_PER_MS,
            controller_pid=os.getpid(),
            memory_bytes=memory_bytes(os.getpid()),
            engine_pid=engine_pid,
            engine_memory_bytes=memory_bytes(engine_pid),
            device=diagnostics.engine_device if status.engine_id else "",
            dtype=diagnostics.engine_dtype if status.engine_id else "",
            stopping=self.is_stopping,
            snapshot_seq=snapshots.snapshot_seq,
            snapshot_age_ms=age_ns // _NS_PER_MS,
            log_bytes=snapshots.log_bytes(),
            log_error=self._health.error,
            disk_free_bytes=self._health.disk_free_bytes,
            unready=self._unready_reason(),
            # Requests that ended or arrived since the heartbeat are known here.
            engine=msgspec.structs.replace(
                link.statistics, running=status.running, waiting=status.queued
            ),
        )


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits, as a log's header stores them, and a policy."""

    limits: dict[str, int]
    policy: str


class ChangedSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """The content of the file: the settings of the options, and the current ones."""

    options: Settings
    changed: Settings


class SettingsFile:
    """The file of a controller's directory, for the settings that its options specify."""

    def __init__(self, directory: Path, limits: Limits, policy: str) -> None:
        self._path = directory / SETTINGS_FILE
        self._options = Settings(limits_to(limits), policy)

    def read(self) -> tuple[Limits, str]:
        """Return the settings to start with; a file for other options is removed."""
        usual = limits_from(self._options.limits), self._options.policy
        try:
            data = self._path.read_bytes()[:SETTINGS_BYTES_MAX]
        except FileNotFoundError:
            return usual
        try:
            found = msgspec.json.decode(data, type=ChangedSettings)
            changed = limits_from(found.changed.limits), found.changed.policy
        except (msgspec.DecodeError, LimitsError) as error:
            log.warning(
                "the changed settings can't be read", file=str(self._path), error=str(error)
            )
            return usual
        if found.options != self._options or changed[1] not in POLICIES:
            log.info("changed settings are discarded: the server's options are others now")
            self._path.unlink(missing_ok=True)
            return usual
        return changed

    def write(self, limits: Limits, policy: str) -> None:
        """Store changed settings durably; raises `OSError`."""
        changed = Settings(limits_to(limits), policy)
        if changed == self._options:
            self._path.unlink(missing_ok=True)
            return
        write_file(self._path, msgspec.json.encode(ChangedSettings(self._options, changed)))


def memory_bytes(pid: int) -> int:
    """Return the resident memory of a process; 0 for one that is not on this machine."""
    if pid <= 0:
        return 0
    try:
        fields = Path(f"/proc/{pid}/statm").read_text().split()
    except OSError:
        return 0
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")
