"""The known adapters and the totals of the life-cycle events, without I/O.

Views come from lists of the controller; events change their states at once and mark the names whose
other fields have to be read again.
"""

from collections import Counter, deque
from collections.abc import Callable
from itertools import islice
from typing import Final

import msgspec
from msgspec import Struct, field

from loradock.gateway.histogram import Histogram
from loradock.messages import events as ev
from loradock.messages.events import Event, Published
from loradock.messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, NO_SLOT, PINNED, Seq
from loradock.messages.requests import AdaptersListed, StatusShown
from loradock.messages.views import AdapterView

LOAD_S: Final = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Bounds of the buckets for loads, in seconds."""

_LOADING_MAX: Final = 10_000

RECENT_EVENTS: Final = 4096
"""Events that are kept for readers that continue after a lost connection."""


class EventTotals(Struct):
    """Counters of the events since this gateway started; they never decrease."""

    activations: int = 0
    loads: int = 0
    stagings: int = 0
    failures: Counter[str] = field(default_factory=Counter)
    evictions: Counter[str] = field(default_factory=Counter)
    requests: Counter[tuple[str, str]] = field(default_factory=Counter)
    """(adapter, outcome) -> generations and poolings that ended; the base model's name is empty."""
    prompt_tokens: int = 0
    output_tokens: int = 0
    load_s: Histogram = field(default_factory=lambda: Histogram(LOAD_S))
    """Seconds from the acceptance of an adapter's files to its weights on the host."""
    engines: int = 0
    gaps: int = 0


class AdapterTable:
    """The current version of every known adapter, and the latest status.

    `synced`: the table follows the event stream. `seq`: the number of the last applied event; None
    before the first list. `stale`: names whose views have to be read again; `replaced`: those of
    them whose views are another version's. `acceptances`: how often files were accepted, by name.
    `on_activated` is called with the name of each adapter that reaches a slot.
    """

    def __init__(self) -> None:
        self.views: dict[str, AdapterView] = {}
        self.status: StatusShown | None = None
        self.synced = False
        self.seq: int | None = None
        self.stale: set[str] = set()
        self.replaced: set[str] = set()
        self.acceptances: Counter[str] = Counter()
        self.needs_list = False
        self.totals = EventTotals()
        self.recent: deque[Published] = deque(maxlen=RECENT_EVENTS)
        self.updates: deque[AdapterView] = deque(maxlen=RECENT_EVENTS)
        self.update_count = 0
        self.on_activated: Callable[[str], None] | None = None
        self._accepted_ns: dict[str, int] = {}
        # At least the names whose views have requests.
        self._used: set[str] = set()

    def reset(self, listed: AdaptersListed) -> None:
        """Replace all views.

        The list is as new as its event number or newer. `seq` stays: events up to that number are
        still applied, which leads to the same states.
        """
        before = self.views
        self.views = {view.adapter: view for view in listed.adapters if not view.retired}
        self._used = {name for name, view in self.views.items() if view.leases or view.waiting}
        for name, view in self.views.items():
            if before.get(name) != view:
                self._note_update(view)
        if self.seq is None:
            self.seq = listed.events_seq
        self.stale.clear()
        self.replaced.clear()
        self.needs_list = False
        self.synced = True

    def set_status(self, status: StatusShown) -> None:
        """Replace the status, and with it the requests of every view, which no event reports."""
        self.status = status
        uses = {use.adapter: (use.leases, use.waiters) for use in status.uses}
        names, self._used = self._used | uses.keys(), {name for name in uses if any(uses[name])}
        for name in names:
            view, (leases, waiting) = self.views.get(name), uses.get(name, (0, 0))
            if view is not None and (view.leases, view.waiting) != (leases, waiting):
                self._store(msgspec.structs.replace(view, leases=leases, waiting=waiting))

    def update(self, name: str, view: AdapterView | None) -> None:
        """Replace one adapter's view; None: the name is not known any more."""
        self.stale.discard(name)
        self.replaced.discard(name)
        if view is None:
            self.views.pop(name, None)
            self._used.discard(name)
        else:
            self._store(view)

    def _store(self, view: AdapterView) -> None:
        self.views[view.adapter] = view
        self._note_update(view)
        if view.leases or view.waiting:
            self._used.add(view.adapter)

    def _note_update(self, view: AdapterView) -> None:
        self.updates.append(view)
        self.update_count += 1

    def updated_after(self, count: int) -> list[AdapterView] | None:
        """Return the views that were read after the first `count`; None if some are not kept.

        They have what events do not contain: bytes, leases, requests that wait, counters.
        """
        missed = self.update_count - count
        if missed > len(self.updates):
            return None
        newest = islice(reversed(self.updates), missed)
        return [*{view.adapter: view for view in reversed([*newest])}.values()]

    def apply(self, published: Published) -> None:
        """Process the next event."""
        self.seq = published.seq
        self.recent.append(published)
        _count(self.totals, published.event)
        self._measure(published)
        self._change(published.event)

    def on_gap(self, seq: Seq) -> None:
        """Note that events were lost, up to `seq`: the whole table has to be read again."""
        self.totals.gaps += 1
        self.seq = seq
        self.recent.clear()
        self.needs_list = True

    def events_after(self, seq: int) -> tuple[Published, ...] | None:
        """Return the events after a number; None if some of them are not kept."""
        if self.seq is None or seq > self.seq:
            return None
        if seq < self.seq and (not self.recent or self.recent[0].seq > seq + 1):
            return None
        return tuple(published for published in self.recent if published.seq > seq)

    def _change(self, event: Event) -> None:
        name = getattr(event, "adapter", "")
        match event:
            case ev.AdapterActivated(slot=slot, generation=generation):
                self._set(name, state=GPU_SLOT, slot=slot, generation=generation)
                if self.on_activated is not None:
                    self.on_activated(name)
            case ev.AdapterCached() | ev.AdapterUnpinned():
                self._set(name, state=CPU_CACHED, slot=NO_SLOT)
            case ev.AdapterPinned() | ev.AdapterDeactivated():
                self._set(name, state=PINNED, slot=NO_SLOT)
            case ev.AdapterEvicted():
                self._set(name, state=EVICTED, slot=NO_SLOT)
            case ev.AdapterHeld() | ev.AdapterReleased():
                self._set(name, held=isinstance(event, ev.AdapterHeld))
            case ev.EngineAttached() | ev.EngineDetached() | ev.ControllerResumed():
                # All states may differ, and which engine is attached.
                self.needs_list = True
        self._change_version(event)
        if name:
            self.stale.add(name)

    def _change_version(self, event: Event) -> None:
        match event:
            case ev.AdapterAccepted(adapter=name):
                self.acceptances[name] += 1
            case ev.AdapterReplaced(adapter=name):
                self.replaced.add(name)
            case ev.AdapterRemoved(adapter=name):
                self.replaced.add(name)
                del self.acceptances[name]

    def _measure(self, published: Published) -> None:
        match published.event:
            case ev.AdapterAccepted(adapter=name) if len(self._accepted_ns) < _LOADING_MAX:
                self._accepted_ns[name] = published.time_ns
            case ev.AdapterCached(adapter=name):
                began_ns = self._accepted_ns.pop(name, None)
                # The wall clock may have been set back in between.
                if began_ns is not None and published.time_ns >= began_ns:
                    self.totals.load_s.observe((published.time_ns - began_ns) / 1e9)
            case ev.AdapterFailed(adapter=name) | ev.AdapterRemoved(adapter=name):
                self._accepted_ns.pop(name, None)

    def _set(self, name: str, **changes: object) -> None:
        view = self.views.get(name)
        if view is not None:
            self.views[name] = msgspec.structs.replace(view, **changes)


def _count(totals: EventTotals, event: Event) -> None:
    match event:
        case ev.AdapterCached():
            totals.loads += 1
        case ev.AdapterPinned():
            totals.stagings += 1
        case ev.AdapterActivated():
            totals.activations += 1
        case ev.AdapterEvicted(reason=reason):
            totals.evictions[reason] += 1
        case ev.AdapterFailed(code=code):
            totals.failures[code.value] += 1
        case ev.GenerationFinished():
            totals.requests[event.adapter, event.outcome] += 1
            totals.prompt_tokens += event.prompt_tokens
            totals.output_tokens += event.output_tokens
        case ev.PoolingFinished():
            totals.requests[event.adapter, event.outcome] += 1
            totals.prompt_tokens += event.input_tokens
        case ev.EngineAttached():
            totals.engines += 1
