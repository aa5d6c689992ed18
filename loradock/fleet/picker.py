"""The picker: which docks a request goes to, in which order. Pure: time is an argument.

A dock costs a request its queue, the time until the adapter is ready there, and what the eviction
that this needs costs others; all from the dock's own measurements. An adapter has *homes*. Its
requests leave them only if the gain exceeds what the load elsewhere costs, and that dock is then a
home too; a home that demand does not need any more is given up. Between the two is a deadband.
"""

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Final, NamedTuple

from msgspec import Struct, field

from loradock.fleet.catalogue import WantedAdapter
from loradock.fleet.placement import rendezvous

CANDIDATES_MAX: Final = 8
"""Docks that are compared beside the homes; with more, the first by rendezvous hashing."""

RATE_S: Final = 60.0
"""The time over which demand is averaged."""

UNSEEN_S: Final = 0.3
"""A decision is counted until a status that is this much younger has arrived."""

BUSY: Final = 0.5
IDLE: Final = 0.25
"""An adapter gets another home easily if its homes spend more than this part of their time on it,
and loses one if the others would spend less; between the two nothing changes."""

GAIN_OF_BUSY: Final = 1.25
GAIN_OF_OTHERS: Final = 20.0
"""By which factor the gain of one request must exceed the load elsewhere. What is loaded there
takes a slot from others for longer than this request, which only a busy adapter repays."""

EVICTION_S: Final = 1.0
"""How long a dock's cost of an eviction is used before it is computed again."""

OVER_SHARE: Final = 0.25
"""The part by which a dock's demand may exceed its share before adapters move elsewhere."""

DECISIONS_KEPT: Final = 100

NAME_CHARS_KEPT: Final = 256
"""Of a name that no dock has, as clients send any: adapters have shorter ones."""

IN_SLOT: Final = "gpu-slot"


class Load(Struct, frozen=True):
    """What a dock reports of itself: requests in it, and its mean times in seconds.

    `request_s`: the engine's time per request, `load_s` to `write_s` of an adapter's steps.
    `unready`: why it takes no new work; empty if it does.
    """

    requests: int = 0
    slots: int = 1
    request_s: float = 0.05
    load_s: float = 0.1
    stage_s: float = 0.01
    write_s: float = 0.01
    unready: str = ""


class Seen(Struct, frozen=True):
    """An adapter as a dock reports it."""

    state: str
    fingerprint: str = ""
    held: bool = False


class Decision(Struct, frozen=True):
    """Docks in the order in which the proxy tries them, and why the first one is the first."""

    adapter: str
    docks: list[str]
    reason: str
    cost_s: float = 0.0


class _Rate:
    """A rate of events per second, averaged over `RATE_S`."""

    __slots__ = ("_at", "_count")

    def __init__(self) -> None:
        self._count = self._at = 0.0

    def at(self, now: float) -> float:
        return self._count * math.exp((self._at - now) / RATE_S) / RATE_S

    def add(self, now: float) -> None:
        self._count = self._count * math.exp((self._at - now) / RATE_S) + 1.0
        self._at = now


class _Adapter:
    __slots__ = ("candidates", "docks", "homes", "rate", "version", "wanted")

    def __init__(self) -> None:
        self.rate = _Rate()
        self.homes: list[str] = []
        self.docks: dict[str, Seen] = {}
        self.wanted: WantedAdapter | None = None
        self.candidates: tuple[str, ...] = ()
        self.version = -1


class _Dock:
    def __init__(self, address: str, weight: int) -> None:
        self.address = address
        self.weight = weight
        self.load = Load()
        # It takes new work, and its events are followed.
        self.is_ready = False
        self.adapters: set[str] = set()
        self.in_slots: set[str] = set()
        self.rate = _Rate()
        # Own decisions that no status contains yet, and when loads that they cause are over.
        self.unseen: deque[float] = deque()
        self.loading: dict[str, float] = {}
        self.eviction_s = 0.0
        self.eviction_until = -math.inf

    def queue_s(self) -> float:
        return (self.load.requests + len(self.unseen)) * self.load.request_s


class Picker:
    """The state of all docks as their events tell it, and the decisions made with it."""

    def __init__(self) -> None:
        self.decisions: deque[Decision] = deque(maxlen=DECISIONS_KEPT)
        self._docks: dict[str, _Dock] = {}
        self._adapters: dict[str, _Adapter] = {}
        # Grows with each change of the set of docks.
        self._version = 0

    def set_docks(self, weights: Mapping[str, int]) -> None:
        """Set which docks there are; a new one gets no requests before its first snapshot."""
        gone = self._docks.keys() - weights.keys()
        for address in gone:
            self.lose(address)
            del self._docks[address]
        if gone:
            for adapter in self._adapters.values():
                adapter.homes = [home for home in adapter.homes if home not in gone]
            self._forget_unknown()
        is_changed = bool(gone)
        for address, weight in weights.items():
            if (dock := self._docks.get(address)) is None:
                self._docks[address] = _Dock(address, weight)
            elif dock.weight != weight:
                dock.weight = weight
            else:
                continue
            is_changed = True
        self._version += is_changed

    def set_wanted(self, wanted: Mapping[str, WantedAdapter]) -> None:
        """Set the adapters of the catalogue."""
        for name, adapter in [*self._adapters.items()]:
            if adapter.wanted is not None and name not in wanted:
                adapter.wanted = None
                self._forget_if_unknown(name)
        for name, one in wanted.items():
            self._adapter(name).wanted = one

    def lose(self, address: str) -> None:
        """Forget what a dock has told: it gets no requests until its next snapshot."""
        if (dock := self._docks.get(address)) is None:
            return
        for name in dock.adapters:
            self._adapters[name].docks.pop(address, None)
        dock.is_ready = False
        dock.adapters.clear()
        dock.in_slots.clear()
        dock.loading.clear()

    def on_snapshot(self, address: str, adapters: Mapping[str, Seen]) -> None:
        """Replace what is known of the adapters of a dock."""
        self.lose(address)
        for name, seen in adapters.items():
            self.on_adapter(address, name, seen)
        self._forget_unknown()

    def on_adapter(self, address: str, name: str, seen: Seen | None) -> None:
        """Note the state of an adapter in a dock; None: the dock does not know it any more."""
        if (dock := self._docks.get(address)) is None:
            return
        adapter = self._adapter(name)
        if seen is None:
            adapter.docks.pop(address, None)
            dock.adapters.discard(name)
            self._forget_if_unknown(name)
        else:
            adapter.docks[address] = seen
            dock.adapters.add(name)
        if seen is not None and seen.state == IN_SLOT:
            dock.in_slots.add(name)
            dock.loading.pop(name, None)
        else:
            dock.in_slots.discard(name)

    def state_of(self, address: str, name: str) -> Seen | None:
        """Return an adapter as a dock has reported it."""
        adapter = self._adapters.get(name)
        return adapter.docks.get(address) if adapter else None

    def knows(self, name: str) -> bool:
        """Return whether a dock or the catalogue has an adapter of this name."""
        adapter = self._adapters.get(name)
        return adapter is not None and bool(adapter.docks or adapter.wanted)

    def on_load(self, address: str, load: Load, now: float) -> None:
        """Note what a dock reports of itself."""
        if (dock := self._docks.get(address)) is not None:
            dock.load = load
            dock.is_ready = not load.unready
            while dock.unseen and dock.unseen[0] < now - UNSEEN_S:
                dock.unseen.popleft()

    def pick(self, name: str, now: float) -> Decision:
        """Return the docks for a request that names an adapter or the base model.

        No docks: none is known to take work, and the proxy chooses.
        """
        if self.knows(name):
            decision = self._pick_adapter(name, self._adapters[name], now)
        else:
            decision = self._pick_base(name, now)
        if decision.docks:
            dock = self._docks[decision.docks[0]]
            dock.unseen.append(now)
            dock.rate.add(now)
        self.decisions.append(decision)
        return decision

    def refusals(self) -> dict[str, dict[str, str]]:
        """Return the docks that are left out for an adapter of the catalogue, with the reason."""
        return {
            name: found
            for name, adapter in self._adapters.items()
            if (found := {dock: why for dock in adapter.docks if (why := _refusal(adapter, dock))})
        }

    def shown(self, now: float) -> "PickerShown":
        """Return what `loradock fleet status` shows."""
        copies = {
            name: sorted(dock for dock, seen in one.docks.items() if seen.state == IN_SLOT)
            for name, one in self._adapters.items()
        }
        docks = {
            dock.address: ShownLoad(
                dock.is_ready, dock.load.requests, len(dock.in_slots), dock.rate.at(now)
            )
            for dock in self._docks.values()
        }
        held = {name: where for name, where in copies.items() if where}
        return PickerShown(docks, held, self.refusals(), list(self.decisions))

    def _adapter(self, name: str) -> _Adapter:
        adapter = self._adapters.get(name)
        if adapter is None:
            adapter = self._adapters[name] = _Adapter()
        return adapter

    def _forget_if_unknown(self, name: str) -> None:
        """Forget an adapter that was removed everywhere."""
        if not self.knows(name):
            del self._adapters[name]
            for dock in self._docks.values():
                dock.loading.pop(name, None)

    def _forget_unknown(self) -> None:
        """Forget what nobody has any more; a dock that is lost tells of its adapters anew."""
        for name in [*self._adapters]:
            self._forget_if_unknown(name)

    def _pick_base(self, name: str, now: float) -> Decision:
        """Order docks by their queues: the base model, or a name that no dock has told of."""
        ready = (dock for dock in self._docks.values() if dock.is_ready)
        first = heapq.nsmallest(
            CANDIDATES_MAX, ready, lambda dock: (dock.queue_s() / dock.weight, dock.rate.at(now))
        )
        order = [dock.address for dock in first]
        return Decision(name[:NAME_CHARS_KEPT], order, "base model: the shortest queue")

    def _candidates(self, name: str, adapter: _Adapter) -> list[_Dock]:
        """Return the docks that can serve an adapter: its homes, those that have it, and others."""
        if adapter.version != self._version:
            weights = {dock.address: dock.weight for dock in self._docks.values()}
            adapter.candidates = tuple(rendezvous(name, weights, CANDIDATES_MAX))
            adapter.version = self._version
        having = (dock for dock, seen in adapter.docks.items() if seen.state == IN_SLOT)
        # A name outside the catalogue is served where it was loaded.
        others: Iterable[str] = adapter.candidates if adapter.wanted else adapter.docks
        found = dict.fromkeys(chain(adapter.homes, having, others))
        return [
            dock
            for address in found
            if (dock := self._docks.get(address)) is not None
            and dock.is_ready
            and not _refusal(adapter, address)
        ]

    def _pick_adapter(self, name: str, adapter: _Adapter, now: float) -> Decision:
        adapter.rate.add(now)
        options = [self._option(d, name, adapter, now) for d in self._candidates(name, adapter)]
        if not options:
            return Decision(name, [], "no dock that is ready can serve it")
        homes = [one for one in options if one.dock.address in adapter.homes]
        first, reason = self._first(name, adapter, options, homes, now)
        if first.dock.address not in adapter.homes:
            adapter.homes.append(first.dock.address)
        elif len(homes) > 1:
            _give_up_home(adapter, homes, now)
        if name not in first.dock.in_slots and name not in first.dock.loading:
            first.dock.loading[name] = now + self._ready_s(first.dock, name, adapter, now)
        rest = sorted((one for one in options if one is not first), key=_total)
        order = [one.dock.address for one in (first, *rest[: CANDIDATES_MAX - 1])]
        return Decision(name, order, reason, _total(first))

    def _first(
        self,
        name: str,
        adapter: _Adapter,
        options: list["_Option"],
        homes: list["_Option"],
        now: float,
    ) -> tuple["_Option", str]:
        if not homes:
            return _new_home(options, now), "new home"
        home = min(homes, key=_total)
        others = [one for one in options if one.dock.address not in adapter.homes]
        if not others:
            return home, "home"
        other = min(others, key=_total)
        busy = adapter.rate.at(now) * home.dock.load.request_s / len(homes)
        needed = GAIN_OF_BUSY if busy > BUSY else GAIN_OF_OTHERS
        if _total(home) - other.queue_s > needed * other.work_s:
            return other, "the home's queue costs more than a load elsewhere"
        is_loaded = name in home.dock.in_slots or name in home.dock.loading
        if not is_loaded and len(homes) == 1 and _is_over_share(home.dock, options, now):
            moved = _new_home(options, now)
            if moved is not home:
                adapter.homes.remove(home.dock.address)
                return moved, "moved: it has to be loaded anyway, and its home is busier"
        return home, "home"

    def _option(self, dock: _Dock, name: str, adapter: _Adapter, now: float) -> "_Option":
        if name in dock.in_slots:
            return _Option(dock, dock.queue_s(), 0.0)
        work_s = self._ready_s(dock, name, adapter, now)
        if name not in dock.loading and len(dock.in_slots) >= dock.load.slots:
            work_s += self._eviction_s(dock, now)
        return _Option(dock, dock.queue_s(), work_s)

    def _ready_s(self, dock: _Dock, name: str, adapter: _Adapter, now: float) -> float:
        until, load = dock.loading.get(name), dock.load
        if until is not None and until > now:
            return until - now
        dock.loading.pop(name, None)
        seen = adapter.docks.get(dock.address)
        state = seen.state if seen else "unregistered"
        if state == "pinned":
            return load.write_s
        staged_s = load.stage_s + load.write_s
        return staged_s if state == "cpu-cached" else load.load_s + staged_s

    def _eviction_s(self, dock: _Dock, now: float) -> float:
        """Return what the adapter that is needed least costs others when it leaves its slot."""
        if now < dock.eviction_until:
            return dock.eviction_s
        rates = [
            self._adapters[one].rate.at(now)
            for one in dock.in_slots
            if not self._adapters[one].docks[dock.address].held
        ]
        # Its next request, if one comes in that time, waits for the way back.
        chance = min(1.0, min(rates) * RATE_S) if rates else math.inf
        dock.eviction_s = chance * (dock.load.stage_s + dock.load.write_s)
        dock.eviction_until = now + EVICTION_S
        return dock.eviction_s


class _Option(NamedTuple):
    """A dock for a request: its queue, and the work until the adapter is ready there."""

    dock: _Dock
    queue_s: float
    work_s: float


def _total(option: _Option) -> float:
    return option.queue_s + option.work_s


def _new_home(options: list[_Option], now: float) -> _Option:
    """Return a dock that has the adapter in a slot, else the one with the least demand."""
    having = [one for one in options if not one.work_s]
    return min(having or options, key=lambda one: one.dock.rate.at(now) / one.dock.weight)


def _is_over_share(home: _Dock, options: list[_Option], now: float) -> bool:
    """Return whether a dock has more than its share of the demand, with the deadband."""
    demand = sum(one.dock.rate.at(now) for one in options)
    share = demand * home.weight / sum(one.dock.weight for one in options)
    return home.rate.at(now) > (1 + OVER_SHARE) * share


def _give_up_home(adapter: _Adapter, homes: list[_Option], now: float) -> None:
    """Give up the most expensive home if the others carry the demand easily."""
    least = max(1, adapter.wanted.copies if adapter.wanted else 0)
    busy = adapter.rate.at(now) * homes[0].dock.load.request_s / (len(homes) - 1)
    if len(homes) > least and busy < IDLE:
        adapter.homes.remove(max(homes, key=_total).dock.address)


def _refusal(adapter: _Adapter, dock: str) -> str:
    """Return why a dock must not serve an adapter of the catalogue; empty if it can."""
    wanted, seen = adapter.wanted, adapter.docks.get(dock)
    if wanted is None or seen is None or not (wanted.fingerprint and seen.fingerprint):
        return ""
    if wanted.fingerprint == seen.fingerprint:
        return ""
    return f"its files have the fingerprint {seen.fingerprint}, not {wanted.fingerprint}"


class ShownLoad(Struct, frozen=True):
    """A dock as the picker sees it; `rate`: requests per second."""

    ready: bool
    requests: int
    in_slots: int
    rate: float


class PickerShown(Struct, frozen=True):
    """What a picker knows: docks, the docks that have each adapter in a slot, and decisions."""

    docks: dict[str, ShownLoad] = field(default_factory=dict)
    copies: dict[str, list[str]] = field(default_factory=dict)
    refusals: dict[str, dict[str, str]] = field(default_factory=dict)
    decisions: list[Decision] = field(default_factory=list)
