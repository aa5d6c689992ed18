"""The commands on a log's content: `log dump`, `export`, `import`, `compact` and `skip`.

`dump` and `export` change no file; the others refuse while a server writes the log.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer

from loradock.cli.context import AsJson, directory_of, output_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.cli.log_commands import app, log_app, open_log, print_fields
from loradock.controller.log.settings import LOG_KEEP_HOURS

__all__ = ["app"]

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
) -> None:
    """Print the log's records as JSON, one per line, of any version's log that can be read."""
    from loradock.controller.log.segments import read

    output = output_of(ctx, as_json=True)
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
        Path | None, typer.Argument(help="The file to write, a new one. Default: stdout.")
    ] = None,
) -> None:
    """Write the adapters and their goals as JSON, for `log import` of this or another version.

    Requests in progress and kept answers are not part of it.
    """
    import msgspec

    from loradock.controller.log.exports import export_state

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
    file: Annotated[Path, typer.Argument(help="The file that `log export` wrote; - for stdin.")],
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
    seq: Annotated[int, typer.Argument(min=1, help="The number of the record.")],
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
