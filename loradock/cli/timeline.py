"""The `timeline` command: a log as the page draws it, with a lane per slot and per adapter."""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

from pathlib import Path
from typing import Annotated, Final

import typer

from loradock.cli.context import directory_of, output_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.messages.events import Published

_EVENTS_PER_READ: Final = 4096

app = typer.Typer()


From = Annotated[int, typer.Option("--from", min=0, metavar="EVENT", help="First event to draw.")]
To = Annotated[
    int | None, typer.Option("--to", min=1, metavar="EVENT", help="Last event. Default: all.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="HTML file to write, which can save the picture as SVG. Default: stdout.",
    ),
]
AsEvents = Annotated[
    bool, typer.Option("--json", help="Print the events that would be drawn, one per line.")
]


@app.command()
def timeline(
    ctx: typer.Context,
    first: From = 0,
    last: To = None,
    output: Out = None,
    as_json: AsEvents = False,
) -> None:
    """Draw the adapters of a log over time: a lane per slot, loads, evictions and failures."""
    from loradock.gateway import web

    lines = output_of(ctx, as_json)
    if output is not None and output.suffix != ".html":
        raise CommandError(ExitCode.USAGE, f"{output} must end in .html; its page saves an SVG")
    found = [
        published
        for published in events_of(directory_of(ctx))
        if first <= published.seq and (last is None or published.seq <= last)
    ]
    if not found:
        raise CommandError(ExitCode.NOT_FOUND, "there are no events in this part of the log")
    if as_json:
        for published in found:
            lines.document(published)
        return
    text = web.timeline(found)
    if output is None:
        typer.echo(text)
    else:
        output.write_text(text)


def events_of(directory: Path) -> list[Published]:
    """Return the events that a server's directory holds, oldest first; raises `CommandError`.

    Older ones are in a database; those after the newest snapshot are made by a replay.
    """
    from loradock.cli.log_commands import open_log
    from loradock.controller.core.actions import PublishEvent
    from loradock.controller.log.events import EventReader
    from loradock.controller.log.replay import replay

    found: list[Published] = []
    with open_log(directory) as log_directory:
        reader = EventReader(log_directory)
        seq = reader.oldest_seq
        while seq and (page := reader.read(seq, _EVENTS_PER_READ)):
            found += page
            seq = reader.next_seq(page[-1].seq + 1)
        last_seq = found[-1].seq if found else 0
        replay(
            log_directory,
            sink=lambda actions: found.extend(
                action.message
                for action in actions
                if isinstance(action, PublishEvent) and action.message.seq > last_seq
            ),
        )
    return found
