"""Rankings: eviction policies that remember, as pure choosers over the adapters of one tier.

A ranking is told of every use, entry and departure, and chooses who leaves next. It depends on
these calls alone: no clock, no randomness, and integers only, so that a replay chooses the same.

- `Lru`: the least recently used.
- `Fifo`: the first that entered.
- `Sieve`: the first that entered and was not used since the hand passed it (Zhang et al., NSDI
  2024).
- `Gdsf`: the lowest uses x cost / size, aged by what was evicted (GreedyDual-Size-Frequency,
  Cherkasova 1998).
- `Adaptive`: the lowest expected uses x cost / size, with uses that age (LRFU) at four paces, of
  which it learns how much each tells about the traffic.

The costs are nanoseconds that a return to the tier takes. Outside the controller, a `Cache` runs a
ranking over a sequence of accesses.
"""

from bisect import bisect_left, insort
from collections.abc import Callable, Iterator
from itertools import repeat
from operator import add, itemgetter, mul
from typing import Any, Final

from msgspec import Struct

from loradock.controller.core.counters import fast_assignment
from loradock.controller.core.indexes import DigestDict
from loradock.messages.ids import AdapterId

Accepts = Callable[[AdapterId], bool]
"""True if an adapter can be evicted now: it is not leased, held or in motion."""

_adapter_of: Final = itemgetter(2)

_PRECISION: Final = 1 << 20
"""Units of a worth per nanosecond and byte, since priorities are integers."""

_PRIORITY_MAX: Final = 1 << 62

PACES: Final = (1, 4, 7, 10)
"""The paces of `Adaptive`: with pace p, a use counts half after 2**p others."""

_ONE: Final = 1 << 20
"""The unit of probabilities and weights."""

_USES: Final = tuple(_ONE >> pace for pace in PACES)
"""What a use adds to the sum of each pace."""

_WEIGHT_MIN: Final = _ONE >> 8
"""Lower bound of a pace's weight, so that it can be learned again."""

_LEARNING_SHIFT: Final = 3
"""A use that is learned from moves the weights by an eighth of the way."""

_LOG_SHIFT: Final = 16

HISTORY_MAX: Final = 4096
"""Adapters outside a tier of which `Adaptive` knows the uses."""


@fast_assignment
class Entry(Struct, array_like=True, gc=False):
    """One adapter of a tier, which leaves in the order of `priority` and `stamp`.

    `worth` is its cost per byte. `sums` are of `Adaptive`: its uses, aged until `stamp`.
    """

    priority: int
    stamp: int
    worth: int
    uses: int = 1
    visited: bool = False
    sums: tuple[int, ...] = ()


class RankingState(Struct, array_like=True, forbid_unknown_fields=True, gc=False):
    """The state of a ranking for a snapshot: everything that decides, entries by adapter.

    `history` has adapters that are not in the tier, the one that is forgotten next first.
    """

    numbers: dict[str, int]
    entries: dict[AdapterId, Entry]
    weights: list[int] = []
    history: dict[AdapterId, Entry] = {}


class Ranking:
    """The adapters of one tier in the order in which they leave it.

    A subclass overrides `use`, `peek`, `choose` or `_priority`. What it remembers is in `entries`,
    and in the integers that `NUMBERS` names: digests and snapshots have both.
    """

    NUMBERS: tuple[str, ...] = ("stamp",)

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
        entry = self.entries[adapter_id] = Entry(0, self._next_stamp(), _worth(size_bytes, cost_ns))
        self._place(adapter_id, entry)

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

    def _priority(self, _entry: Entry) -> int:
        """Return the first part of an entry's place in the order."""
        return 0

    def _replace(self, adapter_id: AdapterId, entry: Entry) -> None:
        """Move an entry to the place that its priority has now, after others of that priority."""
        self._unplace(adapter_id, entry)
        entry.stamp = self._next_stamp()
        self._place(adapter_id, entry)
        self.entries.mark_changed(adapter_id)

    def _place(self, adapter_id: AdapterId, entry: Entry) -> None:
        entry.priority = self._priority(entry)
        insort(self._order, (entry.priority, entry.stamp, adapter_id))

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
            self._replace(adapter_id, entry)


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

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Count a use of an adapter in the tier."""
        entry = self.entries.get(adapter_id)
        if entry is not None:
            entry.uses += 1
            entry.worth = _worth(size_bytes, cost_ns)
            self._replace(adapter_id, entry)

    def choose(self, accepts: Accepts) -> AdapterId | None:
        """Return the accepted adapter of the lowest priority, and age the others."""
        victim = self.peek(accepts)
        if victim is not None:
            self.inflation = max(self.inflation, self.entries[victim].priority)
        return victim

    def _priority(self, entry: Entry) -> int:
        return min(self.inflation + entry.uses * entry.worth, _PRIORITY_MAX)


def _worth(size_bytes: int, cost_ns: int) -> int:
    return cost_ns * _PRECISION // max(1, size_bytes)


class Cache:
    """A ranking with bounds, which admits whatever is accessed and evicts by the ranking.

    `cost_ns` and `loads` sum what its misses cost. An adapter larger than the cache is a miss that
    evicts nothing.
    """

    def __init__(self, ranking: Ranking, count_max: int, size_bytes_max: int) -> None:
        self.ranking = ranking
        self.sizes: dict[AdapterId, int] = {}
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
        self.sizes[adapter_id] = size_bytes
        self.size_bytes += size_bytes
        return left

    def resize(self, count_max: int, size_bytes_max: int) -> list[AdapterId]:
        """Change the bounds; return who left."""
        self.count_max, self.size_bytes_max = count_max, size_bytes_max
        return self._evict(0, 0)

    def remove(self, adapter_id: AdapterId) -> None:
        """Remove an adapter without choosing it."""
        self.size_bytes -= self.sizes.pop(adapter_id)
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


class Adaptive(Ranking):
    """The adapter with the fewest expected uses x cost / size leaves first.

    Uses age at several paces: they count half after 2, 16, 128 or 1,024 others (Least Recently/
    Frequently Used, Lee et al., IEEE Transactions on Computers 2001). From each pace follows a
    probability that the next use is of an adapter: its share of all uses, which are aged alike.
    What counts is the mean of these, weighted by how well each pace foretold the uses so far
    (on-line expectation maximisation, Cappe and Moulines 2009). Uses of adapters that are not in
    the tier count too: `history` has them until they return or are forgotten.

    The order is by the slowest pace alone, since only a use of an adapter changes its place there.
    """

    def __init__(self) -> None:
        super().__init__()
        self.weights = [_ONE // len(PACES)] * len(PACES)
        self.history: DigestDict[AdapterId, Entry] = DigestDict()

    def use(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Learn from a use, and add it to what is left of the earlier ones."""
        entry = self.entries.get(adapter_id)
        if entry is not None:
            self._unplace(adapter_id, entry)
            self._count(entry)
            entry.worth = _worth(size_bytes, cost_ns)
            self._place(adapter_id, entry)
            self.entries.mark_changed(adapter_id)
            return
        entry = self.history.get(adapter_id)
        if entry is None:
            entry = self._remember(adapter_id, self._unused())
        self._count(entry)
        self.history.mark_changed(adapter_id)

    def enter(self, adapter_id: AdapterId, size_bytes: int, cost_ns: int) -> None:
        """Record that an adapter is in the tier now, with its earlier uses."""
        entry = self.entries[adapter_id] = self._recall(adapter_id)
        entry.worth = _worth(size_bytes, cost_ns)
        self._place(adapter_id, entry)

    def leave(self, adapter_id: AdapterId) -> None:
        """Record that an adapter has left the tier, and remember its uses."""
        entry = self.entries[adapter_id]
        super().leave(adapter_id)
        self._remember(adapter_id, entry)

    def peek(self, accepts: Accepts) -> AdapterId | None:
        """Return the accepted adapter with the lowest mean."""
        found, lowest = None, 0
        factors = self._factors()
        slowest = factors[-1]
        for adapter_id in filter(accepts, self):
            entry = self.entries[adapter_id]
            age = self.stamp - entry.stamp
            # A lower bound for this adapter and all that follow.
            slow = slowest * _aged(entry.sums[-1], age, PACES[-1]) * entry.worth
            if found is not None and slow >= lowest:
                break
            aged = map(_aged, entry.sums, repeat(age), PACES)
            mean = sum(map(mul, factors, aged)) * entry.worth
            if found is None or mean < lowest:
                found, lowest = adapter_id, mean
        return found

    def digest(self) -> Any:
        """Return a summary of the state with the weights and the history."""
        return super().digest(), tuple(self.weights), str(self.history.digest())

    def digest_from_scratch(self) -> Any:
        """Return the same summary without using remembered hashes."""
        history = str(self.history.digest_from_scratch())
        return super().digest_from_scratch(), tuple(self.weights), history

    def state(self) -> RankingState:
        """Return the state with the weights and the history."""
        state = super().state()
        state.weights, state.history = self.weights, dict(self.history)
        return state

    def restore(self, state: RankingState) -> None:
        """Continue from the state of another ranking."""
        super().restore(state)
        self.weights = state.weights
        self.history = DigestDict.of(state.history.items())

    def _count(self, entry: Entry) -> None:
        """Age an entry's uses, learn from how likely one more was, and add it."""
        stamp = self._next_stamp()
        aged = list(map(_aged, entry.sums, repeat(stamp - 1 - entry.stamp), PACES))
        # One of four uses is enough to learn from.
        if stamp & 3 == 0:
            self._learn(list(map(mul, self._factors(), aged)))
        entry.stamp, entry.sums = stamp, tuple(map(add, aged, _USES))

    def _learn(self, parts: list[int]) -> None:
        """Move the weights towards the parts that the paces had in the probability of a use."""
        whole = sum(parts)
        if whole:
            self.weights = [
                max(_WEIGHT_MIN, weight + (part * _ONE // whole - weight >> _LEARNING_SHIFT))
                for weight, part in zip(self.weights, parts, strict=True)
            ]

    def _factors(self) -> list[int]:
        """Return by what a sum of each pace counts in a mean: its weight over the sum of all uses.

        A slow pace has seen a part of its uses only: without this, it would count for too little.
        """
        # What is left of all uses is their limit, less what is left of it.
        return [
            weight * _ONE // max(1, _ONE - _aged(_ONE, self.stamp, pace))
            for weight, pace in zip(self.weights, PACES, strict=True)
        ]

    def _priority(self, entry: Entry) -> int:
        # Sums of one pace halve alike as time passes, so the logarithm at time 0 is fixed.
        return (entry.stamp << _LOG_SHIFT >> PACES[-1]) + _log2(entry.sums[-1] * entry.worth)

    def _recall(self, adapter_id: AdapterId) -> Entry:
        """Take an adapter out of the history."""
        entry = self.history.get(adapter_id)
        if entry is None:
            return self._unused()
        del self.history[adapter_id]
        return entry

    def _remember(self, adapter_id: AdapterId, entry: Entry) -> Entry:
        """Put an adapter into the history, and forget the one that has been there for longest."""
        self.history[adapter_id] = entry
        if len(self.history) > HISTORY_MAX:
            del self.history[next(iter(self.history))]
        return entry

    def _unused(self) -> Entry:
        return Entry(0, self.stamp, 0, sums=(0,) * len(PACES))


def _aged(total: int, age: int, pace: int) -> int:
    """Return what is left of uses after `age` others; 2**-x is linear between integers here."""
    rest = age & (1 << pace) - 1
    return total - (total * rest >> pace + 1) >> (age >> pace)


def _log2(value: int) -> int:
    """Return the logarithm in units of 2**-16, linear between powers of two; 0 for 0."""
    whole = max(0, value.bit_length() - 1)
    return (whole << _LOG_SHIFT) + ((value << _LOG_SHIFT) >> whole) - (1 << _LOG_SHIFT)
