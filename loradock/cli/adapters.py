"""Commands of the life cycle, and queries: each sends one request and prints its answer.

A life-cycle command ends when the adapter has reached the requested state.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from loradock.cli.available import Available, available, is_pattern, matching
from loradock.cli.context import (
    QUERY_TIMEOUT_S,
    AdapterArgument,
    AsJson,
    PathOption,
    QueryTimeout,
    Timeout,
    complete_adapter,
    directory_of,
    open_client,
    output_of,
    run_request,
    settings_of,
)
from loradock.cli.exit_codes import CommandError, ExitCode, ServerNotRunning, failure_of
from loradock.cli.fleet import AUTO_COPIES, FLEET_FILE, FleetFile, want
from loradock.messages.errors import LoradockError
from loradock.messages.views import PrefetchTarget

if TYPE_CHECKING:
    from loradock.client import Client
    from loradock.messages.requests import AdapterDone

app = typer.Typer()


Roots = Annotated[
    list[Path] | None,
    typer.Option(
        "--adapter-root",
        metavar="DIRECTORY",
        help="Directory to look into; repeat for several. Default: the roots that the server of "
        "--dir was started with.",
    ),
]
AdapterPatterns = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="ADAPTER",
        help="The adapter's name. Several are loaded one after another; 'acme-*' stands for the "
        "names below the server's roots that match.",
        autocompletion=complete_adapter,
    ),
]


@app.command()
def load(  # noqa: PLR0913, PLR0917 - one parameter per option
    ctx: typer.Context,
    adapters: AdapterPatterns = None,
    path: PathOption = "",
    every: Annotated[
        bool, typer.Option("--all", help="Load every adapter below the server's roots.")
    ] = False,
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
    copies: Annotated[
        str | None,
        typer.Option(
            "--copies",
            metavar="NUMBER|auto",
            help="Load it for the whole fleet of --fleet: this many docks keep it, or auto, as "
            "many as demand needs. Default: only for this server.",
        ),
    ] = None,
    fleet: FleetFile = FLEET_FILE,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Read and check an adapter, and keep it in host memory."""
    count = None if copies is None else _copies(copies)
    chosen = _chosen(ctx, [*(adapters or ()), *(["*"] if every else [])], path)
    failed = dict[str, LoradockError]()
    for name, place in chosen.items():
        try:
            run_request(
                ctx,
                as_json,
                f"loading {name}",
                partial(_load, name, place, replace, timeout),
                verbose=verbose,
            )
            if count is not None:
                with open_client(ctx) as client:
                    view = client.show(name).adapter
                want(fleet, name, place or name, view, count, replace=replace)
        except LoradockError as error:
            if len(chosen) == 1 or isinstance(error, ServerNotRunning):
                raise
            failed[name] = error
            output_of(ctx, as_json, verbose).failure(failure_of(error))
    if failed:
        # The exit code is that of the first, whose reason has been printed.
        raise CommandError(
            failure_of(next(iter(failed.values()))).exit_code,
            f"{len(failed)} of {len(chosen)} adapters were not loaded: {', '.join(failed)}",
        )


def _copies(text: str) -> int:
    if text == "auto":
        return AUTO_COPIES
    if not text.isdecimal() or not int(text):
        raise CommandError(ExitCode.USAGE, f"--copies must be auto or at least 1, got {text!r}")
    return int(text)


def _load(
    name: str, path: str, replace: bool, timeout_s: float | None, client: "Client"
) -> "AdapterDone":
    return client.load(name, path, replace, timeout_s)


def _chosen(ctx: typer.Context, names: list[str], path: str) -> dict[str, str]:
    """Return the path of each adapter to load, empty for the path of its name."""
    if not names:
        raise CommandError(ExitCode.USAGE, "no adapter is named", "name adapters, or load --all")
    if path and (len(names) > 1 or is_pattern(names[0])):
        raise CommandError(
            ExitCode.USAGE, "--path is the directory of one adapter", "load each with its own"
        )
    if path:
        return {names[0]: path}
    found = _available(ctx, None) if any(map(is_pattern, names)) else []
    return matching(names, found)


def _available(ctx: typer.Context, roots: list[Path] | None) -> list[Available]:
    """Return the adapters below roots, by default the roots of the server of `--dir`."""
    from loradock.cli.last_run import read_last_run

    last = None if settings_of(ctx).address else read_last_run(directory_of(ctx))
    found = roots or (last.adapter_roots if last else ())
    if last and last.model and not found:
        raise CommandError(
            ExitCode.NOT_FOUND,
            "the server was started without --adapter-root, and loads no adapters",
            "start it with --adapter-root DIRECTORY, or look below one with --adapter-root here",
        )
    if not found:
        raise CommandError(
            ExitCode.NOT_FOUND,
            "the server's --adapter-root is not known on this machine",
            "run this command on the server's machine, with --dir or --adapter-root",
        )
    return available(found, last.max_lora_rank if last else 0)


@app.command("adapters")
def adapters_(
    ctx: typer.Context,
    every: Annotated[
        bool,
        typer.Option(
            "--available",
            help="List what lies below the server's roots, with what the server knows of it.",
        ),
    ] = False,
    adapter_root: Roots = None,
    timeout: QueryTimeout = QUERY_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """List the known adapters, as `list` does, or with --available all below the roots."""
    from loradock.cli.render import availability

    if not every:
        list_adapters(ctx, timeout, as_json)
        return
    output = output_of(ctx, as_json)
    found = _available(ctx, adapter_root)
    try:
        with open_client(ctx) as client:
            states = {view.adapter: view.state for view in client.list(timeout).adapters}
    except ServerNotRunning:
        # What is on the disk is of use before a server runs.
        states = {}
    if as_json:
        output.document([{**one._asdict(), "state": states.get(one.name)} for one in found])
    else:
        output.show(*availability(found, states))


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
            metavar="ADAPTER",
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
