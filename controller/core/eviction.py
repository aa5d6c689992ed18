"""Eviction policies: pure functions that choose a victim, and rankings.

A function sees candidates and nothing else, so that the same history leads to the same choice.
Which adapters are candidates, and when a victim is needed, is decided in `capacity` and
`reconcile`. `capacity` puts `lru` in the place of a policy that raises or chooses no candidate.

- `lru`: the least recently used adapter, wherever it is.
- `cheapest-first`: the least recently used one of those that are cheapest to load again: in
  pageable memory, then in page-locked memory, then in slots. Adapters that were loaded and never
  used, however many, do not displace adapters in slots.
- `none`: adapters leave by request only.
- `fifo`, `sieve`, `gdsf`, `adaptive`: rankings, which remember uses, sizes and costs; see
  `rankings`. They choose among idle adapters; whose turn ends is decided as with `lru`.
"""

from collections.abc import Callable, Iterator
from typing import Final, cast

from loradock.controller.core.rankings import Adaptive, Fifo, Gdsf, Ranking, Sieve
from loradock.controller.core.world import Adapter

Policy = Callable[[Iterator[Adapter]], Adapter | None]
"""Receives candidates, least recently used first; returns the victim or None."""


def choose_lru(candidates: Iterator[Adapter]) -> Adapter | None:
    """Return the least recently used candidate, None if there is none."""
    return next(candidates, None)


def choose_none(_candidates: Iterator[Adapter]) -> Adapter | None:
    """Return None: adapters leave by request only."""
    return None


POLICIES: Final[dict[str, Policy | type[Ranking]]] = {
    "lru": choose_lru,
    "cheapest-first": choose_lru,
    "none": choose_none,
    "fifo": Fifo,
    "sieve": Sieve,
    "gdsf": Gdsf,
    "adaptive": Adaptive,
}
"""Policies by the name that `--policy` and a log's header use; plugins are added when needed."""

STATE_BY_STATE: Final = frozenset(["cheapest-first"])
"""Policies that receive the candidates of one state at a time, until they choose one."""


def ranking_of(policy: Policy | type[Ranking]) -> type[Ranking] | None:
    """Return the policy if it is a kind of ranking, None if it is a function."""
    is_ranking = isinstance(policy, type) and issubclass(policy, Ranking)
    return cast("type[Ranking]", policy) if is_ranking else None
