"""The table of known adapters, and the task that keeps it up to date from the life-cycle stream.

Views come from lists of the controller; events change their states at once and mark the names
whose other fields have to be read again. These are read together, once per `REFRESH_S`, so that a
burst of events costs a bounded number of queries. The status, with the requests of all adapters, is
read then too and whenever a reader needs it now.
"""

import asyncio
from collections import Counter, defaultdict, deque
from contextlib import suppress
from itertools import islice
from typing import Final, Protocol

import msgspec
import structlog
from msgspec import Struct, field

from loradock.client import AsyncClient, AsyncEventStream, LoradockError, UnknownAdapter
from loradock.gateway.recorder import Histogram
from loradock.messages import events as ev
from loradock.messages.events import Event, Published
from loradock.messages.ids import GPU_SLOT, NO_SLOT, Seq
from loradock.messages.requests import AdaptersListed, StatusShown
from loradock.messages.views import AdapterView

REFRESH_S: Final = 0.25
SHOWN_MAX: Final = 128
"""More changed names than this are read as one list."""

STATUS_TIMEOUT_S: Final = 10.0

_RETRY_S: Final = 0.5
_EVENTS_PER_YIELD: Final = 256

log = structlog.get_logger("gateway")

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
    requests: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    """Adapter -> outcome -> generations and poolings that ended; the base model's name is empty.

    Those of adapters that are not known any more are dropped: their number has no bound, and added
    to other counts they would look like requests that ended now.
    """
    prompt_tokens: int = 0
    output_tokens: int = 0
    load_s: Histogram = field(default_factory=lambda: Histogram(LOAD_S))
    """Seconds from the acceptance of an adapter's files to its weights on the host."""
    engines: int = 0
    gaps: int = 0


class Waiter(Protocol):
    """Something that waits for an adapter to reach a slot."""

    def on_resident(self) -> None:
        """Continue: the adapter is in a slot."""


class AdapterTable:
    """The current version of every known adapter, and the latest status.

    `synced`: the table follows the event stream. `seq`: the number of the last applied event; None
    before the first list. `stale`: names whose views have to be read again; `replaced`: those of
    them whose views are another version's. `acceptances`: how often files were accepted, by name.
    Those that wait for an adapter to reach a slot are told once, by `on_resident`.
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
        self._waiting: dict[str, set[Waiter]] = {}
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
                self._record_update(view)
        for name in self.totals.requests.keys() - self.views.keys() - {""}:
            del self.totals.requests[name]
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
            self.totals.requests.pop(name, None)
        else:
            self._store(view)

    def _store(self, view: AdapterView) -> None:
        self.views[view.adapter] = view
        self._record_update(view)
        if view.leases or view.waiting:
            self._used.add(view.adapter)

    def _record_update(self, view: AdapterView) -> None:
        self.updates.append(view)
        self.update_count += 1

    def wait_for(self, name: str, waiter: "Waiter") -> None:
        """Tell a waiter when an adapter reaches a slot, at once if it is in one."""
        view = self.views.get(name)
        if view is not None and view.state == GPU_SLOT:
            waiter.on_resident()
        else:
            self._waiting.setdefault(name, set()).add(waiter)

    def stop_waiting(self, name: str, waiter: "Waiter") -> None:
        """Forget a waiter."""
        waiting = self._waiting.get(name, set())
        waiting.discard(waiter)
        if not waiting:
            self._waiting.pop(name, None)

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
        """Record that events were lost, up to `seq`: the whole table has to be read again."""
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
        if (state := ev.STATE_AFTER.get(type(event))) is not None:
            self._set(name, state=state, slot=NO_SLOT)
        match event:
            case ev.AdapterActivated(slot=slot, generation=generation):
                self._set(name, slot=slot, generation=generation)
                for waiter in self._waiting.pop(name, ()):
                    waiter.on_resident()
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
            totals.requests[event.adapter][event.outcome] += 1
            totals.prompt_tokens += event.prompt_tokens
            totals.output_tokens += event.output_tokens
        case ev.PoolingFinished():
            totals.requests[event.adapter][event.outcome] += 1
            totals.prompt_tokens += event.input_tokens
        case ev.EngineAttached():
            totals.engines += 1


class Follower:
    """Keeps `table` up to date; `changed` is notified after each change."""

    def __init__(self, client: AsyncClient, table: AdapterTable) -> None:
        self._client = client
        self.table = table
        self.changed = asyncio.Condition()
        self._reading = asyncio.Lock()
        # The numbers of the last query for a status that began, and of the last that was answered.
        self._begun = self._answered = 0

    async def run(self) -> None:
        """Follow until cancelled; an absent controller is awaited."""
        while True:
            try:
                await self._follow()
            except (LoradockError, TimeoutError) as error:
                self.table.synced = False
                log.warning("the controller's events can't be followed", error=str(error))
            await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        await self._relist()
        async with await self._client.events(since=self.table.seq) as stream:
            while True:
                await self._read(stream)
                if self.table.needs_list:
                    await self._relist()
                else:
                    await self._refresh()

    async def status_now(self, timeout_s: float) -> StatusShown | None:
        """Return what `read_status` returns; None if the controller does not answer in time."""
        try:
            return await self.read_status(timeout_s)
        except (LoradockError, TimeoutError):
            return None

    async def read_status(self, timeout_s: float) -> StatusShown:
        """Return the controller's status as of a moment after this call.

        One query is in flight at a time, and all callers that wait for its end share the next one.
        Raises `LoradockError` or `TimeoutError` if the controller does not answer in time.
        """
        before = self._begun
        async with asyncio.timeout(timeout_s), self._reading:
            if self._answered > before and self.table.status is not None:
                return self.table.status
            self._begun = number = self._begun + 1
            status = await self._client.status(timeout_s, uses=True)
            self.table.set_status(status)
            self._answered = number
        await self.notify()
        return status

    async def _relist(self) -> None:
        self.table.reset(await self._client.list())
        await self.read_status(STATUS_TIMEOUT_S)

    async def _read(self, stream: AsyncEventStream) -> None:
        """Process the events that arrive within `REFRESH_S`."""
        count, item = 0, await stream.next_within(REFRESH_S)
        while item is not None:
            if isinstance(item, Published):
                self.table.apply(item)
            else:
                self.table.on_gap(stream.seq)
            count += 1
            if count % _EVENTS_PER_YIELD == 0:
                await self.notify()
                await asyncio.sleep(0)
                return
            item = await stream.next_within(0.0)
        if count:
            await self.notify()

    async def _refresh(self) -> None:
        """Read the views of changed adapters, and then the status, which has their requests."""
        table = self.table
        if len(table.stale) > SHOWN_MAX:
            await self._relist()
            return
        for name in sorted(table.stale):
            with suppress(UnknownAdapter):
                await self.reread(name)
        await self.read_status(STATUS_TIMEOUT_S)

    async def reread(self, name: str) -> AdapterView:
        """Return an adapter's view as the controller has it now; the table then has it too.

        Raises `LoradockError`.
        """
        try:
            view = (await self._client.show(name)).adapter
        except UnknownAdapter:
            self.table.update(name, None)
            raise
        self.table.update(name, view)
        return view

    async def notify(self) -> None:
        """Wake all readers of the table."""
        async with self.changed:
            self.changed.notify_all()
