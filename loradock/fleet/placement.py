"""The order of docks for a name, by weighted rendezvous hashing: a pure function.

Every process computes the same order, and a dock that comes or goes moves only its own share
(Schindelhauer and Schomaker, "Weighted distributed hash tables", 2005).
"""

import heapq
import math
from collections.abc import Mapping
from functools import lru_cache
from hashlib import blake2b
from typing import Final

_UNITS: Final = 2**64
_DOCKS_CACHED: Final = 4096


def score(name: int, dock: int, weight: int) -> float:
    """Return the score of a dock for a name, both as hashes; the highest is the first."""
    # The finalizer of splitmix64: each bit of both depends on all bits.
    mixed = name ^ dock
    mixed = (mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9 % _UNITS
    mixed = (mixed ^ (mixed >> 27)) * 0x94D049BB133111EB % _UNITS
    return -weight / math.log(((mixed ^ (mixed >> 31)) + 0.5) / _UNITS)


@lru_cache(_DOCKS_CACHED)
def _dock_hash(dock: str) -> int:
    return _hash(dock)


def _hash(text: str) -> int:
    return int.from_bytes(blake2b(text.encode(), digest_size=8).digest())


def rendezvous(name: str, weights: Mapping[str, int], count: int) -> list[str]:
    """Return the first `count` docks, the best first."""
    of_name = _hash(name)
    scored = [(score(of_name, _dock_hash(dock), weight), dock) for dock, weight in weights.items()]
    return [dock for _, dock in heapq.nlargest(count, scored)]
