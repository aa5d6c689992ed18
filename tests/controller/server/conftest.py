"""Fixtures for the tests of the controller's process."""

from pathlib import Path

import pytest


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """An empty directory for a controller, with a path that is short enough for its sockets."""
    found = tmp_path / "d"
    found.mkdir()
    return found
