"""The output of the demo: the life cycle as reported by events, and the final table.

The live lines use published events only, which any subscriber receives.
"""

import time
from collections import Counter
from pathlib import Path

from rich.console import Console
from rich.table import Table

from loradock.client import Gap
from loradock.controller.log.replay import ReplayResult
from loradock.lab.simulator import Changes, simulate
from loradock.lab.traffic import read_traffic
from loradock.messages import events
from loradock.messages.events import Published
from loradock.messages.requests import AdaptersListed, StatusShown


class LifeCycle:
    """The adapter in each slot and the numbers of events, from the event stream."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started = time.monotonic()
        self._slots: dict[int, str] = {}
        self._counts: Counter[str] = Counter()
        self._seq = 0
        self._shown = (-1, 0)

    def on_event(self, published: Published | Gap) -> None:
        """Process one event and print the changes of the processes."""
        if isinstance(published, Gap):
            return
        self._seq = published.seq
        event = published.event
        self._counts[type(event).__name__] += 1
        match event:
            case events.AdapterActivated():
                self._slots[event.slot] = event.adapter
            case events.AdapterDeactivated():
                self._slots.pop(event.slot, None)
            case events.EngineDetached():
                self._slots.clear()
                self._print(f"[yellow]engine detached[/]: {event.reason}")
            case events.EngineAttached():
                self._print("[green]engine attached[/]: adapters are moved to their goals again")
            case events.ControllerResumed() if self._counts["ControllerResumed"] > 1:
                self._print("[green]controller resumed[/]: its state was rebuilt from its log")

    def _print(self, text: str) -> None:
        self._console.print(f"  event {self._seq:>5}  {text}")

    def show(self, answered: int) -> None:
        """Print one line, if anything has changed: time, slots and numbers of events."""
        if (answered, self._seq) == self._shown:
            return
        self._shown = (answered, self._seq)
        slots = " ".join(f"{slot}:{self._slots.get(slot, '-'):<8}" for slot in range(3))
        seconds = time.monotonic() - self._started
        self._console.print(
            f"{seconds:5.1f} s  slots {slots}  answered {answered:>3}"
            f"  activated {self._counts['AdapterActivated']:>3}"
            f"  evicted {self._counts['AdapterEvicted']:>3}  events {self._seq:>4}"
        )


def summary(listed: AdaptersListed, requests: Counter[str], exact: Counter[str]) -> Table:
    """Return the final table: per adapter its bytes by tier, counters and exact matches."""
    table = Table(title="adapters at the end")
    for name in ("adapter", "state"):
        table.add_column(name)
    for name in ("slot", "rank", "host B", "pinned B", "device B"):
        table.add_column(name, justify="right")
    for name in ("loads", "hits", "evictions", "exact"):
        table.add_column(name, justify="right")
    for view in listed.adapters:
        sizes = (view.rank, view.host_bytes, view.pinned_bytes, view.device_bytes)
        counters = (view.loads, view.hits, view.evictions)
        slot = "-" if view.slot < 0 else str(view.slot)
        score = f"{exact[view.adapter]}/{requests[view.adapter]}"
        table.add_row(view.adapter, view.state, slot, *map(str, (*sizes, *counters)), score)
    base = "(base)"
    table.add_row(base, *["-"] * 9, f"{exact[base]}/{requests[base]}")
    return table


def print_totals(
    console: Console, counts: tuple[int, int, int], status: StatusShown, result: ReplayResult
) -> None:
    """Print the requests answered, lost and wrong, and the two digests."""
    answered, lost, wrong = counts
    console.print(f"requests: {answered} answered, {lost} lost, {wrong} wrong")
    console.print(f"digest of the running controller at input {status.seq}: {status.digest}")
    console.print(f"digest of the replayed log       at input {result.inputs}: {result.digest}")
    console.print(f"digests compared during the replay: {result.digests_compared}")
    if result.divergence is not None:
        console.print(f"[red]diverged before input {result.divergence.seq}[/]")


def print_what_if(console: Console, log_directory: Path, slots: int) -> None:
    """Print in five lines what more slots would have done to the requests of the log."""
    traffic = read_traffic(log_directory)
    changes = Changes(limits={"max_loras": slots})
    logged, repeated, changed = (
        traffic.logged,
        simulate(traffic).outcome,
        simulate(traffic, changes).outcome,
    )
    assert logged is not None  # noqa: S101 - it is of a log
    console.print(
        f"What if there were {slots} slots? The same requests, simulated without crashes:"
    )
    _print_cells(console, "", "as logged", "simulated as logged", f"{slots} slots")
    outcomes = (logged, repeated, changed)
    _print_cells(console, "slot writes", *(str(one.activations) for one in outcomes))
    _print_cells(console, "wait p95", *(f"{1000 * one.wait_s.p95:.0f} ms" for one in outcomes))
    _print_cells(console, "tokens/s", *(f"{one.tokens_per_s:.0f}" for one in outcomes))


def _print_cells(console: Console, name: str, *cells: str) -> None:
    console.print(f"  {name:<12}" + "".join(f"{cell:>21}" for cell in cells))
