"""Processes that tests of several files share."""

from collections.abc import Iterator

import pytest

from tests.support.parallel.ranks import Ranks, ranks


@pytest.fixture(scope="session")
def pair() -> Iterator[Ranks]:
    """Return two processes that form a group."""
    with ranks() as started:
        yield started
