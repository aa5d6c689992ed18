"""What is done with a log's files, without a controller: `replay`, `log verify`, `log repair`.

What it is: commands over `controller.shell.replay` and `controller.shell.log`. What it is not:
reading of logs. One rule: only `log repair --yes` changes a file.
"""

# Heavy modules are imported when a command needs them: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from controller.cli.context import AsJson, directory_of, output_of
from controller.cli.exit_codes import CommandError, ExitCode

if TYPE_CHECKING:
    from controller.cli.output import Output
    from controller.log.format import LogDamaged
    from controller.log.repair import RepairPlan
    from controller.log.replay import ReplayResult

app = typer.Typer()
log_app = typer.Typer(no_args_is_help=True, help="Check the log's files, and cut damage out.")
app.add_typer(log_app, name="log", rich_help_panel="Server and log")

_REPAIR_HINT = "`loradock log repair` tells what cutting it out would lose"


@app.command(rich_help_panel="Server and log")
def replay(
    ctx: typer.Context,
    directory: Annotated[
        Path | None,
        typer.Argument(help="The controller's directory; that of --dir, if not given."),
    ] = None,
    until: Annotated[
        int | None, typer.Option(min=1, metavar="SEQ", help="Stop after this record.")
    ] = None,
    checked: Annotated[
        bool, typer.Option("--checked", help="Verify every invariant after every record.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Rebuild the world from the log, compare digests, and show it."""
    from controller.log.replay import replay as fold

    output = output_of(ctx, as_json)
    with log_of(directory or directory_of(ctx)) as log_directory, output.busy("replaying"):
        result = fold(log_directory, until, checked=checked)
    _show_replay(output, result)
    if result.divergence is not None:
        seq, recorded, folded = result.divergence
        raise CommandError(
            ExitCode.LOG,
            f"before record {seq} the digest was {recorded}, replaying gives {folded}",
            "replay it with the version that wrote it; if that is this one, its rules are broken",
        )


def _show_replay(output: "Output", result: "ReplayResult") -> None:
    from controller.cli.render import facts_table, renderables
    from controller.core.views import list_adapters
    from messages.requests import ListAdapters

    controller = result.controller
    listed = None if controller is None else list_adapters(controller.world, ListAdapters(""))
    facts = {
        "inputs": result.inputs,
        "digest": result.digest,
        "digests_compared": result.digests_compared,
    }
    if output.as_json:
        adapters = [] if listed is None else listed.adapters
        output.document({**facts, "divergence": result.divergence, "adapters": adapters})
        return
    output.show(facts_table(_readable(facts)))
    if listed is not None:
        output.show(*renderables(listed))


@log_app.command()
def verify(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Read the whole log and tell what is there; a torn tail is no damage."""
    from controller.log.segments import verify as read_whole

    output = output_of(ctx, as_json)
    with log_of(directory_of(ctx)) as log_directory, output.busy("reading the log"):
        found = read_whole(log_directory)
    facts = {**found._asdict(), "damage": None}
    if found.damage is not None:
        facts["damage"] = _damage(found.damage)
    _print_facts(output, facts)
    if found.damage is not None:
        raise CommandError(ExitCode.LOG, str(found.damage), _REPAIR_HINT)


@log_app.command()
def repair(
    ctx: typer.Context,
    yes: Annotated[bool, typer.Option("--yes", help="Do it; without, only tell.")] = False,
    as_json: AsJson = False,
) -> None:
    """Cut the log where its damage begins; what is cut off is kept beside it."""
    from controller.log.repair import repair as cut
    from controller.log.repair import repair_plan

    output = output_of(ctx, as_json)
    with log_of(directory_of(ctx)) as log_directory, output.busy("reading the log"):
        plan = cut(log_directory) if yes else repair_plan(log_directory)
    _print_facts(output, _plan(plan, done=yes))
    if plan is not None and not yes:
        raise CommandError(
            ExitCode.LOG, "nothing was changed", "`loradock log repair --yes` cuts it like that"
        )


def _plan(plan: "RepairPlan | None", done: bool) -> dict[str, Any]:
    if plan is None:
        return {"damaged": False, "repaired": False}
    return {"damaged": not done, "repaired": done, **plan._asdict()}


def _damage(damage: "LogDamaged") -> dict[str, Any]:
    return {
        "file": damage.file,
        "offset": damage.offset,
        "seq": damage.seq,
        "reason": damage.reason,
    }


def _print_facts(output: "Output", facts: dict[str, Any]) -> None:
    from controller.cli.render import facts_table

    if output.as_json:
        output.document(facts)
    else:
        output.show(facts_table(_readable(facts)))


def _readable(facts: dict[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): _words(value) for name, value in facts.items()}


def _words(value: Any) -> str:
    match value:
        case None:
            return "none"
        case True | False:
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name} {_words(item)}" for name, item in value.items())
        case tuple():
            return ", ".join(_words(item) for item in value) or "none"
    return str(value)


@contextmanager
def log_of(directory: Path) -> Iterator[Path]:
    """The log's directory; what is wrong with the log ends the command."""
    from controller.core.limits import LimitsError
    from controller.log.format import LogBusy, LogDamaged, LogError

    log_directory = directory / "log"
    if not log_directory.is_dir():
        raise CommandError(
            ExitCode.NOT_FOUND,
            f"{log_directory} is not there",
            "give the directory of a server that has run, with --dir",
        )
    try:
        yield log_directory
    except LogBusy as error:
        raise CommandError(ExitCode.REFUSED, str(error)) from error
    except LogDamaged as error:
        raise CommandError(ExitCode.LOG, str(error), _REPAIR_HINT) from error
    except (LogError, LimitsError) as error:
        raise CommandError(ExitCode.LOG, str(error)) from error
