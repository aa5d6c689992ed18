"""Laws that an eviction policy must keep, for the tests of a package that adds one.

from loradock.testing import check_eviction_policy

def test_my_policy() -> None:
    check_eviction_policy(my_policy)
"""

import random
from typing import Final

import msgspec

from loradock.controller.core.counters import Counters
from loradock.controller.core.eviction import Policy
from loradock.controller.core.world import Adapter

_HISTORIES: Final = 200
_CANDIDATES_MAX: Final = 12


def check_eviction_policy(policy: Policy) -> None:
    """Raise `AssertionError` if a policy breaks a law.

    For any candidates it returns one of them or None, for none it returns None. It changes no
    candidate, and chooses the same for equal candidates, also after other calls: a replay of the
    log in another process must lead to the same state.
    """
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
