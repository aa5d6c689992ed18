"""Messages as lines and tables for people; programs read the JSON of `loradock.cli.output`."""

import math
import operator
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec

from loradock.cli.available import Available
from loradock.cli.output import FittingTable, Renderable, field_table, safe
from loradock.client.calls import Classification, Embedding
from loradock.client.streams import EventItem, Gap, Snapshot
from loradock.controller.core.limits import Limits
from loradock.messages.control import RequestsListed, SettingsShown, SlowListed
from loradock.messages.ids import NO_SLOT
from loradock.messages.options import Option, format_size, options_of
from loradock.messages.requests import (
    AdapterDone,
    AdapterShown,
    AdaptersListed,
    BatchDone,
    CancelDone,
    PrefetchAccepted,
    StatusShown,
)
from loradock.messages.views import (
    AdapterCounters,
    AdapterView,
    Batching,
    FailureView,
    TierView,
    Warnings,
)

_SECOND_NS: Final = 1_000_000_000
_TEXT_CHARACTERS_MAX: Final = 30

_LIST_COLUMNS: Final = (
    *("adapter", "state", "slot", "held", "rank", "size", "uses", "last used"),
    *("leases", "waiting", "loads", "evictions", "failures"),
)
"""The columns of `list`, the most important first."""


def renderables(reply: Any) -> list[Renderable]:
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
    fields = (_event_field(name, getattr(event, name)) for name in event.__struct_fields__)
    line = f"{item.seq:>6}  {_clock(item.time_ns)}  {type(event).__name__:<20}  {' '.join(fields)}"
    return " ".join(line.splitlines())


def _event_field(name: str, value: Any) -> str:
    if name.endswith("_ns"):
        return f"{name.removesuffix('_ns')}={duration(value // 1_000_000).replace(' ', '')}"
    return f"{name}={value}"


def ago(time_ns: int) -> str:
    """Return how long ago a UTC time was, in its largest unit; `-` for never."""
    if time_ns == 0:
        return "-"
    seconds = max(0, (time.time_ns() - time_ns) // _SECOND_NS)
    for unit, size in (("d", 86_400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds // size}{unit} ago"
    return f"{seconds}s ago"


def embedding(texts: Sequence[str], result: Embedding) -> list[Renderable]:
    """Return a table of shortened vectors and their cosine similarity to every text."""
    columns = ("", "text", "vector", *(str(number) for number in range(1, len(texts) + 1)))
    rows = (
        (str(number), _short(text), _vector(vector), *_similarities(vector, result.vectors))
        for number, (text, vector) in enumerate(zip(texts, result.vectors, strict=True), 1)
    )
    return [FittingTable(columns, rows)]


def _vector(vector: Sequence[float]) -> str:
    first = " ".join(f"{number:.3f}" for number in vector[:3])
    return f"{first} ... ({len(vector)})"


def _similarities(vector: Sequence[float], others: Iterable[Sequence[float]]) -> Iterable[str]:
    for other in others:
        norms = math.hypot(*vector) * math.hypot(*other)
        yield f"{sum(map(operator.mul, vector, other)) / norms:.3f}" if norms else "-"


def classification(texts: Sequence[str], result: Classification) -> list[Renderable]:
    """Return a table of texts with their best label and all scores."""
    rows = (
        (_short(text), best, *(f"{score:.4f}" for score in scores))
        for text, best, scores in zip(texts, result.best, result.scores, strict=True)
    )
    return [FittingTable(("text", "best", *result.labels), rows)]


def _short(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _TEXT_CHARACTERS_MAX else line[: _TEXT_CHARACTERS_MAX - 3] + "..."


def _done(reply: AdapterDone) -> list[Renderable]:
    slot = "" if reply.slot == NO_SLOT else f" {reply.slot} (generation {reply.generation})"
    return [f"{reply.adapter}: {reply.state}{slot}", *_warnings(reply.warnings)]


def _warnings(warnings: Warnings) -> list[Renderable]:
    return [safe(f"warning: {warning}") for warning in warnings]


def _prefetch(reply: PrefetchAccepted) -> list[Renderable]:
    towards = "" if reply.state == reply.goal else f", moving to {reply.goal}"
    return [f"{reply.adapter}: {reply.state}{towards}"]


def _batch(reply: BatchDone) -> list[Renderable]:
    rows = ((p.adapter, str(p.slot), str(p.generation)) for p in reply.placements)
    return [FittingTable(("adapter", "slot", "generation"), rows)]


def _cancelled(reply: CancelDone) -> list[Renderable]:
    return [safe(f"cancelled {reply.target}")]


def _shown(reply: AdapterShown) -> list[Renderable]:
    batching = {"batching": _batching(reply.batching, reply.batching_refusal)}
    shown: list[Renderable] = []
    for view in (reply.adapter, *reply.retired):
        fields = _adapter_fields(view) | ({} if shown else batching)
        shown += [field_table(fields), *_warnings(view.warnings)]
    return [*shown, *_failure(reply.failure)]


def _failure(failure: FailureView | None) -> list[Renderable]:
    if failure is None:
        return []
    age = duration(failure.age_ms)
    lines = [f"the last attempt failed {age} ago: {failure.code} {failure.message}"]
    return [safe(line) for line in (*lines, *(f"  - {detail}" for detail in failure.details))]


def _status(reply: StatusShown) -> list[Renderable]:
    return [field_table(_status_fields(reply)), _tiers(reply.tiers)]


def _list(reply: AdaptersListed) -> list[Renderable]:
    if not reply.adapters:
        return ["no adapters are known"]
    table = FittingTable(_LIST_COLUMNS, (_row(view) for view in reply.adapters))
    return [table, *(_first_warning(view) for view in reply.adapters if view.warnings)]


def _first_warning(view: AdapterView) -> str:
    first, *others = view.warnings
    more = f" (and {len(others)} more: loradock show {view.adapter})" if others else ""
    return safe(f"{view.adapter}: warning: {first}{more}")


def _row(view: AdapterView) -> tuple[str, ...]:
    size_bytes = view.host_bytes + view.pinned_bytes
    return (
        f"{view.adapter} (retired)" if view.retired else view.adapter,
        state_text(view),
        _slot(view),
        "yes" if view.held else "",
        str(view.rank) if view.rank else "-",
        format_size(size_bytes) if size_bytes else "-",
        str(view.uses),
        ago(view.last_used_ns),
        str(view.leases) if view.leases else "",
        str(view.waiting) if view.waiting else "",
        str(view.loads),
        str(view.evictions),
        str(view.failures) if view.failures else "",
    )


def availability(found: Sequence[Available], states: Mapping[str, str]) -> list[Renderable]:
    """Return a table of adapters below the roots; `states`: what the server knows of them."""
    if not found:
        return ["no directory below the roots has an adapter_config.json"]
    rows = (
        (
            one.name,
            str(one.rank) if one.rank else "-",
            format_size(one.size_bytes),
            states.get(one.name, "not loadable" if one.problem else "not loaded"),
            one.path,
        )
        for one in found
    )
    table = FittingTable(("adapter", "rank", "size", "state", "path"), rows)
    return [table, *(safe(f"{one.name}: {one.problem}") for one in found if one.problem)]


def state_text(view: AdapterView) -> str:
    """Return an adapter's state, and its goal if that is another."""
    return view.state if view.state == view.goal else f"{view.state} > {view.goal}"


def _slot(view: AdapterView) -> str:
    return "-" if view.slot == NO_SLOT else str(view.slot)


def _adapter_fields(view: AdapterView) -> dict[str, str]:
    """Return every field in the message's order, with readable sizes and times."""
    fields = {}
    for name, value in msgspec.structs.asdict(view).items():
        match name:
            case "warnings":
                # In whole lines below.
                pass
            case "counters":
                fields.update(counter_fields(value))
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


def counter_fields(counters: AdapterCounters) -> dict[str, str]:
    """Return the counters in groups, with durations in seconds."""

    def seconds(name: str) -> str:
        return f"{getattr(counters, name) / _SECOND_NS:.3f} s"

    states = ("unregistered", "evicted", "cpu_cached", "pinned", "gpu_slot")
    times = (f"{name.replace('_', '-')} {seconds(f'{name}_ns')}" for name in states)
    return {
        "found in slot": _hit_rate(counters),
        "prefetches": str(counters.prefetches),
        "moved up": f"{counters.checks} checks ({seconds('check_ns')}), {counters.loads} loads "
        f"({seconds('load_ns')}), {counters.stagings} stagings ({seconds('stage_ns')}), "
        f"{counters.activations} activations ({seconds('write_ns')})",
        "moved down": f"{counters.deactivations} deactivations, {counters.unstagings} unstagings, "
        f"{counters.unloads} unloads",
        "evicted": f"{counters.evictions} times for others, "
        f"{counters.evictions_caused} others for it",
        "stalls": f"{counters.stalls} waits for room ({seconds('stall_ns')}), "
        f"{seconds('stall_caused_ns')} caused",
        "time": ", ".join(times),
        "served": f"{counters.served} requests, {counters.prompt_tokens} prompt and "
        f"{counters.output_tokens} output tokens",
        "prefix reuse": f"{counters.prefix_hits} requests, {counters.prefix_tokens} tokens",
    }


def _status_fields(status: StatusShown) -> dict[str, str]:
    engine = "none: no request can be served"
    if status.engine_id:
        engine = f"{status.engine_id} (pid {status.engine_pid})"
    return {
        "server": f"LoRADock {status.version or '(older)'}, up {duration(status.uptime_ms)}"
        f"{', stopping' if status.stopping else ''}",
        "ready": f"no: {unready_text(status)}" if status.unready else "yes",
        "controller": f"epoch {status.epoch} (pid {status.controller_pid})",
        "engine": engine,
        "model": f"{status.model}, {status.dtype} on {status.device}"
        if status.device
        else status.model or "-",
        "memory": f"controller {format_size(status.memory_bytes)}, "
        f"engine {format_size(status.engine_memory_bytes)}",
        "adapters": f"{status.adapters} known, policy {status.policy}",
        "in progress": f"{requests_text(status)}, {status.operations} operations",
        "so far": f"{status.answered} answered, {status.refused} refused",
        "log": f"record {status.seq}, event {status.events_seq}, {format_size(status.log_bytes)}"
        f"{' (not writable)' if status.log_error else ''}",
        "disk": f"{format_size(status.disk_free_bytes)} free",
        "snapshot": _snapshot(status),
        "digest": status.digest,
        "batching": _batching(status.engine.batching, status.engine.batching_refusal),
        "keys, values": _kv_cache(status),
        **counter_fields(status.counters),
    }


def unready_text(status: StatusShown) -> str:
    """Return why a server takes no new work, with the error of its log."""
    return ": ".join(filter(None, (status.unready, status.log_error)))


def requests_text(status: StatusShown) -> str:
    """Return the number of requests in progress, and of inferences among them by phase."""
    return (
        f"{status.requests} requests ({status.running} running, {status.queued} queued, "
        f"{status.waiting} waiting for a slot)"
    )


def _batching(batching: Batching, refusal: str) -> str:
    """Return how the engine runs sequences, and the first reason why it is no faster."""
    return safe(f"{batching}: {refusal}" if refusal else batching or "-")


def _kv_cache(status: StatusShown) -> str:
    """Return how the engine keeps keys and values, and their memory."""
    engine = status.engine
    if not engine.kv_layout:
        return "-"
    size = format_size(engine.kv_bytes)
    if engine.kv_layout == "padded":
        return f"padded, {size}; prefixes are not reused"
    return f"paged, {size} of {format_size(engine.kv_bytes_max)}"


def _hit_rate(counters: AdapterCounters) -> str:
    """Return the share of uses that found their adapter in a slot, and the others' mean wait."""
    requests = counters.hits + counters.misses
    if not requests:
        return "no requests yet"
    rate = f"{counters.hits} of {requests} requests ({counters.hits / requests:.0%})"
    if not counters.misses:
        return rate
    mean_ms = counters.wait_ns // counters.misses // 1_000_000
    return f"{rate}; the others waited {duration(mean_ms)} on average"


def _snapshot(status: StatusShown) -> str:
    if not status.snapshot_seq:
        return "none"
    return f"record {status.snapshot_seq}, {duration(status.snapshot_age_ms)} old"


def _tiers(tiers: tuple[TierView, ...]) -> FittingTable:
    rows = (
        (
            tier.name,
            f"{tier.count} of {tier.count_max}" if tier.count_max else str(tier.count),
            f"{format_size(tier.size_bytes)} of {format_size(tier.size_bytes_max)}",
        )
        for tier in tiers
    )
    return FittingTable(("tier", "adapters", "memory"), rows)


def _clock(time_ns: int) -> str:
    seconds, rest = divmod(time_ns, _SECOND_NS)
    moment = datetime.fromtimestamp(seconds, UTC)
    return f"{moment:%Y-%m-%d %H:%M:%S}.{rest // 1_000_000:03}Z"


def _requests(reply: RequestsListed) -> list[Renderable]:
    if not reply.requests:
        return ["no requests are in progress"]
    rows = (
        (
            view.request_id,
            view.phase,
            view.kind,
            view.adapter or "(base model)",
            duration(view.age_ms),
            str(view.tokens) if view.tokens else "-",
        )
        for view in reply.requests
    )
    table = FittingTable(("request", "phase", "kind", "adapter", "age", "tokens"), rows, kept=2)
    left = reply.total - len(reply.requests)
    return [table, f"and {left} more"] if left else [table]


def _slow(reply: SlowListed) -> list[Renderable]:
    parts: list[Renderable] = []
    for title, views in (("operation", reply.operations), ("request", reply.waits)):
        rows = (
            (
                view.kind,
                view.adapter or "(base model)",
                duration(view.duration_ms),
                f"{duration(view.ended_ms_ago)} ago",
                view.outcome,
            )
            for view in views
        )
        columns = (title, "adapter", "took", "ended", "outcome")
        parts.append(FittingTable(columns, rows) if views else f"no {title} has ended in this hour")
    return parts


def _settings(reply: SettingsShown) -> list[Renderable]:
    fields, options = {"policy": reply.policy}, {o.encoded: o for o in options_of(Limits)}
    for name, value in reply.limits.items():
        note = "  (fixed until a restart)" if name in reply.fixed else ""
        option = options.get(name)
        # A server of another version can have other limits.
        label = option.flag.removeprefix("--") if option else name
        fields[label] = f"{_limit(option, value)}{note}"
    return [field_table(fields)]


def _limit(option: Option | None, value: int) -> str:
    if option is None:
        return str(value)
    return duration(value) if option.is_scaled else option.shown(value)


def duration(milliseconds: int) -> str:
    """Return a duration with two or three digits: `35 ms`, `1.5 s`, `12 min`, `3.4 h`."""
    if milliseconds < 1000:
        return f"{milliseconds} ms"
    seconds = milliseconds / 1000
    for limit_s, size_s, unit in ((60, 1, "s"), (3600, 60, "min"), (86_400, 3600, "h")):
        if seconds < limit_s:
            return f"{seconds / size_s:.3g} {unit}"
    return f"{seconds / 86_400:.3g} d"


_RENDERERS: Final[dict[type, Callable[[Any], list[Renderable]]]] = {
    AdapterDone: _done,
    BatchDone: _batch,
    PrefetchAccepted: _prefetch,
    AdaptersListed: _list,
    AdapterShown: _shown,
    StatusShown: _status,
    CancelDone: _cancelled,
    RequestsListed: _requests,
    SlowListed: _slow,
    SettingsShown: _settings,
}
