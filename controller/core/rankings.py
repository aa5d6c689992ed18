"""Rankings: eviction policies that remember, as pure choosers over the adapters of one tier.

A ranking is told of every use, entry and departure, and chooses who leaves next. It depends on
these calls alone: no clock, no randomness, and integers only, so that a replay chooses the same.

- `Lru`: the least recently used.
- `Fifo`: the first that entered.
- `Sieve`: the first that entered and was not used since the hand passed it (Zhang et al., NSDI
  2024).
- `Gdsf`: the lowest uses x cost / size, aged by what was evicted (GreedyDual-Size-Frequency,
  Cherkasova 1998).
- `Lrfu`: the lowest sum of uses x cost / size, in which a use counts half after `HALF_LIFE` others
  (Least Recently/Frequently Used, Lee et al., IEEE Transactions on Computers 2001).
- `Adaptive`: as the one of its experts that would have loaded for the least time lately.

The costs are nanoseconds that a return to the tier takes. Outside the controller, a `Cache` runs a
ranking over a sequence of accesses.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import Any, Final

from msgspec import Struct

from loradock.controller.core.counters import fast_assignment
from loradock.controller.core.indexes import DigestDict
from loradock.messages.ids import AdapterId

Accepts = Callable[[AdapterId], bool]
"""True if an adapter can be evicted now: it is not leased, held or in motion."""

_adapter_of: Final = itemgetter(2)

_PRECISION: Final = 1 << 20
"""Units of `Gdsf` per nanosecond and byte, since priorities are integers."""

_PRIORITY_MAX: Final = 1 << 62

_UNIT_SHIFT: Final = 16
"""`Lrfu` counts uses and half-lives in units of 2**-16."""

_AGE_SHIFT: Final = 11
"""`Adaptive` forgets 1/2048 of the experts' costs with every access."""

_LEAD_SHIFT: Final = 5
"""Another expert leads once it costs less than 31/32 of the leader: changing has a price too."""


@fast_assignment
class Entry(Struct, array_like=True, gc=False):
    """One adapter of a tier, which leaves in the order of `priority` and `stamp`."""

    priority: int
    stamp: int
    size_bytes: int
    uses: int
    visited: bool = False


class RankingState(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The state of a ranking for a snapshot: everything that decides, entries by adapter."""

    numbers: dict[str, int]
    entries: dict[AdapterId, Entry]
    experts: list["RankingState"] = []


class Ranking:
    """The adapters of one tier in the order in which they leave it.

    A subclass overrides `use`, `peek`, `choose` or `_priority`. What it remembers is in `entries`,
    and in the integers that `NUMBERS` names: digests and snapshots have both.
    """

    NUMBERS: tuple[str, ...] = ("stamp",)

    USE: int = 1
    """What a use adds to `Entry.uses`."""

    def __init__(self) -> None:
        self.entries: DigestDict[AdapterId, Entry] = DigestDict()
        self.stamp = 0
        self._order: list[tuple[int, int, AdapterId]] = []

    def __contains__(self, adapter_id: AdapterId) -> bool:
        return adapter_id in self.entries

    def __iter__(self) -> Iterator[AdapterId]:
        """Iterate over the adapters in order; undefined while it is changed."""
        return map(_adapter_of, self._order)

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Record a request for an adapter, whether or not it is in the tier."""

    def enter(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Record that an adapter is in the tier now."""
        entry = Entry(0, self._next_stamp(), size_bytes, self.USE)
        entry.priority = self._priority(entry, cost_ns)
        self.entries[adapter_id] = entry
        insort(self._order, (entry.priority, entry.stamp, adapter_id))

    def leave(self, adapter_id: AdapterId) -> None:
        """Record that an adapter has left the tier, for any reason."""
        entry = self.entries[adapter_id]
        self._unplace(adapter_id, entry)
        del self.entries[adapter_id]

    def peek(self, accepts: Accepts) -> AdapterId | None:
        """Return the accepted adapter that leaves next, None if none is accepted."""
        return next(filter(accepts, self), None)

    def choose(self, accepts: Accepts) -> AdapterId | None:
        """Return the same adapter and record that it was chosen; its departure follows."""
        return self.peek(accepts)

    def resize(self, count_max: int, size_bytes_max: int) -> None:
        """Set the tier's bounds, for those that simulate it."""

    def digest(self) -> Any:
        """Return a hashable summary of the state, equal for equal histories."""
        return self._numbers(), str(self.entries.digest())

    def digest_from_scratch(self) -> Any:
        """Return the same summary without using remembered hashes."""
        return self._numbers(), str(self.entries.digest_from_scratch())

    def state(self) -> RankingState:
        """Return the state for a snapshot."""
        numbers = dict(zip(self.NUMBERS, self._numbers(), strict=True))
        return RankingState(numbers, dict(self.entries))

    def restore(self, state: RankingState) -> None:
        """Continue from the state of another ranking of this class."""
        for name, value in state.numbers.items():
            setattr(self, name, value)
        self.entries = DigestDict.of(state.entries.items())
        self._order = self.expected_order()

    def expected_order(self) -> list[tuple[int, int, AdapterId]]:
        """Return the order that follows from the entries."""
        return sorted((e.priority, e.stamp, a) for a, e in self.entries.items())

    def is_consistent(self) -> bool:
        """Return whether the order agrees with the entries."""
        return self._order == self.expected_order()

    def _priority(self, _entry: Entry, _cost_ns: int) -> int:
        """Return the first part of an entry's place in the order."""
        return 0

    def _replace(self, adapter_id: AdapterId, entry: Entry, cost_ns: int) -> None:
        """Move an entry to the place that its priority has now, after others of that priority."""
        self._unplace(adapter_id, entry)
        entry.stamp = self._next_stamp()
        entry.priority = self._priority(entry, cost_ns)
        insort(self._order, (entry.priority, entry.stamp, adapter_id))
        self.entries.mark_changed(adapter_id)

    def _unplace(self, adapter_id: AdapterId, entry: Entry) -> None:
        place = (entry.priority, entry.stamp, adapter_id)
        del self._order[bisect_left(self._order, place)]

    def _next_stamp(self) -> int:
        self.stamp += 1
        return self.stamp

    def _numbers(self) -> tuple[int, ...]:
        return tuple([getattr(self, name) for name in self.NUMBERS])


class Fifo(Ranking):
    """The adapter that entered first leaves first."""


class Lru(Ranking):
    """The adapter that was used least recently leaves first."""

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:  # noqa: ARG002
        """Move the adapter to the end of the order."""
        entry = self.entries.get(adapter_id)
        if entry is not None:
            self._replace(adapter_id, entry, cost_ns)


class Sieve(Ranking):
    """A hand passes from the oldest entry to the newest and spares what was used since it passed.

    Adapters keep their place. `hand` is the stamp from which it continues.
    """

    NUMBERS = ("stamp", "hand")

    def __init__(self) -> None:
        super().__init__()
        self.hand = 0

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:  # noqa: ARG002
        """Mark the adapter as used."""
        entry = self.entries.get(adapter_id)
        if entry is not None and not entry.visited:
            entry.visited = True
            self.entries.mark_changed(adapter_id)

    def peek(self, accepts: Accepts) -> AdapterId | None:
        """Return the first unused accepted adapter from the hand on, or the first if all are."""
        found = None
        for place in self._circle(1):
            adapter_id = self._order[place][2]
            if accepts(adapter_id):
                if not self.entries[adapter_id].visited:
                    return adapter_id
                found = adapter_id if found is None else found
        return found

    def choose(self, accepts: Accepts) -> AdapterId | None:
        """Return the first unused accepted adapter from the hand on, and clear marks up to it.

        Adapters that can't be evicted now are passed over and keep their mark.
        """
        order = self._order
        # The first round clears all marks, so the second finds an adapter if any is accepted.
        for place in self._circle(2):
            adapter_id = order[place][2]
            if not accepts(adapter_id):
                continue
            entry = self.entries[adapter_id]
            if not entry.visited:
                # Later entries are behind the hand if it has passed the newest.
                self.hand = order[place + 1][1] if place + 1 < len(order) else 0
                return adapter_id
            entry.visited = False
            self.entries.mark_changed(adapter_id)
        return None

    def _circle(self, rounds: int) -> Iterator[int]:
        """Yield the places in the order from the hand on."""
        count = len(self._order)
        start = bisect_left(self._order, (0, self.hand, 0))
        for _ in range(rounds):
            yield from range(start, count)
            yield from range(start)


class Gdsf(Ranking):
    """The adapter with the fewest uses x cost / size leaves first.

    `inflation` is the priority of the last one that left, to which later priorities are added: what
    is not used again is overtaken by what is.
    """

    NUMBERS = ("stamp", "inflation")

    def __init__(self) -> None:
        super().__init__()
        self.inflation = 0

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:  # noqa: ARG002
        """Count a use of an adapter in the tier."""
        entry = self.entries.get(adapter_id)
        if entry is not None:
            entry.uses += 1
            self._replace(adapter_id, entry, cost_ns)

    def choose(self, accepts: Accepts) -> AdapterId | None:
        """Return the accepted adapter of the lowest priority, and age the others."""
        victim = self.peek(accepts)
        if victim is not None:
            self.inflation = max(self.inflation, self.entries[victim].priority)
        return victim

    def _priority(self, entry: Entry, cost_ns: int) -> int:
        worth = entry.uses * cost_ns * _PRECISION // max(1, entry.size_bytes)
        return min(self.inflation + worth, _PRIORITY_MAX)


class Lrfu(Ranking):
    """The adapter with the lowest sum of uses x cost / size leaves first; a use ages.

    `Entry.uses` is the sum at `Entry.stamp`. All sums halve alike as time passes, so priorities are
    logarithms of what the sums were at one time, and only a use changes its adapter's.
    """

    USE = 1 << _UNIT_SHIFT
    HALF_LIFE: int = 256
    """The uses of others after which a use counts half."""

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:  # noqa: ARG002
        """Add a use to what is left of the earlier ones."""
        entry = self.entries.get(adapter_id)
        if entry is not None:
            halvings, rest = divmod(self.stamp + 1 - entry.stamp, self.HALF_LIFE)
            # 2**-x is linear between whole numbers here, as its inverse is in `_log2`.
            aged = entry.uses - entry.uses * rest // (2 * self.HALF_LIFE)
            entry.uses = self.USE + (aged >> halvings)
            self._replace(adapter_id, entry, cost_ns)

    def _priority(self, entry: Entry, cost_ns: int) -> int:
        worth = entry.uses * cost_ns * _PRECISION // max(1, entry.size_bytes)
        return (entry.stamp << _UNIT_SHIFT) // self.HALF_LIFE + _log2(worth)


def _log2(value: int) -> int:
    """Return the logarithm in units of 2**-16, linear between powers of two; 0 for 0."""
    whole = max(0, value.bit_length() - 1)
    return (whole << _UNIT_SHIFT) + ((value << _UNIT_SHIFT) >> whole) - (1 << _UNIT_SHIFT)


class _ShortLrfu(Lrfu):
    HALF_LIFE = 16


class Cache:
    """A ranking with bounds, which admits whatever is accessed and evicts by the ranking.

    `cost_ns` and `loads` sum what its misses cost. An adapter larger than the cache is a miss that
    evicts nothing.
    """

    def __init__(self, ranking: Ranking, count_max: int, size_bytes_max: int) -> None:
        self.ranking = ranking
        self.size_bytes = self.loads = self.cost_ns = 0
        self.resize(count_max, size_bytes_max)

    def access(
        self, adapter_id: AdapterId, size_bytes: int, cost_ns: int
    ) -> list[AdapterId] | None:
        """Record an access; return who left for it, None for a hit."""
        ranking = self.ranking
        ranking.use(adapter_id, size_bytes, cost_ns)
        if adapter_id in ranking:
            return None
        self.loads += 1
        self.cost_ns += cost_ns
        if self.count_max < 1 or size_bytes > self.size_bytes_max:
            return []
        left = self._evict(1, size_bytes)
        ranking.enter(adapter_id, size_bytes, cost_ns)
        self.size_bytes += size_bytes
        return left

    def resize(self, count_max: int, size_bytes_max: int) -> list[AdapterId]:
        """Change the bounds; return who left."""
        self.count_max, self.size_bytes_max = count_max, size_bytes_max
        return self._evict(0, 0)

    def remove(self, adapter_id: AdapterId) -> None:
        """Remove an adapter without choosing it."""
        self.size_bytes -= self.ranking.entries[adapter_id].size_bytes
        self.ranking.leave(adapter_id)

    def _evict(self, places: int, size_bytes: int) -> list[AdapterId]:
        """Make room; return who left."""
        left: list[AdapterId] = []
        while (
            len(self.ranking.entries) + places > self.count_max
            or self.size_bytes + size_bytes > self.size_bytes_max
        ):
            victim = self.ranking.choose(lambda _: True)
            if victim is None:
                break
            self.remove(victim)
            left.append(victim)
        return left


class Adaptive(Lru):
    """Whatever the expert evicts that costs least lately: LRU, GDSF or LRFU of two half-lives.

    Each expert runs a `Cache` of the tier's size on all uses, as if it alone had decided. What the
    leader has evicted leaves first, and the tier becomes what the leader would have there (Blum and
    Burch, On-line learning and the metrical task system problem, 1997).
    """

    NUMBERS = ("stamp", "leader")
    EXPERTS: Final[tuple[type[Ranking], ...]] = (Lru, Gdsf, _ShortLrfu, Lrfu)

    def __init__(self) -> None:
        super().__init__()
        self.leader = 0
        self.experts: Final = [Cache(kind(), 0, 0) for kind in self.EXPERTS]
        # For each expert, what is in the tier and not in its cache: the least recently used first.
        self._strays: list[list[tuple[int, AdapterId]]] = [[] for _ in self.experts]

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Let the experts decide, and choose the leader by their costs."""
        if not size_bytes:
            # Not checked yet: its entry is its first use that an expert can admit.
            return
        entry = self.entries.get(adapter_id)
        if entry is not None:
            self._drop_stray(adapter_id, entry)
        super().use(adapter_id, size_bytes, cost_ns)
        for place, expert in enumerate(self.experts):
            expert.cost_ns -= expert.cost_ns >> _AGE_SHIFT
            self._add_strays(place, expert.access(adapter_id, size_bytes, cost_ns) or ())
            if adapter_id not in expert.ranking:
                self._add_strays(place, (adapter_id,))
        costs = [expert.cost_ns for expert in self.experts]
        best = costs.index(min(costs))
        if costs[best] + (costs[best] >> _LEAD_SHIFT) < costs[self.leader]:
            self.leader = best

    def enter(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Record that an adapter is in the tier now, a use unless an expert knows it."""
        super().enter(adapter_id, size_bytes, cost_ns)
        without = [place for place, one in enumerate(self.experts) if adapter_id not in one.ranking]
        for place in without:
            self._add_strays(place, (adapter_id,))
        if len(without) == len(self.experts):
            self.use(adapter_id, size_bytes, cost_ns)

    def leave(self, adapter_id: AdapterId) -> None:
        """Record that an adapter has left the tier; the experts can have it still."""
        self._drop_stray(adapter_id, self.entries[adapter_id])
        super().leave(adapter_id)

    def peek(self, accepts: Accepts) -> AdapterId | None:
        """Return what the leader does not have, otherwise what it would evict next."""
        strays = map(itemgetter(1), self._strays[self.leader])
        found = next(filter(accepts, strays), None)
        if found is None:
            leader = self.experts[self.leader].ranking
            found = leader.peek(lambda one: one in self.entries and accepts(one))
        return found

    def resize(self, count_max: int, size_bytes_max: int) -> None:
        """Set the bounds of the experts' caches."""
        for place, expert in enumerate(self.experts):
            self._add_strays(place, expert.resize(count_max, size_bytes_max))

    def digest(self) -> Any:
        """Return a summary of the state and of the experts' states."""
        experts = [(expert.cost_ns, expert.ranking.digest()) for expert in self.experts]
        return super().digest(), experts

    def digest_from_scratch(self) -> Any:
        """Return the same summary without using remembered hashes."""
        caches = self.experts
        return super().digest_from_scratch(), [
            (cache.cost_ns, cache.ranking.digest_from_scratch()) for cache in caches
        ]

    def state(self) -> RankingState:
        """Return the state with the experts' states, each with its cost."""
        state = super().state()
        for expert in self.experts:
            expert_state = expert.ranking.state()
            expert_state.numbers["cost_ns"] = expert.cost_ns
            state.experts.append(expert_state)
        return state

    def restore(self, state: RankingState) -> None:
        """Continue from the state of another ranking, under the same bounds."""
        super().restore(state)
        for expert, expert_state in zip(self.experts, state.experts, strict=True):
            expert.cost_ns = expert_state.numbers.pop("cost_ns")
            expert.ranking.restore(expert_state)
            expert.size_bytes = sum(e.size_bytes for e in expert_state.entries.values())
        self._strays = self._expected_strays()

    def is_consistent(self) -> bool:
        """Return whether the orders agree with the entries, and the strays with the experts."""
        are_consistent = all(expert.ranking.is_consistent() for expert in self.experts)
        has_strays = self._strays == self._expected_strays()
        return super().is_consistent() and are_consistent and has_strays

    def _expected_strays(self) -> list[list[tuple[int, AdapterId]]]:
        own = self.entries.items()
        return [
            sorted((entry.stamp, one) for one, entry in own if one not in expert.ranking)
            for expert in self.experts
        ]

    def _add_strays(self, place: int, adapters: Iterable[AdapterId]) -> None:
        """Add those of the adapters that are in the tier to an expert's strays."""
        for adapter_id in adapters:
            if adapter_id in self.entries:
                insort(self._strays[place], (self.entries[adapter_id].stamp, adapter_id))

    def _drop_stray(self, adapter_id: AdapterId, entry: Entry) -> None:
        for place, expert in enumerate(self.experts):
            if adapter_id not in expert.ranking:
                strays = self._strays[place]
                del strays[bisect_left(strays, (entry.stamp, adapter_id))]
