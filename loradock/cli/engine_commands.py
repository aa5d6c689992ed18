"""The commands on the engine process: `engine run` and `engine restart`.

The latter sends signals to the engine, so it works on the machine and as the user of the server
only.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.

import os
import select
import signal
import time
from typing import TYPE_CHECKING, Final

import msgspec
import typer

from loradock.cli.available import with_rank
from loradock.cli.context import (
    AsJson,
    InferenceTimeout,
    check_engine_installed,
    output_of,
    replace_process,
    run_request,
    settings_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options import with_options
from loradock.client.session import GENERATION_TIMEOUT_S
from loradock.messages.engine_options import (
    EngineOptions,
    EngineProcess,
    EngineStart,
    LoRAOptions,
)
from loradock.processes.subprocesses import engine_command

if TYPE_CHECKING:
    from loradock.client import Client
    from loradock.messages.requests import StatusShown

_END_S: Final = 10.0
"""Time for the engine to end by itself."""

_POLL_S: Final = 0.1
_ELSEWHERE: Final = "an engine on another machine can't be restarted from here"

app = typer.Typer()
engine_app = typer.Typer(
    no_args_is_help=True, help="Run an engine for a server elsewhere, or restart the engine."
)
app.add_typer(engine_app, name="engine")


@engine_app.command()
@with_options
def run(
    ctx: typer.Context,
    start: EngineStart,
    lora: LoRAOptions,
    options: EngineOptions,
    as_json: AsJson = False,
) -> None:
    """Run an engine for a server that was started with --engine external.

    Each option is also an environment variable: LORADOCK_CONNECT for --connect.
    """
    output_of(ctx, as_json)
    if as_json:
        start = msgspec.structs.replace(start, log_format="json")
    check_engine_installed()
    lora = with_rank(lora, start.adapter_roots)
    process = EngineProcess(start=start, lora=lora, engine=options)
    replace_process(engine_command(process))


@engine_app.command()
def restart(ctx: typer.Context, timeout: InferenceTimeout = None, as_json: AsJson = False) -> None:
    """End the engine, and wait until its supervisor has started another one.

    Running generations fail; adapters return to where they are requested or held.
    """
    if settings_of(ctx).address:
        raise CommandError(ExitCode.USAGE, _ELSEWHERE, "run this command on the server's machine")
    timeout_s = GENERATION_TIMEOUT_S if timeout is None else timeout
    run_request(ctx, as_json, "restarting the engine", lambda client: _restart(client, timeout_s))


def _restart(client: "Client", timeout_s: float) -> "StatusShown":
    deadline_s = time.monotonic() + timeout_s
    before = client.status(timeout_s)
    if not before.engine_id:
        raise CommandError(
            ExitCode.UNREACHABLE, "no engine is attached", "its supervisor starts one if it can"
        )
    if not before.engine_pid:
        raise CommandError(ExitCode.USAGE, _ELSEWHERE, "end the engine on its own machine")
    _end(client, before)
    while time.monotonic() < deadline_s:
        status = client.status(timeout_s)
        if status.engine_id not in ("", before.engine_id):
            return status
        time.sleep(_POLL_S)
    raise CommandError(
        ExitCode.UNREACHABLE,
        f"the engine {before.engine_pid} has ended; no other one was attached in {timeout_s:g} s",
        "`loradock serve` logs why it can't start one; with --engine external, start it yourself",
    )


def _end(client: "Client", status: "StatusShown") -> None:
    """End the engine with SIGTERM, after `_END_S` with SIGKILL."""
    try:
        process = os.pidfd_open(status.engine_pid)
    except ProcessLookupError:
        return
    try:
        # If it is still attached, the process that was opened is the engine and no later one.
        if client.status().engine_id != status.engine_id:
            return
        poller = select.poll()
        poller.register(process, select.POLLIN)
        for number in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(process, number)
            if poller.poll(_END_S * 1000):
                return
    except ProcessLookupError:
        return
    finally:
        os.close(process)
