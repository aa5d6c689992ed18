"""Laws that an eviction policy must keep, for the tests of a package that adds one.

from loradock.testing import check_eviction_policy

def test_my_policy() -> None:
    check_eviction_policy(my_policy)
"""

import random
from typing import Final, cast

import msgspec

from loradock.controller.core.counters import Counters
from loradock.controller.core.eviction import Policy, ranking_of
from loradock.controller.core.rankings import Cache, Ranking, RankingState
from loradock.controller.core.world import Adapter

_HISTORIES: Final = 200
_CANDIDATES_MAX: Final = 12
_ACCESSES: Final = 60


def check_eviction_policy(policy: Policy | type[Ranking]) -> None:
    """Raise `AssertionError` if a policy breaks a law.

    For any candidates it returns one of them or None, for none it returns None. It changes no
    candidate, and chooses the same for equal candidates, also after other calls: a replay of the
    log in another process must lead to the same state. A ranking does the same after equal calls,
    also if its state was stored and restored in between.
    """
    ranking = ranking_of(policy)
    if ranking is None:
        _check_function(cast("Policy", policy))
    else:
        _check_ranking(ranking)


def _check_function(policy: Policy) -> None:
    generator = random.Random(0)  # noqa: S311 - examples, no secrets
    rounds = [_candidates(generator) for _ in range(_HISTORIES)]
    first = [_choose(policy, candidates) for candidates in rounds]
    again = [_choose(policy, candidates) for candidates in reversed(rounds)]
    assert first == again[::-1], "equal candidates led to another choice"  # noqa: S101


def _candidates(generator: random.Random) -> list[Adapter]:
    """Return adapters that may be evicted, the least recently used first."""
    count = generator.randrange(_CANDIDATES_MAX)
    return [
        Adapter(
            id=place + 1,
            name=f"adapter-{place}",
            path=f"adapters/{place}",
            lru_stamp=place,
            counters=Counters(
                hits=generator.randrange(100),
                misses=generator.randrange(100),
                loads=generator.randrange(10),
                evictions=generator.randrange(10),
            ),
        )
        for place in range(count)
    ]


def _choose(policy: Policy, candidates: list[Adapter]) -> int | None:
    """Return the place of the chosen candidate."""
    before = msgspec.json.encode(candidates)
    # The policy gets the candidates themselves, one at a time.
    victim = policy(iter(candidates))
    assert msgspec.json.encode(candidates) == before, "candidates were changed"  # noqa: S101
    if victim is None:
        return None
    places = [place for place, one in enumerate(candidates) if one is victim]
    assert places, f"{victim!r} is no candidate"  # noqa: S101
    return places[0]


def _check_ranking(kind: type[Ranking]) -> None:
    generator = random.Random(0)  # noqa: S311 - examples, no secrets
    for _ in range(_HISTORIES):
        count_max, size_bytes_max = generator.randint(1, 6), generator.randint(4, 20)
        caches = [Cache(kind(), count_max, size_bytes_max) for _ in range(2)]
        for step in range(_ACCESSES):
            one = generator.randint(1, _CANDIDATES_MAX)
            if step == _ACCESSES // 2:
                caches[1].ranking = _restored(kind, caches[1].ranking)
            cost_ns = generator.randint(1, 9)
            first, again = (cache.access(one, 1 + one % 4, cost_ns) for cache in caches)
            assert first == again, "equal calls led to another choice"  # noqa: S101
        _check_choices(caches[0].ranking, generator)


def _restored(kind: type[Ranking], ranking: Ranking) -> Ranking:
    """Return a new ranking with the state of another."""
    data, made = msgspec.msgpack.encode(ranking.state()), kind()
    made.restore(msgspec.msgpack.decode(data, type=RankingState))
    assert made.digest() == ranking.digest_from_scratch(), "its state is not all"  # noqa: S101
    return made


def _check_choices(ranking: Ranking, generator: random.Random) -> None:
    """Check that only accepted adapters are chosen."""
    adapters = sorted(ranking)
    leased = set(generator.sample(adapters, generator.randint(0, len(adapters))))
    victim = ranking.choose(lambda one: one not in leased)
    allowed = (*(one for one in adapters if one not in leased), None)
    assert victim in allowed, f"{victim!r} is no candidate"  # noqa: S101
    assert ranking.is_consistent(), "its order is not that of its entries"  # noqa: S101
