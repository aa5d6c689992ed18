"""Messages as lines and tables for people; programs read the JSON of `controller.cli.output`."""

import math
import operator
import time
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from rich.box import SIMPLE
from rich.table import Table

from controller.cli.sizes import format_size
from controller.client.pooling import Classification, Embedding
from controller.client.streams import EventItem, Gap, Snapshot
from messages.ids import NO_SLOT
from messages.requests import (
    AdapterDone,
    AdapterShown,
    AdaptersListed,
    BatchDone,
    CancelDone,
    StatusShown,
)
from messages.views import AdapterView, TierView

_SECOND_NS: Final = 1_000_000_000
_TEXT_CHARACTERS_MAX: Final = 60

# The characters that move a terminal's cursor or change its state, except newline and tab.
_CONTROLS: Final = dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}") | {
    9: "\t",
    10: "\n",
}


def safe(text: str) -> str:
    """Replace the characters that could control a terminal."""
    return text.translate(_CONTROLS)


def renderables(reply: Any) -> list[Table | str]:
    """Return what to print for a reply of the controller."""
    return _RENDERERS[type(reply)](reply)


def event_line(item: EventItem) -> str:
    """Return one event as one line: number, time (UTC), type and fields."""
    if isinstance(item, Gap):
        if item.found > item.expected:
            return f"events {item.expected} to {item.found - 1} are not kept any more"
        return f"the log was restarted: event {item.expected} was due, {item.found} is next"
    if isinstance(item, Snapshot):
        not_kept = f"events {item.expected} to {item.seq} are not kept any more"
        return f"{not_kept}; there were {len(item.adapters)} adapters after them"
    event = item.event
    fields = (f"{name}={getattr(event, name)}" for name in event.__struct_fields__)
    line = f"{item.seq:>6}  {_clock(item.time_ns)}  {type(event).__name__:<20}  {' '.join(fields)}"
    return " ".join(line.splitlines())


def ago(time_ns: int) -> str:
    """Return how long ago a UTC time was, in its largest unit; `-` for never."""
    if time_ns == 0:
        return "-"
    seconds = max(0, (time.time_ns() - time_ns) // _SECOND_NS)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"


def embedding(texts: Sequence[str], result: Embedding) -> list[Table | str]:
    """Return a table of shortened vectors and their cosine similarity to every text."""
    columns = ("", "text", "vector", *(str(number) for number in range(1, len(texts) + 1)))
    rows = (
        (str(number), _short(text), _vector(vector), *_similarities(vector, result.vectors))
        for number, (text, vector) in enumerate(zip(texts, result.vectors, strict=True), 1)
    )
    return [_table(columns, rows)]


def _vector(vector: Sequence[float]) -> str:
    first = " ".join(f"{number:.3f}" for number in vector[:3])
    return f"{first} ... ({len(vector)})"


def _similarities(vector: Sequence[float], others: Iterable[Sequence[float]]) -> Iterable[str]:
    for other in others:
        norms = math.hypot(*vector) * math.hypot(*other)
        yield f"{sum(map(operator.mul, vector, other)) / norms:.3f}" if norms else "-"


def classification(texts: Sequence[str], result: Classification) -> list[Table | str]:
    """Return a table of texts with their best label and all scores."""
    rows = (
        (_short(text), best, *(f"{score:.4f}" for score in scores))
        for text, best, scores in zip(texts, result.best, result.scores, strict=True)
    )
    return [_table(("text", "best", *result.labels), rows)]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_CHARACTERS_MAX else line[: _TEXT_CHARACTERS_MAX - 3] + "..."


def _done(reply: AdapterDone) -> list[Table | str]:
    slot = "" if reply.slot == NO_SLOT else f" {reply.slot} (generation {reply.generation})"
    return [f"{reply.adapter}: {reply.state}{slot}"]


def _batch(reply: BatchDone) -> list[Table | str]:
    rows = ((p.adapter, str(p.slot), str(p.generation)) for p in reply.placements)
    return [_table(("adapter", "slot", "generation"), rows)]


def _cancelled(reply: CancelDone) -> list[Table | str]:
    outcome = "cancelled" if reply.found else "nothing was running as"
    return [safe(f"{outcome} {reply.target}")]


def _shown(reply: AdapterShown) -> list[Table | str]:
    return [field_table(_adapter_fields(view)) for view in (reply.adapter, *reply.retired)]


def _status(reply: StatusShown) -> list[Table | str]:
    return [field_table(_status_fields(reply)), _tiers(reply.tiers)]


def _list(reply: AdaptersListed) -> list[Table | str]:
    if not reply.adapters:
        return ["no adapters are known"]
    columns = ("adapter", "state", "slot", "rank", "held", "leases", "size", "uses", "last used")
    return [_table(columns, (_row(view) for view in reply.adapters))]


def _row(view: AdapterView) -> tuple[str, ...]:
    size_bytes = view.host_bytes + view.pinned_bytes
    return (
        f"{view.adapter} (retired)" if view.retired else view.adapter,
        _state(view),
        _slot(view),
        str(view.rank) if view.rank else "-",
        "yes" if view.held else "",
        str(view.leases) if view.leases else "",
        format_size(size_bytes) if size_bytes else "-",
        str(view.uses),
        ago(view.last_used_ns),
    )


def _state(view: AdapterView) -> str:
    return view.state if view.state == view.goal else f"{view.state} > {view.goal}"


def _slot(view: AdapterView) -> str:
    return "-" if view.slot == NO_SLOT else str(view.slot)


def _adapter_fields(view: AdapterView) -> dict[str, str]:
    """Return every field in the message's order, with readable sizes and times."""
    fields = {}
    for name, value in msgspec.structs.asdict(view).items():
        match name:
            case "host_bytes" | "pinned_bytes" | "device_bytes":
                fields[name.removesuffix("_bytes")] = format_size(value)
            case "last_used_ns":
                fields["last used"] = ago(value)
            case "slot":
                fields["slot"] = _slot(view)
            case _:
                shown = {True: "yes", False: "no"}.get(value) if isinstance(value, bool) else value
                fields[name.replace("_", " ")] = str(shown)
    return fields


def _status_fields(status: StatusShown) -> dict[str, str]:
    engine = f"{status.engine_id} (pid {status.engine_pid})" if status.engine_id else "none"
    return {
        "controller": f"epoch {status.epoch} (pid {status.controller_pid})",
        "log": f"record {status.seq}, event {status.events_seq}, {format_size(status.log_bytes)}",
        "snapshot": _snapshot(status),
        "digest": status.digest,
        "policy": status.policy,
        "engine": engine,
        "model": status.model or "-",
        "adapters": str(status.adapters),
        "under way": f"{status.requests} requests, {status.operations} operations",
        "so far": f"{status.answered} answered, {status.refused} refused",
    }


def _snapshot(status: StatusShown) -> str:
    if not status.snapshot_seq:
        return "none"
    return f"record {status.snapshot_seq}, {status.snapshot_age_ms // 1000} s old"


def _tiers(tiers: tuple[TierView, ...]) -> Table:
    rows = (
        (
            tier.name,
            f"{tier.count} of {tier.count_max}" if tier.count_max else str(tier.count),
            f"{format_size(tier.size_bytes)} of {format_size(tier.size_bytes_max)}",
        )
        for tier in tiers
    )
    return _table(("tier", "adapters", "memory"), rows)


def field_table(fields: dict[str, str]) -> Table:
    """Return a table of names and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, safe(value))
    return table


def _table(columns: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> Table:
    table = Table(box=SIMPLE, pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(safe(cell) for cell in row))
    return table


def _clock(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, _SECOND_NS)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{rest // 1_000_000:03}Z"


_RENDERERS: Final[dict[type, Callable[[Any], list[Table | str]]]] = {
    AdapterDone: _done,
    BatchDone: _batch,
    AdaptersListed: _list,
    AdapterShown: _shown,
    StatusShown: _status,
    CancelDone: _cancelled,
}
