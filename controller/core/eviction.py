"""Who has to leave when room is needed: pure choosers of a victim, by name.

What it is: one function a policy and the table of their names. What it is not: the decision that
somebody must leave, or who may be asked to (`room` decides both). One rule: a policy sees
candidates and nothing else, so the same history gives the same choice.
"""

from collections.abc import Callable, Iterator
from typing import Final

from controller.core.world import Adapter

Policy = Callable[[Iterator[Adapter]], Adapter | None]
"""Takes candidates, least recently touched first; returns the victim, None where there is none."""


def choose_lru(candidates: Iterator[Adapter]) -> Adapter | None:
    """The first candidate; None where there is none."""
    return next(candidates, None)


def choose_none(_candidates: Iterator[Adapter]) -> Adapter | None:
    """None, always."""
    return None


POLICIES: Final[dict[str, Policy]] = {"lru": choose_lru, "none": choose_none}
