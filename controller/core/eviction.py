"""Eviction policies: pure functions that choose a victim.

A policy sees candidates and nothing else, so that the same history leads to the same choice. Which
adapters are candidates, and when a victim is needed, is decided in `capacity` and `reconcile`.
"""

from collections.abc import Callable, Iterator
from typing import Final

from controller.core.world import Adapter

Policy = Callable[[Iterator[Adapter]], Adapter | None]
"""Receives candidates, least recently used first; returns the victim or None."""


def choose_lru(candidates: Iterator[Adapter]) -> Adapter | None:
    """Return the least recently used candidate, None where there is none."""
    return next(candidates, None)


def choose_none(_candidates: Iterator[Adapter]) -> Adapter | None:
    """Return None: adapters leave by request only."""
    return None


POLICIES: Final[dict[str, Policy]] = {"lru": choose_lru, "none": choose_none}
"""Policies by the name that `--policy` and a log's header use; plugins are added when needed."""
