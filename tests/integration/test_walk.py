"""The ways through the program get no longer."""

import json
from pathlib import Path
from typing import Final

import pytest

from tests.walk import RUNS, STORED, measure

TOLERANCE: Final = 1.05
"""What falls into one group of inputs differs from run to run; functions differ by a tenth."""


def longer_ways(directory: Path) -> dict[str, tuple[int, int]]:
    stored = json.loads(STORED.read_text())
    figures = measure(directory)
    assert figures.keys() == stored.keys()
    return {
        name: (value, stored[name])
        for name, value in figures.items()
        if not name.endswith("functions") and value > TOLERANCE * stored[name]
    }


def test_no_way_is_longer_than_the_stored_one(tmp_path: Path) -> None:
    # A loaded machine only adds to a way: what falls into one group of inputs differs.
    for number in range(RUNS):
        directory = tmp_path / str(number)
        directory.mkdir()
        longer = longer_ways(directory)
        if not longer:
            return
    pytest.fail(f"{longer}: see `make walk`")
