"""The `timeline` command: a log as a picture, with one lane per slot.

Its events become bars: an adapter is in a slot from its activation to its
deactivation or the engine's loss. A second part shows per adapter when it was on the host.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import html
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Annotated, Final, NamedTuple

import typer

from loradock.cli.context import directory_of
from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.messages import events as ev
from loradock.messages.events import Published

WIDTH: Final = 1200
LABEL_WIDTH: Final = 150
LANE_HEIGHT: Final = 22
LANES_MAX: Final = 500
TICKS: Final = 8
_EVENTS_PER_READ: Final = 4096
_NS: Final = 1_000_000_000
_HTML_HEAD: Final = (
    '<!doctype html>\n<html lang="en"><meta charset="utf-8"><title>Timeline</title>\n'
)

app = typer.Typer()


class Bar(NamedTuple):
    """An adapter in a lane, from one time to another (nanoseconds)."""

    lane: str
    adapter: str
    start_ns: int
    end_ns: int


class Mark(NamedTuple):
    """Something that happened at one moment: an eviction, a failure, a start."""

    lane: str
    text: str
    time_ns: int


class Picture(NamedTuple):
    """Lanes in order, and what is drawn in them."""

    lanes: list[str]
    bars: list[Bar]
    marks: list[Mark]


From = Annotated[int, typer.Option("--from", min=0, metavar="EVENT", help="First event to draw.")]
To = Annotated[
    int | None, typer.Option("--to", min=1, metavar="EVENT", help="Last event. Default: all.")
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--output", "-o", metavar="FILE", help="File to write, .svg or .html. Default: stdout."
    ),
]


@app.command()
def timeline(ctx: typer.Context, first: From = 0, last: To = None, output: Out = None) -> None:
    """Draw the adapters of a log over time: a lane per slot, loads, evictions and failures."""
    if output is not None and output.suffix not in (".svg", ".html"):
        raise CommandError(ExitCode.USAGE, f"{output} is neither .svg nor .html")
    found = [
        published
        for published in events_of(directory_of(ctx))
        if first <= published.seq and (last is None or published.seq <= last)
    ]
    if not found:
        raise CommandError(ExitCode.NOT_FOUND, "there are no events in this part of the log")
    picture = draw(found)
    text = svg_of(picture, found[0].time_ns, max(published.time_ns for published in found))
    if output is not None and output.suffix == ".html":
        text = _HTML_HEAD + text
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


def draw(events: Iterable[Published]) -> Picture:
    """Return what is drawn for events in order."""
    drawing = _Drawing()
    for published in events:
        drawing.apply(published)
    return drawing.finish()


class _Drawing:
    """The bars that are open while events are read."""

    def __init__(self) -> None:
        self._open: dict[str, tuple[str, str, int]] = {}
        self._bars: list[Bar] = []
        self._marks: list[Mark] = []
        self._slots: set[int] = set()
        self._adapters: dict[str, None] = {}
        self._end_ns = 0

    def apply(self, published: Published) -> None:
        """Process the next event."""
        event, now = published.event, published.time_ns
        self._end_ns = max(self._end_ns, now)
        match event:
            case ev.AdapterActivated(adapter=adapter, slot=slot):
                self._slots.add(slot)
                self._begin(f"slot {slot}", adapter, now)
            case ev.AdapterDeactivated(slot=slot):
                self._close(f"slot {slot}", now)
            case ev.AdapterCached(adapter=adapter):
                self._adapters[adapter] = None
                self._begin(adapter, adapter, now)
            case ev.AdapterEvicted(adapter=adapter, reason=reason):
                self._on_evicted(adapter, reason, now)
            case ev.AdapterRemoved(adapter=adapter):
                self._close(adapter, now)
            case ev.AdapterFailed(adapter=adapter, code=code):
                self._adapters[adapter] = None
                self._marks.append(Mark(adapter, f"failed: {code.value}", now))
            case ev.EngineAttached() | ev.EngineDetached() | ev.ControllerResumed():
                self._marks.append(Mark("", type(event).__name__, now))

    def _on_evicted(self, adapter: str, reason: str, now: int) -> None:
        self._adapters[adapter] = None
        for lane, (_, name, _) in list(self._open.items()):
            if name == adapter:
                self._close(lane, now)
        self._marks.append(Mark(adapter, f"evicted: {reason}", now))

    def _begin(self, lane: str, adapter: str, now: int) -> None:
        if lane not in self._open:
            self._open[lane] = (lane, adapter, now)

    def _close(self, lane: str, now: int) -> None:
        bar = self._open.pop(lane, None)
        if bar is not None:
            self._bars.append(Bar(*bar, max(now, bar[2])))

    def finish(self) -> Picture:
        """Close the bars that are open, and return all lanes."""
        for lane in list(self._open):
            self._close(lane, self._end_ns)
        slots = [f"slot {slot}" for slot in sorted(self._slots)]
        return Picture([*slots, *sorted(self._adapters)][:LANES_MAX], self._bars, self._marks)


def svg_of(picture: Picture, start_ns: int, end_ns: int) -> str:
    """Return the picture as SVG, with the times in seconds from its start."""
    scale = (WIDTH - LABEL_WIDTH) / max(1, end_ns - start_ns)
    height = (len(picture.lanes) + 2) * LANE_HEIGHT
    rows = {lane: index * LANE_HEIGHT for index, lane in enumerate(picture.lanes, 1)}

    def x_of(time_ns: int) -> float:
        return LABEL_WIDTH + max(0, time_ns - start_ns) * scale

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        *_axis(start_ns, end_ns, height),
        *(f'<text x="4" y="{y + 15}">{html.escape(lane)}</text>' for lane, y in rows.items()),
    ]
    for bar in picture.bars:
        if bar.lane in rows:
            left, right = x_of(bar.start_ns), x_of(bar.end_ns)
            parts += [_box(bar, left, rows[bar.lane], max(1.0, right - left))]
    parts += [
        _line(mark, x_of(mark.time_ns), rows.get(mark.lane), height) for mark in picture.marks
    ]
    return "\n".join([*parts, "</svg>\n"])


def _axis(start_ns: int, end_ns: int, height: int) -> Iterator[str]:
    for tick in range(TICKS + 1):
        x = LABEL_WIDTH + (WIDTH - LABEL_WIDTH) * tick / TICKS
        seconds = (end_ns - start_ns) * tick / TICKS / _NS
        anchor = "end" if tick == TICKS else "middle"
        yield f'<line x1="{x:.1f}" x2="{x:.1f}" y1="16" y2="{height}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="12" text-anchor="{anchor}">{seconds:.2f} s</text>'


def _box(bar: Bar, x: float, y: int, width: float) -> str:
    title = html.escape(f"{bar.adapter}, {(bar.end_ns - bar.start_ns) / _NS:.3f} s")
    return (
        f'<rect x="{x:.1f}" y="{y + 2}" width="{width:.1f}" height="{LANE_HEIGHT - 4}" '
        f'fill="hsl({_hue(bar.adapter)} 60% 60%)"><title>{title}</title></rect>'
    )


def _line(mark: Mark, x: float, y: int | None, height: int) -> str:
    """Return a mark in its lane; one of the whole server crosses all lanes."""
    top, bottom = (16, height) if y is None else (y, y + LANE_HEIGHT)
    dashes = ' stroke-dasharray="4"' if y is None else ""
    return (
        f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{top}" y2="{bottom}" stroke="#333"{dashes}>'
        f"<title>{html.escape(mark.text)}</title></line>"
    )


def _hue(name: str) -> int:
    hue = 0
    for letter in name:
        hue = (hue * 31 + ord(letter)) % 360
    return hue
