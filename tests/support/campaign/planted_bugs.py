"""Defects that are planted one at a time, to show that the campaign finds each of them.

`planted(name)` is a context in which the program has the defect; `find_bug` runs schedules in it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple
from unittest import mock

from tests.support.campaign import bugs_of_core, bugs_of_log, bugs_of_shell
from tests.support.campaign.bug_registry import BUGS
from tests.support.campaign.campaign import ScheduleFailed, run_schedule

__all__ = ("BUGS", "Found", "bugs_of_core", "bugs_of_log", "bugs_of_shell", "find_bug", "planted")


class Found(NamedTuple):
    """The check that found a bug, in a schedule, after a number of them."""

    check: str
    seed: int
    schedules: int


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug while the context lasts."""
    owner, attribute, replacement = BUGS[name]()
    with mock.patch.object(owner, attribute, replacement, create=True):
        yield


def find_bug(name: str, seeds: Iterable[int]) -> Found | None:
    """Run the schedules with a planted bug until one fails; None if none does."""
    with planted(name):
        for number, seed in enumerate(seeds, 1):
            try:
                run_schedule(seed)
            except ScheduleFailed as error:
                return Found(error.check, seed, number)
    return None
