"""Commands of the life cycle, and queries: each sends one request and prints its answer.

A life-cycle command ends when the adapter has reached the requested state.
"""

from typing import Annotated

import typer

from loradock.cli.context import (
    QUERY_TIMEOUT_S,
    AdapterArgument,
    AsJson,
    PathOption,
    QueryTimeout,
    Timeout,
    complete_adapter,
    run_request,
)
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.messages.views import PrefetchTarget

app = typer.Typer()


@app.command()
def load(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Replace other content that is loaded under this name. Running requests finish "
            "with the old content.",
        ),
    ] = False,
    verbose: Annotated[
        bool,
        typer.Option(
            "--verbose",
            "-v",
            help="If the adapter is refused, print every finding: each module that differs. "
            "Default: the first one and their number.",
        ),
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Read and check an adapter, and keep it in host memory."""
    run_request(
        ctx,
        as_json,
        f"loading {adapter}",
        lambda client: client.load(adapter, path, replace, timeout),
        verbose=verbose,
    )


@app.command()
def stage(
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Prepare an adapter in page-locked memory, ready to be copied to the device."""
    run_request(
        ctx, as_json, f"staging {adapter}", lambda client: client.stage(adapter, path, timeout)
    )


@app.command()
def activate(
    ctx: typer.Context,
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER...",
            help="The adapter's name. Several adapters are all in slots at one moment.",
            autocompletion=complete_adapter,
        ),
    ],
    path: PathOption = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Copy one adapter, or all adapters of a batch, into device slots."""
    label = f"activating {' '.join(adapters)}"
    if len(adapters) == 1:
        run_request(ctx, as_json, label, lambda client: client.activate(adapters[0], path, timeout))
    elif path:
        raise CommandError(
            ExitCode.USAGE,
            f"--path is the directory of one adapter, and {len(adapters)} adapters are named",
            "load each of them with its own --path first: loradock load NAME --path DIRECTORY",
        )
    else:
        run_request(ctx, as_json, label, lambda client: client.activate_batch(adapters, timeout))


@app.command()
def prefetch(
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    to: Annotated[
        PrefetchTarget,
        typer.Option("--to", help="How far the adapter is moved; a slot only if one is free."),
    ] = "gpu-slot",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Move an adapter towards a slot ahead of its use; ends before it has moved."""
    run_request(
        ctx,
        as_json,
        f"prefetching {adapter}",
        lambda client: client.prefetch(adapter, path, to, timeout),
    )


@app.command()
def deactivate(
    ctx: typer.Context, adapter: AdapterArgument, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """Remove an adapter from its slot; it stays in page-locked memory."""
    run_request(
        ctx, as_json, f"deactivating {adapter}", lambda client: client.deactivate(adapter, timeout)
    )


@app.command()
def hold(
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Activate an adapter and exempt it from every eviction."""
    run_request(
        ctx, as_json, f"holding {adapter}", lambda client: client.hold(adapter, path, timeout)
    )


@app.command()
def release(
    ctx: typer.Context, adapter: AdapterArgument, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """End a hold."""
    run_request(
        ctx, as_json, f"releasing {adapter}", lambda client: client.release(adapter, timeout)
    )


@app.command()
def evict(
    ctx: typer.Context, adapter: AdapterArgument, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """Drop an adapter's weights from all memory; it is loaded again when it is used."""
    run_request(ctx, as_json, f"evicting {adapter}", lambda client: client.evict(adapter, timeout))


@app.command()
def remove(
    ctx: typer.Context,
    adapter: AdapterArgument,
    force: Annotated[
        bool,
        typer.Option(
            "--force",
            help="Remove even if held or in use: the hold ends, and requests that run or wait "
            "finish first. New ones find no adapter of this name.",
        ),
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Forget an adapter; its name is free again."""
    run_request(
        ctx, as_json, f"removing {adapter}", lambda client: client.remove(adapter, force, timeout)
    )


@app.command("list")
def list_adapters(
    ctx: typer.Context, timeout: QueryTimeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """List every known adapter and where it is."""
    run_request(ctx, as_json, "querying", lambda client: client.list(timeout))


@app.command()
def show(
    ctx: typer.Context,
    adapter: AdapterArgument,
    timeout: QueryTimeout = QUERY_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Show everything that is known about one adapter, also why it was refused."""
    run_request(
        ctx, as_json, "querying", lambda client: client.show(adapter, timeout), verbose=True
    )


@app.command()
def status(
    ctx: typer.Context, timeout: QueryTimeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Show the server, its engine and its memory; exit with 6 if no engine is attached."""
    reply = run_request(ctx, as_json, "querying", lambda client: client.status(timeout))
    if not reply.engine_id:
        raise CommandError(
            ExitCode.UNREACHABLE,
            "the server runs, and no engine is attached",
            "`loradock ready` waits for it; `loradock serve` logs why it can't start one",
        )
