"""The commands on a log: `replay`, and `log verify`, `repair`, `dump`, `export`, `import`, ...

`replay`, `verify`, `dump` and `export` change no file; the others refuse while a server writes the
log.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final

import typer
from msgspec import Struct

from loradock.cli.context import AsJson, directory_of, output_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.options import with_options
from loradock.controller.log.settings import LOG_KEEP_HOURS
from loradock.messages.options import option

if TYPE_CHECKING:
    from loradock.cli.output import Output
    from loradock.controller.log.format import LogCorrupt
    from loradock.controller.log.replay import ReplayResult

app = typer.Typer()
log_app = typer.Typer(no_args_is_help=True, help="Check the log's files, and repair corruption.")
app.add_typer(log_app, name="log")

_RECORDS_PER_ADVANCE: Final = 256
"""Records between two changes of what is shown of a replay, which cost more than a record."""

_REPAIR_HINT = "`loradock log repair` shows how it is repaired, and which records that loses"


class ReplayOptions(Struct, frozen=True, kw_only=True):
    """Selection of the records to replay."""

    VARIABLES: ClassVar = False

    until: Annotated[
        int | None,
        option("Stop after the record with this number. Default: all.", ge=1, metavar="SEQ"),
    ] = None
    from_start: Annotated[
        bool, option("Begin with the first record instead of the last snapshot.")
    ] = False
    checked: Annotated[
        bool, option("Debugging: check internal consistency after every record (slow).")
    ] = False
    what_if: Annotated[
        str,
        option(
            "Show what other settings would have done to the logged requests, next to what was: "
            "policy=NAME (also belady, which knows the future), max-loras=8 and other limits, "
            "holds=NAME+NAME or none, prefetch=none or history, storage=2 (files are read twice as "
            "fast), arrivals=1.5 (requests arrive 1.5 times as fast), separated by commas.",
            metavar="CHANGES",
        ),
    ] = ""
    seed: Annotated[
        int, option("Seed of the durations that --what-if draws.", ge=0, metavar="NUMBER")
    ] = 0

    def replay(self, log_directory: Path, output: "Output") -> "ReplayResult":
        """Replay a log, and show the progress."""
        from loradock.controller.log.replay import records_ahead, replay

        total = records_ahead(log_directory, self.until, from_start=self.from_start)
        with output.progress("replaying", total) as advance:
            shown = count(1)

            def observe(*_: object) -> None:
                if next(shown) % _RECORDS_PER_ADVANCE == 0:
                    advance(_RECORDS_PER_ADVANCE)

            return replay(
                log_directory,
                self.until,
                from_start=self.from_start,
                checked=self.checked,
                observe=observe,
            )


@app.command()
@with_options
def replay(
    ctx: typer.Context,
    options: ReplayOptions,
    directory: Annotated[
        Path | None,
        typer.Argument(metavar="DIRECTORY", help="The controller's directory. Default: --dir."),
    ] = None,
    drawing: Annotated[
        Path | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="HTML file with both runs of --what-if."
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Rebuild the controller's state from the log, compare digests, and show the adapters.

    With --what-if, show what other settings would have done to the logged requests.
    """
    output = output_of(ctx, as_json)
    if options.what_if:
        from loradock.cli.what_if import parse_what_if, run_what_if

        changes = parse_what_if(options.what_if)
        with open_log(directory or directory_of(ctx)) as log_directory:
            run_what_if(output, log_directory, changes, options.seed, drawing)
        return
    with open_log(directory or directory_of(ctx)) as log_directory:
        result = options.replay(log_directory, output)
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
    from loradock.cli.output import field_table
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
    from loradock.controller.log.storage import observed

    output = output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory:
        files = (*log_directory.glob("*.log"), *log_directory.glob("*.snap"))
        size_bytes = sum(file.stat().st_size for file in files)
        with output.progress("reading the log", size_bytes, in_bytes=True) as advance:
            result = verify_log(log_directory, observed(advance))
    fields = {**result.segments._asdict(), "corruption": None}
    if result.segments.corruption is not None:
        fields["corruption"] = _corruption(result.segments.corruption)
    fields |= {name: value for name, value in result._asdict().items() if name != "segments"}
    print_fields(output, fields)
    if result.segments.corruption is not None:
        raise CommandError(ExitCode.LOG, str(result.segments.corruption), _REPAIR_HINT)
    if result.problems:
        raise CommandError(ExitCode.LOG, result.problems[0], _REPAIR_HINT)


@log_app.command()
def repair(
    ctx: typer.Context,
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without this, only show what would be done.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Leave the longest log that the files have, and print which records that loses.

    Files that are corrupt or not a part of it are renamed and kept next to the log.
    """
    from loradock.controller.log.repair import repair as repair_log
    from loradock.controller.log.repair import repair_plan

    output = output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory, output.progress("reading the log"):
        plan = repair_log(log_directory) if yes else repair_plan(log_directory)
    if plan is None:
        print_fields(output, {"corrupt": False, "repaired": False})
        return
    print_fields(output, {"corrupt": not yes, "repaired": yes, "loss": plan.loss, **plan._asdict()})
    if not yes:
        raise CommandError(
            ExitCode.LOG,
            "nothing was changed",
            f"`loradock log repair --yes` repairs the log as shown; {plan.loss}",
        )


def _corruption(corruption: "LogCorrupt") -> dict[str, Any]:
    return {
        "file": corruption.file,
        "offset": corruption.offset,
        "seq": corruption.seq,
        "reason": corruption.reason,
    }


def print_fields(output: "Output", fields: dict[str, Any]) -> None:
    """Print named values: as JSON, or as a table for a person."""
    from loradock.cli.output import field_table

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
            return "\n".join(f"{name}: {_readable_value(item)}" for name, item in value.items())
        case tuple():
            return ", ".join(_readable_value(item) for item in value) or "none"
    return str(value)


AlwaysJson = Annotated[
    bool, typer.Option("--json", help="Print JSON, as it does without this; errors are JSON too.")
]
Retention = Annotated[
    str,
    typer.Option(
        "--log-retention",
        metavar="ACTION",
        help="What is done with files that no restart needs: drop, archive:DIRECTORY or keep.",
    ),
]
KeepHours = Annotated[
    int,
    typer.Option(
        "--log-keep-hours",
        min=0,
        metavar="NUMBER",
        help="How long such files are kept before, in hours of the server's running time.",
    ),
]


@log_app.command()
def dump(
    ctx: typer.Context,
    first_seq: Annotated[
        int, typer.Option("--from", min=1, metavar="SEQ", help="The first record.")
    ] = 1,
    until: Annotated[
        int | None, typer.Option(min=1, metavar="SEQ", help="The last record. Default: all.")
    ] = None,
    as_json: AlwaysJson = True,
) -> None:
    """Print the log's records as JSON, one per line, of any version's log that can be read."""
    from loradock.controller.log.segments import read

    output = output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory:
        for seq, epoch, record in read(log_directory, first_seq):
            if until is not None and seq > until:
                return
            fields = {name: getattr(record, name) for name in record.__struct_fields__}
            output.document({"seq": seq, "epoch": epoch, **fields})


@log_app.command()
def export(
    ctx: typer.Context,
    file: Annotated[
        Path | None,
        typer.Argument(metavar="FILE", help="The file to write, a new one. Default: stdout."),
    ] = None,
    as_json: AlwaysJson = True,
) -> None:
    """Write the adapters and their goals as JSON, for `log import` of this or another version.

    Requests in progress and kept answers are not part of it.
    """
    import msgspec

    from loradock.controller.log.exports import export_state

    output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory:
        state = export_state(log_directory)
    document = msgspec.json.format(msgspec.json.encode(state), indent=2) + b"\n"
    if file is None:
        sys.stdout.write(document.decode())
        return
    with file.open("xb") as target:
        target.write(document)


@log_app.command(name="import")
def import_(
    ctx: typer.Context,
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="The file that `log export` wrote; - for stdin.")
    ],
    as_json: AsJson = False,
) -> None:
    """Make a new log in --dir from an export: every adapter is evicted and keeps its goal."""
    from loradock.controller.log.exports import decode_export, import_state

    output = output_of(ctx, as_json)
    data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
    directory = directory_of(ctx) / "log"
    with _log_errors():
        state = decode_export(data)
        seq = import_state(directory, state)
    fields = {"log": directory, "seq": seq, "adapters": len(state.adapters)}
    print_fields(output, {**fields, "is_exact": state.is_exact})


@log_app.command()
def compact(
    ctx: typer.Context,
    log_retention: Retention = "drop",
    log_keep_hours: KeepHours = LOG_KEEP_HOURS,
    as_json: AsJson = False,
) -> None:
    """Make a snapshot of the whole log, and drop or archive what no restart needs."""
    from loradock.controller.log.repair import compact as compact_log
    from loradock.controller.log.retention import retention_from

    output = output_of(ctx, as_json)
    try:
        retention = retention_from(log_retention, log_keep_hours)
    except ValueError as error:
        raise CommandError(ExitCode.USAGE, str(error)) from error
    with open_log(directory_of(ctx)) as log_directory, output.progress("making a snapshot"):
        made = compact_log(log_directory, retention)
    if made is None:
        raise CommandError(ExitCode.NOT_FOUND, f"the log at {log_directory} is empty")
    print_fields(output, {name: getattr(made, name) for name in made.__struct_fields__})


@log_app.command()
def skip(
    ctx: typer.Context,
    seq: Annotated[int, typer.Argument(min=1, metavar="SEQ", help="The number of the record.")],
    yes: Annotated[
        bool, typer.Option("--yes", help="Do it. Without this, only show the record.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Skip a record whose handling fails: as if it had never come, at every restart from now on.

    The record stays in the log, and that it is skipped is logged too.
    """
    from loradock.controller.log.repair import record_at
    from loradock.controller.log.repair import skip as skip_record

    output = output_of(ctx, as_json)
    with open_log(directory_of(ctx)) as log_directory:
        record = record_at(log_directory, seq)
        skipped_by = skip_record(log_directory, seq) if yes else 0
    print_fields(output, {"seq": seq, "input": record.input, "skipped_by": skipped_by})
    if not yes:
        raise CommandError(
            ExitCode.REFUSED,
            "nothing was changed",
            f"`loradock log skip {seq} --yes` skips the record; what depended on it is undone too",
        )


@contextmanager
def _log_errors() -> Iterator[None]:
    from loradock.controller.log.format import LogError

    try:
        yield
    except LogError as error:
        raise CommandError(ExitCode.REFUSED, str(error)) from error


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
