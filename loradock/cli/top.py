"""The `top` command: slots, states, rates and waits of a running server, on a terminal.

Everything is read by queries once per interval, so that a slow connection shows fewer moments and
never old moments.
"""

# Heavy modules are imported when a command runs: help and completion answer at once.
# ruff: noqa: PLC0415

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Final, NamedTuple, get_args

import typer

from loradock.cli.context import AsJson, open_client, output_of
from loradock.messages.ids import NO_SLOT, AdapterState
from loradock.messages.options import format_size

if TYPE_CHECKING:
    from rich.console import Group, RenderableType

    from loradock.client import Client
    from loradock.messages.requests import AdaptersListed, StatusShown

_BAR_CELLS: Final = 20
_ROWS_MAX: Final = 16
"""Bound on the lines of each table, so that a screen of 40 lines shows all tables."""

app = typer.Typer()

Interval = Annotated[
    float, typer.Option(min=0.1, max=60, metavar="SECONDS", help="Time between two readings.")
]
Once = Annotated[bool, typer.Option("--once", help="Print one reading and exit.")]


class Reading(NamedTuple):
    """All that one screen shows; `at_s` is a monotonic time."""

    at_s: float
    status: "StatusShown"
    listed: "AdaptersListed"


@app.command()
def top(
    ctx: typer.Context, interval: Interval = 1.0, once: Once = False, as_json: AsJson = False
) -> None:
    """Show slots, states, rates and waits, updated until Ctrl-C."""
    output = output_of(ctx, as_json)
    with open_client(ctx) as client:
        reading = _read(client)
        if as_json:
            output.document({"status": reading.status, "adapters": reading.listed.adapters})
        elif once:
            output.show(screen(None, reading))
        else:
            _follow(client, reading, interval)


def _read(client: "Client") -> Reading:
    return Reading(time.monotonic(), client.status(), client.list())


def _follow(client: "Client", reading: Reading, interval_s: float) -> None:
    from rich.live import Live

    with Live(screen(None, reading), auto_refresh=False, screen=True) as live:
        while True:
            time.sleep(interval_s)
            before, reading = reading, _read(client)
            live.update(screen(before, reading), refresh=True)


def screen(before: Reading | None, reading: Reading) -> "Group":
    """Return one screen; rates are those since `before`."""
    from rich.console import Group

    tables = (*_tiers(reading.status), *_slots(reading), *_waiting(reading))
    return Group(_headline(before, reading), *tables)


def _headline(before: Reading | None, reading: Reading) -> "RenderableType":
    from rich.text import Text

    from loradock.cli.output import safe
    from loradock.cli.render import requests_text, unready_text

    status = reading.status
    engine = f"engine {status.engine_id[:8]} ({status.model})" if status.engine_id else "no engine"
    counts = Counter(view.state for view in reading.listed.adapters if not view.retired)
    states = "  ".join(f"{state} {counts[state]}" for state in get_args(AdapterState))
    lines = (
        f"{engine}, {requests_text(status)}, {status.operations} operations",
        _rates(before, reading),
        states,
    )
    text = Text("\n".join(line for line in lines if line))
    if status.unready:
        alarm = Text(f"not ready: {safe(unready_text(status))}\n", style="bold red")
        return alarm.append_text(Text("", style="not bold default").append_text(text))
    return text


def _rates(before: Reading | None, reading: Reading) -> str:
    if before is None or reading.at_s <= before.at_s:
        return ""
    if before.status.epoch != reading.status.epoch:
        return "the controller was restarted"
    elapsed_s = reading.at_s - before.at_s
    old, new = _sums(before), _sums(reading)
    rates = (f"{max(0, new[name] - old[name]) / elapsed_s:.1f} {name}/s" for name in new)
    return ", ".join(rates)


def _sums(reading: Reading) -> dict[str, int]:
    views = reading.listed.adapters
    return {
        "answers": reading.status.answered,
        "refusals": reading.status.refused,
        "loads": sum(view.loads for view in views),
        "evictions": sum(view.evictions for view in views),
    }


def _tiers(status: "StatusShown") -> "Iterator[RenderableType]":
    rows = []
    for tier in status.tiers:
        share = tier.size_bytes / tier.size_bytes_max if tier.size_bytes_max else 0.0
        filled = round(share * _BAR_CELLS)
        bar = "#" * filled + "." * (_BAR_CELLS - filled)
        size = f"{format_size(tier.size_bytes)} of {format_size(tier.size_bytes_max)}"
        rows.append((tier.name, f"{tier.count} of {tier.count_max}", size, bar))
    return _table(("tier", "adapters", "memory", "share"), rows)


def _slots(reading: Reading) -> "Iterator[RenderableType]":
    views = [view for view in reading.listed.adapters if view.slot != NO_SLOT]
    # With more slots than lines, the used slots are of interest.
    views.sort(key=lambda view: (-view.leases, view.slot))
    rows = [
        (
            str(view.slot),
            view.adapter,
            str(view.rank),
            format_size(view.device_bytes),
            str(view.leases),
            "yes" if view.held else "",
        )
        for view in sorted(views[:_ROWS_MAX], key=lambda view: view.slot)
    ]
    return _table(("slot", "adapter", "rank", "size", "requests", "held"), rows, len(views))


def _waiting(reading: Reading) -> "Iterator[RenderableType]":
    from loradock.cli.render import state_text

    views = [view for view in reading.listed.adapters if view.waiting]
    views.sort(key=lambda view: (-view.waiting, view.adapter))
    rows = [(str(view.waiting), view.adapter, state_text(view)) for view in views[:_ROWS_MAX]]
    return _table(("waiting", "adapter", "state"), rows, len(views))


def _table(
    columns: tuple[str, ...], rows: Sequence[tuple[str, ...]], total: int = 0
) -> "Iterator[RenderableType]":
    from loradock.cli.output import FittingTable

    yield FittingTable(columns, rows, kept=2)
    if total > len(rows):
        yield f"and {total - len(rows)} more"
