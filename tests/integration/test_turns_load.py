"""Twice as many adapters as slots, over simulated time: what turns cost, and how long they last."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from loradock.controller.core.limits import TURN_TOKENS_DEFAULT
from tests.support.engine.turns_load import SLOTS, TurnsLoad, write_files

pytest_plugins = ("tests.support.engine.engine_fixtures",)

COPY_STEPS = 2
"""A generation that leaves its slot has this many tokens more, while the next adapter is copied."""


@pytest.fixture
def load(tmp_path: Path) -> Iterator[TurnsLoad]:
    write_files(tmp_path)
    load = TurnsLoad(tmp_path, rows=2 * SLOTS, turn_tokens=TURN_TOKENS_DEFAULT)
    yield load
    load.engine.close()


def test_turns_keep_the_slots_in_use_and_first_tokens_early(load: TurnsLoad) -> None:
    """One request for each adapter at a time: the rows of a step are at most the slots."""
    fit = load.run(adapters=SLOTS, clients=2 * SLOTS)
    more = load.run(adapters=2 * SLOTS, clients=2 * SLOTS)
    assert more.rows > 0.9 * SLOTS
    # Half of the sequences have a slot: with all slots in every step, 0.8 is kept.
    assert more.tokens_per_s > 0.78 * fit.tokens_per_s
    assert more.first_ms < 1.3 * fit.first_ms
    # Two turns of each adapter that waits before it.
    assert more.others_tokens_max <= 2 * (TURN_TOKENS_DEFAULT + COPY_STEPS)
