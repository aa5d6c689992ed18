"""`none`: nobody leaves for anybody.

What it is: one function. What it is not: a refusal; whoever finds no room waits for somebody to be
taken down by request, until its deadline. One rule: it chooses nobody, whoever is offered.
"""

from collections.abc import Iterator

from controller.world import Adapter


def choose_none(_candidates: Iterator[Adapter]) -> Adapter | None:
    """None, always."""
    return None
