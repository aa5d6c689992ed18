"""The ways through the program get no longer."""

import json
from pathlib import Path
from typing import Final

from tests.walk import STORED, measure

TOLERANCE: Final = 1.05
"""What falls into one group of inputs differs from run to run; functions differ by a tenth."""


def test_no_way_is_longer_than_the_stored_one(tmp_path: Path) -> None:
    stored = json.loads(STORED.read_text())
    figures = measure(tmp_path)
    assert figures.keys() == stored.keys()
    longer = {
        name: (value, stored[name])
        for name, value in figures.items()
        if not name.endswith("functions") and value > TOLERANCE * stored[name]
    }
    assert longer == {}, "see `make walk`"
