"""The commands `ready` and `stop`: wait until a server serves, and end one."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple

import typer

from loradock.cli.context import (
    AsJson,
    directory_of,
    lock_holder,
    open_client,
    output_of,
    settings_of,
)
from loradock.cli.exit_codes import HINTS, CommandError, ExitCode, ServerNotRunning
from loradock.messages.control import PRELOAD
from loradock.messages.errors import EngineGone, ErrorCode, NotAllowed

if TYPE_CHECKING:
    from loradock.client import Client
    from loradock.messages.requests import StatusShown

_POLL_S: Final = 0.05
_ANSWER_S: Final = 5.0
_END_S: Final = 30.0
"""Time for the processes of a server to end after its requests have ended."""

START_S: Final = 20.0
"""Time that `ready` waits while no process has the directory: a server can be starting."""

READY_S: Final = 300.0
DRAIN_S: Final = 30.0

app = typer.Typer()

ReadyTimeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.0,
        max=3600,
        metavar="SECONDS",
        help="Give up after this time, and after 20 s without a server in the directory; 0 checks "
        "once.",
    ),
]
DrainTimeout = Annotated[
    float,
    typer.Option(
        "--timeout",
        min=0.0,
        max=3600,
        metavar="SECONDS",
        help="Time for requests in progress to end; those that are left then fail. 0 ends at once.",
    ),
]


@app.command()
def ready(ctx: typer.Context, timeout: ReadyTimeout = READY_S, as_json: AsJson = False) -> None:
    """Wait until the server takes new work; exit with 6 and say why if it does not in time."""
    output = output_of(ctx, as_json)
    deadline_s = time.monotonic() + timeout
    absent_s = time.monotonic() + START_S
    with output.progress("waiting for the server to take new work"):
        while isinstance(status := _readiness(ctx), _NotReady):
            now = time.monotonic()
            if not status.is_absent:
                absent_s = now + START_S
            if now >= min(deadline_s, absent_s):
                waited_s = min(timeout, START_S) if status.is_absent else timeout
                text = f"not ready after {waited_s:g} s: {status.reason}"
                raise CommandError(ExitCode.UNREACHABLE, text, status.hint)
            time.sleep(_POLL_S)
    if as_json:
        output.document({"ready": True, "model": status.model, "engine": status.engine_id})
    else:
        output.show(f"ready: {status.model}")


class _NotReady(NamedTuple):
    """Why a server can't serve yet; `is_absent`: no process has its directory."""

    reason: str
    hint: str
    is_absent: bool = False


def _readiness(ctx: typer.Context) -> "StatusShown | _NotReady":
    from loradock.cli.render import unready_text

    hint = "`loradock serve` logs why it can't start one; perhaps the model is loading"
    try:
        with open_client(ctx) as client:
            status = client.status(_ANSWER_S)
            is_preloading = not status.unready and _is_preloading(client)
        if status.unready:
            hint = HINTS[ErrorCode.LOG_UNAVAILABLE] if status.log_error else hint
            return _NotReady(unready_text(status), hint)
        if is_preloading:
            return _NotReady("adapters of --adapter are being loaded", hint)
    except ServerNotRunning as error:
        return _NotReady(error.message, error.hint, is_absent=not error.pid)
    except EngineGone as error:
        return _NotReady(error.message, "")
    return status


def _is_preloading(client: "Client") -> bool:
    """Return whether adapters that the server loads at its start are not loaded yet."""
    try:
        listed = client.list_requests(_ANSWER_S)
    except NotAllowed:
        return False
    return any(view.request_id.startswith(PRELOAD) for view in listed.requests)


@app.command()
def stop(ctx: typer.Context, timeout: DrainTimeout = DRAIN_S, as_json: AsJson = False) -> None:
    """End the server: new requests are refused, and those in progress end first."""
    output = output_of(ctx, as_json)
    with open_client(ctx) as client:
        reply = client.stop_server(timeout)
    directory = None if settings_of(ctx).address else directory_of(ctx)
    if directory is not None:
        with output.progress(f"waiting for {reply.running} requests and the end of the server"):
            _wait_for_end(directory, timeout + _END_S)
    if as_json:
        output.document(reply)
    else:
        ended = "stopping" if directory is None else "stopped"
        output.show(f"{ended}; {reply.running} requests were in progress")


def _wait_for_end(directory: Path, timeout_s: float) -> None:
    from loradock.client.sockets import connection_to, unserved_reason

    deadline_s = time.monotonic() + timeout_s
    while not unserved_reason(connection_to(directory)) or lock_holder(directory):
        if time.monotonic() >= deadline_s:
            raise CommandError(
                ExitCode.UNREACHABLE,
                f"the server at {directory} has not ended after {timeout_s:g} s",
                f"its process is {lock_holder(directory)}; end it with `kill`",
            )
        time.sleep(_POLL_S)
