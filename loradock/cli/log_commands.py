"""The commands on a log's files: `replay`, `log verify` and `log repair`.

Only `log repair --yes` changes a file.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, NamedTuple

import typer

from loradock.cli.context import AsJson, directory_of, output_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options.groups import OptionGroup, parameter, with_option_groups

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.controller.log.format import LogCorrupt
    from loradock.controller.log.repair import RepairPlan
    from loradock.controller.log.replay import ReplayResult

app = typer.Typer()
log_app = typer.Typer(no_args_is_help=True, help="Check the log's files, and repair corruption.")
app.add_typer(log_app, name="log")

_REPAIR_HINT = "`loradock log repair` shows whether it can be mended, or what a cut would lose"


class ReplayOptions(NamedTuple):
    """Which records are replayed, and how."""

    until: int | None
    from_start: bool
    checked: bool
    policy: str

    def replay(self, log_directory: Path) -> "ReplayResult":
        """Replay a log."""
        from loradock.controller.log.replay import replay, replay_with_policy

        if self.policy:
            return replay_with_policy(log_directory, self.policy, self.until, checked=self.checked)
        return replay(log_directory, self.until, checked=self.checked, from_start=self.from_start)


_UNTIL: Final = typer.Option(min=1, metavar="SEQ", help="Stop after the record with this number.")
_FROM_START: Final = typer.Option(
    "--from-start", help="Begin with the first record instead of the last snapshot."
)
_CHECKED: Final = typer.Option(
    "--checked", help="Debugging: check internal consistency after every record (slow)."
)
_POLICY: Final = typer.Option(
    metavar="NAME",
    help="Replay the whole log as if this had been the eviction policy; no digests are compared.",
)
_REPLAY_OPTIONS: Final = OptionGroup(
    (
        parameter("until", int | None, None, _UNTIL),
        parameter("from_start", bool, False, _FROM_START),
        parameter("checked", bool, False, _CHECKED),
        parameter("policy", str, "", _POLICY),
    ),
    lambda values: ReplayOptions(**values),
)


@app.command()
@with_option_groups(options=_REPLAY_OPTIONS)
def replay(
    ctx: typer.Context,
    options: ReplayOptions,
    directory: Annotated[
        Path | None,
        typer.Argument(help="The controller's directory. Default: that of --dir."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the controller's state from the log, compare digests, and show the adapters."""
    output = output_of(ctx, as_json)
    with (
        open_log(directory or directory_of(ctx)) as log_directory,
        output.progress("replaying"),
    ):
        result = options.replay(log_directory)
    for reason in result.skipped:
        output.note(reason)
    _show_replay(output, result)
    if result.divergence is not None:
        seq, recorded, replayed = result.divergence
        raise CommandError(
            ExitCode.LOG,
            f"before record {seq} the digest was {recorded}, the replay has {replayed}",
            "replay the log with the version that wrote it; if that is this version, report a bug",
        )


def _show_replay(output: "Output", result: "ReplayResult") -> None:
    from loradock.cli.pages.tables import field_table
    from loradock.cli.render import renderables
    from loradock.controller.core.views import list_adapters
    from loradock.messages.requests import ListAdapters

    controller = result.controller
    listed = None if controller is None else list_adapters(controller.world, ListAdapters(""))
    fields = {
        "inputs": result.inputs,
        "snapshot": result.snapshot_seq,
        "digest": result.digest,
        "digests_compared": result.digests_compared,
    }
    if output.as_json:
        adapters = [] if listed is None else listed.adapters
        output.document({**fields, "divergence": result.divergence, "adapters": adapters})
        return
    output.show(field_table(_readable(fields)))
    if listed is not None:
        output.show(*renderables(listed))


@log_app.command()
def verify(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Read the whole log, its snapshots and events; print their size and their corruption.

    A torn tail is not corruption.
    """
    from loradock.controller.log.repair import verify as verify_log

    output = output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory, output.progress("reading the log"):
        result = verify_log(log_directory)
    fields = {**result.segments._asdict(), "corruption": None}
    if result.segments.corruption is not None:
        fields["corruption"] = _corruption(result.segments.corruption)
    fields |= {name: value for name, value in result._asdict().items() if name != "segments"}
    print_fields(output, fields)
    if result.segments.corruption is not None:
        raise CommandError(ExitCode.LOG, str(result.segments.corruption), _REPAIR_HINT)
    if result.problems:
        hint = "`loradock log compact` makes what is wrong again from the records"
        raise CommandError(ExitCode.LOG, result.problems[0], hint)


@log_app.command()
def repair(
    ctx: typer.Context,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without this, only show what would be done.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Cut the log where its corruption begins.

    Corrupt segments that no restart needs are only renamed. The corrupt file is kept next to the
    log.
    """
    from loradock.controller.log.repair import repair as repair_log
    from loradock.controller.log.repair import repair_plan

    output = output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory, output.progress("reading the log"):
        plan = repair_log(log_directory) if yes else repair_plan(log_directory)
        is_corrupt = plan is not None and repair_plan(log_directory) is not None
    print_fields(output, _plan(plan, is_corrupt, done=yes))
    if yes and is_corrupt:
        raise CommandError(ExitCode.LOG, "more is corrupt after this", "repair it as well")
    if plan is not None and not yes:
        action = _ACTIONS[_action(plan)]
        raise CommandError(
            ExitCode.LOG, "nothing was changed", f"`loradock log repair --yes` {action} as shown"
        )


_ACTIONS: Final = {
    "cut": "cuts the log",
    "rename": "renames the segments that no restart needs",
}


def _action(plan: "RepairPlan") -> str:
    return "cut" if plan.snapshot is None else "rename"


def _plan(plan: "RepairPlan | None", is_corrupt: bool, done: bool) -> dict[str, Any]:
    if plan is None:
        return {"corrupt": False, "repaired": False}
    return {
        "corrupt": is_corrupt,
        "repaired": done,
        "action": _action(plan),
        **plan._asdict(),
    }


def _corruption(corruption: "LogCorrupt") -> dict[str, Any]:
    return {
        "file": corruption.file,
        "offset": corruption.offset,
        "seq": corruption.seq,
        "reason": corruption.reason,
    }


def print_fields(output: "Output", fields: dict[str, Any]) -> None:
    """Print named values: as JSON, or as a table for a person."""
    from loradock.cli.pages.tables import field_table

    if output.as_json:
        output.document(fields)
    else:
        output.show(field_table(_readable(fields)))


def _readable(fields: dict[str, Any]) -> dict[str, str]:
    return {name.replace("_", " "): _readable_value(value) for name, value in fields.items()}


def _readable_value(value: Any) -> str:
    match value:
        case None:
            return "none"
        case True | False:
            return "yes" if value else "no"
        case dict():
            return ", ".join(f"{name} {_readable_value(item)}" for name, item in value.items())
        case tuple():
            return ", ".join(_readable_value(item) for item in value) or "none"
    return str(value)


@contextmanager
def open_log(directory: Path) -> Iterator[Path]:
    """Yield the log's directory; an error of the log becomes a `CommandError`."""
    from loradock.controller.core.limits import LimitsError
    from loradock.controller.log.format import LogBusy, LogCorrupt, LogError

    log_directory = directory / "log"
    if not log_directory.is_dir():
        raise CommandError(
            ExitCode.NOT_FOUND,
            f"there is no log at {log_directory}",
            "name the directory of a server that has run, with --dir",
        )
    try:
        yield log_directory
    except LogBusy as error:
        raise CommandError(ExitCode.REFUSED, str(error)) from error
    except LogCorrupt as error:
        raise CommandError(ExitCode.LOG, str(error), _REPAIR_HINT) from error
    except (LogError, LimitsError) as error:
        raise CommandError(ExitCode.LOG, str(error)) from error
