"""The life cycle by hand, and a look at it.

What it is: `load`, `stage`, `activate`, `deactivate`, `hold`, `release`, `evict`, `remove`,
`cancel`, `list`, `show`, `status`. What it is not: logic; each is one request. One rule: a command
ends when the fact is there.
"""

from typing import Annotated

import typer

from controller.cli.context import (
    QUERY_TIMEOUT_S,
    AdapterArgument,
    AsJson,
    PathOption,
    Timeout,
    ask,
    complete_adapter,
)
from controller.cli.exit_codes import CommandError, ExitCode

app = typer.Typer()

_LIFE_CYCLE = "Life cycle"
_LOOKING = "Looking"


@app.command(rich_help_panel=_LIFE_CYCLE)
def load(
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    replace: Annotated[
        bool, typer.Option("--replace", help="Let other content take the name over.")
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Read and check an adapter, and keep it in host memory."""
    ask(ctx, as_json, f"loading {adapter}", lambda c: c.load(adapter, path, replace, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def stage(
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Lay an adapter out in page-locked memory, ready to copy."""
    ask(ctx, as_json, f"staging {adapter}", lambda c: c.stage(adapter, path, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def activate(
    ctx: typer.Context,
    adapters: Annotated[
        list[str],
        typer.Argument(
            metavar="ADAPTER...",
            help="Its name; with several, all are in slots at one moment.",
            autocompletion=complete_adapter,
        ),
    ],
    path: PathOption = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Bring one adapter, or a whole batch's, into device slots."""
    doing = f"activating {' '.join(adapters)}"
    if len(adapters) == 1:
        ask(ctx, as_json, doing, lambda c: c.activate(adapters[0], path, timeout))
    elif path:
        raise CommandError(
            ExitCode.USAGE, f"--path names one directory, not those of {len(adapters)} adapters"
        )
    else:
        ask(ctx, as_json, doing, lambda c: c.activate_batch(adapters, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def deactivate(
    ctx: typer.Context, adapter: AdapterArgument, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """Take an adapter out of its slot; it stays in page-locked memory."""
    ask(ctx, as_json, f"deactivating {adapter}", lambda c: c.deactivate(adapter, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def hold(
    ctx: typer.Context,
    adapter: AdapterArgument,
    path: PathOption = "",
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Activate an adapter and exempt it from every eviction."""
    ask(ctx, as_json, f"holding {adapter}", lambda c: c.hold(adapter, path, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def release(
    ctx: typer.Context, adapter: AdapterArgument, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """End a hold."""
    ask(ctx, as_json, f"releasing {adapter}", lambda c: c.release(adapter, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def evict(
    ctx: typer.Context, adapter: AdapterArgument, timeout: Timeout = None, as_json: AsJson = False
) -> None:
    """Drop an adapter's weights everywhere; it is loaded again when it is used."""
    ask(ctx, as_json, f"evicting {adapter}", lambda c: c.evict(adapter, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def remove(
    ctx: typer.Context,
    adapter: AdapterArgument,
    force: Annotated[
        bool, typer.Option("--force", help="Also if it is held; running requests end first.")
    ] = False,
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """Forget an adapter; its name is free again."""
    ask(ctx, as_json, f"removing {adapter}", lambda c: c.remove(adapter, force, timeout))


@app.command(rich_help_panel=_LIFE_CYCLE)
def cancel(
    ctx: typer.Context,
    request_id: Annotated[str, typer.Argument(metavar="REQUEST", help="The generation's id.")],
    timeout: Timeout = None,
    as_json: AsJson = False,
) -> None:
    """End a generation, of whatever client."""
    ask(ctx, as_json, f"cancelling {request_id}", lambda c: c.cancel(request_id, timeout))


@app.command("list", rich_help_panel=_LOOKING)
def list_adapters(
    ctx: typer.Context, timeout: Timeout = QUERY_TIMEOUT_S, as_json: AsJson = False
) -> None:
    """Every known adapter and where it is."""
    ask(ctx, as_json, "asking", lambda c: c.list(timeout))


@app.command(rich_help_panel=_LOOKING)
def show(
    ctx: typer.Context,
    adapter: AdapterArgument,
    timeout: Timeout = QUERY_TIMEOUT_S,
    as_json: AsJson = False,
) -> None:
    """Everything known about one adapter."""
    ask(ctx, as_json, "asking", lambda c: c.show(adapter, timeout))


@app.command(rich_help_panel=_LOOKING)
def status(ctx: typer.Context, timeout: Timeout = QUERY_TIMEOUT_S, as_json: AsJson = False) -> None:
    """The controller, its engine and its budgets."""
    ask(ctx, as_json, "asking", lambda c: c.status(timeout))
