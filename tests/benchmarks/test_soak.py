"""What counts as growth in a soak."""

from random import Random

import pytest

from benchmarks.soak import KINDS, growth_of

TIMES = [float(second) for second in range(60)]
NAMES = ("memory controller", "descriptors engine", "threads engine", "log")


@pytest.mark.parametrize("name", NAMES)
def test_a_quantity_that_rises_is_not_flat_and_one_that_varies_is(name: str) -> None:
    rng = Random(1)
    kind = KINDS[name.split(maxsplit=1)[0]]
    step = kind.relative * 100 + kind.absolute + 1
    for rise, is_flat in ((0.0, True), (2 * step, False), (-2 * step, True)):
        values = [100 + rise * at / TIMES[-1] + rng.uniform(-1, 1) for at in TIMES]
        # A snapshot or a slow client adds much for a moment.
        values[10] += 50 * step
        assert growth_of(name, TIMES, values).is_flat is is_flat


def test_the_growth_is_the_slope_over_the_whole_time() -> None:
    growth = growth_of("log", TIMES, [3 * at for at in TIMES])
    assert growth.growth == pytest.approx(3 * TIMES[-1])
