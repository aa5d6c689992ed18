"""Fixtures for the tests of the client library."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loradock.client import Client
from tests.support.simulation.client_examples import FAST
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import HANG_S


@pytest.fixture
def controller(tmp_path: Path) -> Iterator[StandIn]:
    """A running stand-in for a controller."""
    with StandIn(tmp_path) as stand_in:
        yield stand_in


@pytest.fixture
def client(controller: StandIn) -> Iterator[Client]:
    """A blocking client of it, which repeats its frames soon."""
    with Client(controller.directory, timeout_s=HANG_S, timing=FAST) as client:
        yield client
