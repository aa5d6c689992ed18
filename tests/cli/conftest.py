"""Fixtures for the tests of the command line."""

import pytest

from tests.support.simulation.standin_controller import StandIn


@pytest.fixture
def controller(tmp_path):
    """A running stand-in for a controller."""
    with StandIn(tmp_path) as stand_in:
        yield stand_in
