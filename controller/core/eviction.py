"""Eviction policies: pure functions that choose a victim.

A policy sees candidates and nothing else, so that the same history leads to the same choice. Which
adapters are candidates, and when a victim is needed, is decided in `capacity` and `reconcile`.

- `lru`: the least recently used adapter, wherever it is.
- `cheapest-first`: the least recently used one of those that are cheapest to load again: in
  pageable memory, then in page-locked memory, then in slots. Adapters that were loaded and never
  used, however many, do not displace adapters in slots.
- `none`: adapters leave by request only.
"""

from collections.abc import Callable, Iterator
from typing import Final

from loradock.controller.core.world import Adapter

Policy = Callable[[Iterator[Adapter]], Adapter | None]
"""Receives candidates, least recently used first; returns the victim or None."""


def choose_lru(candidates: Iterator[Adapter]) -> Adapter | None:
    """Return the least recently used candidate, None if there is none."""
    return next(candidates, None)


def choose_none(_candidates: Iterator[Adapter]) -> Adapter | None:
    """Return None: adapters leave by request only."""
    return None


POLICIES: Final[dict[str, Policy]] = {
    "lru": choose_lru,
    "cheapest-first": choose_lru,
    "none": choose_none,
}
"""Policies by the name that `--policy` and a log's header use; plugins are added when needed."""

_STATE_BY_STATE: Final = frozenset(["cheapest-first"])


def is_state_by_state(policy: str, rules: int) -> bool:
    """Return whether a policy receives the candidates of one state at a time, until it chooses one.

    Under rules 2 every policy does.
    """
    return rules == 2 or policy in _STATE_BY_STATE
