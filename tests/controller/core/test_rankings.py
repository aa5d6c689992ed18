"""Rankings choose as their plain definitions do, from their state alone."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core.rankings import (
    HISTORY_MAX,
    PACES,
    Accepts,
    Adaptive,
    Cache,
    Fifo,
    Gdsf,
    Lru,
    Ranking,
    RankingState,
    Sieve,
)

KINDS = (Lru, Fifo, Sieve, Gdsf, Adaptive)
SIZES = {one: 1 + one % 4 for one in range(1, 13)}

Access = tuple[int, int]
ACCESSES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), max_size=60)


def all_accepted(_adapter_id: int) -> bool:
    return True


def cache_of(kind: type[Ranking], count_max: int = 4, size_bytes_max: int = 9) -> Cache:
    return Cache(kind(), count_max, size_bytes_max)


def run(cache: Cache, accesses: list[Access]) -> list[list[int] | None]:
    return [cache.access(one, SIZES[one], cost) for one, cost in accesses]


def plain(trace: list[int], places: int, moves_on_use: bool, spares: bool) -> int:
    """Return the misses of LRU (moves), FIFO (neither) or SIEVE (spares) over a plain list."""
    cache: list[int] = []
    used: set[int] = set()
    hand: int | None = None
    misses = 0
    for one in trace:
        if one in cache:
            used.add(one)
            if moves_on_use:
                cache.remove(one)
                cache.append(one)
            continue
        misses += 1
        if len(cache) == places:
            place = cache.index(hand) if spares and hand in cache else 0
            while spares and cache[place] in used:
                used.discard(cache[place])
                place = (place + 1) % len(cache)
            victim = cache.pop(place)
            hand = cache[place] if place < len(cache) else None
            used.discard(victim)
        cache.append(one)
    return misses


@pytest.mark.parametrize(
    ("kind", "moves_on_use", "spares"), [(Lru, True, False), (Fifo, False, False), (Sieve, 0, 1)]
)
@pytest.mark.parametrize("seed", range(5))
def test_misses_are_those_of_the_plain_definition(
    kind: type[Ranking], moves_on_use: bool, spares: bool, seed: int
) -> None:
    trace = random.Random(seed).choices(range(30), [1 / (one + 1) for one in range(30)], k=2000)
    cache = cache_of(kind, 8, 1 << 40)
    for one in trace:
        cache.access(one, 1, 1)
    assert cache.loads == plain(trace, 8, moves_on_use, spares)


def test_gdsf_keeps_what_is_small_used_and_costly_for_as_long_as_it_is_used() -> None:
    cache = cache_of(Gdsf, 2, 100)
    run(cache, [(1, 1), (1, 1), (1, 1), (2, 1)])
    assert cache.access(3, SIZES[3], 9) == [2]
    for _ in range(40):
        cache.access(4, 1, 9)
        cache.access(5, 1, 9)
    assert 1 not in cache.ranking


def traces() -> dict[str, list[int]]:
    generator = random.Random(2)
    weights = [1 / one for one in range(1, 101)]
    zipf = generator.choices(range(1, 101), weights, k=6000)
    return {
        "zipf": zipf,
        "jumps": [step // 300 * 4 + generator.randrange(1, 8) for step in range(6000)],
        "scan": [step // 3 % 100 if step % 3 == 0 else one for step, one in enumerate(zipf)],
        "bursts": [one for one in generator.choices(range(100), k=1500) for _ in range(4)],
        "cycle": [step % 12 for step in range(6000)],
    }


@pytest.mark.parametrize(
    ("name", "of_lru"),
    # A popularity that changes at once is the worst: what was used often before leaves later.
    [("zipf", 0.85), ("scan", 0.9), ("bursts", 1.02), ("cycle", 0.5), ("jumps", 1.25)],
)
def test_adaptive_gains_on_lru_and_costs_little_more_at_worst(name: str, of_lru: float) -> None:
    caches = [cache_of(kind, 10, 1 << 40) for kind in (Adaptive, Lru)]
    for cache in caches:
        for one in traces()[name]:
            cache.access(one, 1 + one % 4, 5 + one % 4)
    assert caches[0].cost_ns <= of_lru * caches[1].cost_ns


def weights_after(trace: list[int]) -> list[int]:
    ranking = Adaptive()
    for one in trace:
        ranking.use(one, 1, 1)
    return ranking.weights


def test_adaptive_learns_the_pace_of_the_traffic() -> None:
    lasting, bursts = (weights_after(traces()[name]) for name in ("zipf", "bursts"))
    assert lasting.index(max(lasting)) == len(PACES) - 1
    assert bursts.index(max(bursts)) == 0
    # What was learned is forgotten within some hundred uses of other traffic.
    again = weights_after(traces()["bursts"] + traces()["zipf"][:1000])
    assert again.index(max(again)) >= len(PACES) - 2


def mean_of(ranking: Adaptive, one: int) -> float:
    """Return the plain definition of what `Adaptive` compares."""
    entry = ranking.entries[one]
    paces = zip(ranking.weights, entry.sums, PACES, strict=True)

    def left(uses: float, pace: int) -> float:
        return 2.0 ** (-uses / 2**pace)

    age = ranking.stamp - entry.stamp
    shares = (
        weight * total * left(age, pace) / (1 - left(ranking.stamp, pace))
        for weight, total, pace in paces
    )
    return sum(shares) * entry.worth


@given(accesses=ACCESSES, leased=st.sets(st.integers(1, 12)), seed=st.integers(0, 99))
def test_adaptive_chooses_the_lowest_mean(
    accesses: list[Access], leased: set[int], seed: int
) -> None:
    """But for a quarter, because powers and logarithms are linear between integers."""
    trace = random.Random(seed).choices(range(1, 13), k=400)
    cache = cache_of(Adaptive, 12, 30)
    run(cache, [*((one, 3) for one in trace), *accesses])
    ranking = cache.ranking
    assert isinstance(ranking, Adaptive)
    means = {one: mean_of(ranking, one) for one in ranking if one not in leased}
    victim = ranking.choose(lambda one: one not in leased)
    assert victim is None if not means else means[victim] <= 1.25 * min(means.values()) + 1e6


def test_an_adapter_that_returns_has_its_earlier_uses() -> None:
    ranking = Adaptive()
    for one in (1, 1, 1, 1, 2):
        ranking.use(one, 2, 1)
    for one in (1, 2):
        ranking.enter(one, 2, 1)
    ranking.leave(1)
    ranking.use(2, 2, 1)
    ranking.enter(1, 2, 1)
    assert ranking.choose(all_accepted) == 2


def test_an_adapter_that_was_never_used_leaves_first() -> None:
    ranking = Adaptive()
    ranking.use(1, 2, 1)
    for one in (1, 2, 3):
        ranking.enter(one, 2, 9)
    assert ranking.choose(all_accepted) == 2


def test_uses_of_a_bounded_number_of_absent_adapters_are_known() -> None:
    ranking = Adaptive()
    for one in range(HISTORY_MAX + 10):
        ranking.use(one, 1, 1)
    assert list(ranking.history) == list(range(10, HISTORY_MAX + 10))


@pytest.mark.parametrize("kind", KINDS)
@given(accesses=ACCESSES, later=ACCESSES)
def test_a_restored_ranking_chooses_the_same(
    kind: type[Ranking], accesses: list[Access], later: list[Access]
) -> None:
    cache, restored = cache_of(kind), cache_of(kind)
    run(cache, accesses)
    data = msgspec.msgpack.encode(cache.ranking.state())
    restored.ranking.restore(msgspec.msgpack.decode(data, type=RankingState))
    restored.sizes, restored.size_bytes = dict(cache.sizes), cache.size_bytes
    assert restored.ranking.digest() == cache.ranking.digest_from_scratch()
    assert run(restored, later) == run(cache, later)
    assert restored.ranking.digest() == cache.ranking.digest()
    assert restored.ranking.digest_from_scratch() == cache.ranking.digest()
    assert cache.ranking.is_consistent()
    assert restored.ranking.is_consistent()


@pytest.mark.parametrize("kind", KINDS)
@given(accesses=ACCESSES, leased=st.sets(st.integers(1, 12)))
def test_the_victim_is_accepted_and_there_is_one_if_any_is(
    kind: type[Ranking], accesses: list[Access], leased: set[int]
) -> None:
    cache = cache_of(kind)
    run(cache, accesses)
    ranking = cache.ranking
    allowed = set(ranking) - leased
    peeked, chosen = (
        choose(lambda one: one not in leased) for choose in (ranking.peek, ranking.choose)
    )
    assert peeked == chosen
    assert (chosen in allowed) if allowed else chosen is None


@pytest.mark.parametrize("kind", KINDS)
@given(accesses=ACCESSES, count_max=st.integers(0, 4), removed=st.integers(1, 12))
def test_bounds_hold_after_they_are_lowered_and_after_departures(
    kind: type[Ranking], accesses: list[Access], count_max: int, removed: int
) -> None:
    cache = cache_of(kind)
    run(cache, accesses)
    if removed in cache.ranking:
        cache.remove(removed)
    cache.resize(count_max, 6)
    run(cache, accesses)
    sizes = [SIZES[one] for one in cache.ranking]
    assert len(sizes) <= count_max
    assert cache.size_bytes == sum(sizes) <= 6
    assert cache.ranking.is_consistent()


def test_a_cache_whose_ranking_chooses_nobody_keeps_everybody() -> None:
    class Never(Ranking):
        def peek(self, accepts: Accepts) -> int | None:
            return None

    cache = cache_of(Never, 1)
    assert run(cache, [(1, 1), (2, 1)]) == [[], []]
    assert set(cache.ranking) == {1, 2}
