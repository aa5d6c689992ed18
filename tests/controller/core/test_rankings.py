"""Rankings choose as their plain definitions do, from their state alone."""

import random

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core.rankings import (
    Accepts,
    Adaptive,
    Cache,
    Fifo,
    Gdsf,
    Lrfu,
    Lru,
    Ranking,
    RankingState,
    Sieve,
)

KINDS = (Lru, Fifo, Sieve, Gdsf, Lrfu, Adaptive)
SIZES = {one: 1 + one % 4 for one in range(1, 13)}

Access = tuple[int, int]
ACCESSES = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 9)), max_size=60)


def all_accepted(_adapter_id: int) -> bool:
    return True


def cache_of(kind: type[Ranking], count_max: int = 4, size_bytes_max: int = 9) -> Cache:
    cache = Cache(kind(), count_max, size_bytes_max)
    cache.ranking.resize(count_max, size_bytes_max)
    return cache


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


@pytest.mark.parametrize("seed", range(5))
def test_lrfu_lies_between_lru_and_lfu(seed: int) -> None:
    """With a half-life of one use it is LRU; if uses never age, the least frequently used leaves.

    Of equally frequent ones, the least recently used leaves first.
    """
    trace = random.Random(seed).choices(range(30), [1 / (one + 1) for one in range(30)], k=2000)

    class Forgetful(Lrfu):
        HALF_LIFE = 1

    class Lfu(Lrfu):
        HALF_LIFE = 1 << 40

    forgetful, recent, lfu = (cache_of(kind, 8, 1 << 40) for kind in (Forgetful, Lru, Lfu))
    uses: dict[int, tuple[int, int]] = {}
    for number, one in enumerate(trace):
        assert forgetful.access(one, 1, 1) == recent.access(one, 1, 1)
        expected = None
        if one not in uses:
            leaves = min(uses, key=uses.__getitem__) if len(uses) == 8 else None
            expected = [] if leaves is None else [leaves]
            uses.pop(leaves, None)  # type: ignore[arg-type]
        uses[one] = (uses.get(one, (0, 0))[0] + 1, number)
        assert lfu.access(one, 1, 1) == expected


def test_lrfu_keeps_what_is_used_now_before_what_was_used_more_often_once() -> None:
    cache = cache_of(Lrfu, 2, 100)
    run(cache, [(1, 1)] * 10)
    for _ in range(3):
        assert cache.access(2, SIZES[2], 1) in ([], None)
    # Ten half-lives of uses of the other: ten uses count less than one.
    for _ in range(10 * Lrfu.HALF_LIFE):
        cache.access(2, SIZES[2], 1)
    assert cache.access(3, SIZES[3], 1) == [1]


def test_adaptive_costs_little_more_than_its_best_expert() -> None:
    generator = random.Random(2)
    zipf = generator.choices(range(1, 101), [1 / one for one in range(1, 101)], k=6000)
    drift = [step // 300 * 4 + generator.randrange(1, 8) for step in range(6000)]
    for trace in (zipf, drift):
        costs = {}
        for kind in (*Adaptive.EXPERTS, Adaptive):
            cache = cache_of(kind, 10, 1 << 40)
            for one in trace:
                cache.access(one, 1 + one % 4, 5 + one % 4)
            costs[kind] = cache.cost_ns
        best = min(costs[kind] for kind in Adaptive.EXPERTS)
        assert costs[Adaptive] <= 1.05 * best
        assert costs[Adaptive] <= 1.02 * costs[Lru]


@pytest.mark.parametrize("kind", KINDS)
@given(accesses=ACCESSES, later=ACCESSES)
def test_a_restored_ranking_chooses_the_same(
    kind: type[Ranking], accesses: list[Access], later: list[Access]
) -> None:
    cache, restored = cache_of(kind), cache_of(kind)
    run(cache, accesses)
    data = msgspec.msgpack.encode(cache.ranking.state())
    restored.ranking.restore(msgspec.msgpack.decode(data, type=RankingState))
    restored.size_bytes = cache.size_bytes
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
    cache.ranking.resize(count_max, 6)
    cache.resize(count_max, 6)
    run(cache, accesses)
    sizes = [SIZES[one] for one in cache.ranking]
    assert len(sizes) <= count_max
    assert cache.size_bytes == sum(sizes) <= 6
    assert cache.ranking.is_consistent()


def test_the_first_use_of_an_adapter_of_unknown_size_is_its_entry() -> None:
    ranking = Adaptive()
    ranking.resize(2, 10)
    for one in (1, 2, 3):
        ranking.use(one, 0, 1)
        ranking.enter(one, 2, 1)
    assert ranking.is_consistent()
    assert [len(expert.ranking.entries) for expert in ranking.experts] == [2, 2, 2, 2]
    # Only the experts have evicted it.
    assert ranking.choose(all_accepted) == 1


def test_an_adapter_that_returns_without_a_use_is_a_stray_of_whom_does_not_have_it() -> None:
    ranking = Adaptive()
    ranking.resize(2, 10)
    for one, cost in ((1, 9), (2, 1), (1, 9), (3, 1)):
        ranking.use(one, 2, cost)
    # Of the experts, each has two of the three.
    for one in (1, 2, 3):
        ranking.enter(one, 2, 1)
    assert ranking.is_consistent()


def test_a_cache_whose_ranking_chooses_nobody_keeps_everybody() -> None:
    class Never(Ranking):
        def peek(self, accepts: Accepts) -> int | None:
            return None

    cache = cache_of(Never, 1)
    assert run(cache, [(1, 1), (2, 1)]) == [[], []]
    assert set(cache.ranking) == {1, 2}


def test_a_victim_is_found_if_everything_that_the_leader_lacks_is_leased() -> None:
    ranking = Adaptive()
    ranking.resize(2, 10)
    for one in (1, 2, 3):
        ranking.enter(one, 2, 1)
    assert ranking.choose(lambda one: one != 1) == 2
