"""When adapters are expected: after even intervals of bursts, never after uses at random."""

import random

from loradock.controller.core.use_history import LEAD_NS, UseHistory

SECOND = 1_000_000_000


def used(history: UseHistory, name: str, times_s: list[float]) -> None:
    for time_s in times_s:
        history.use(name, int(time_s * SECOND))


def test_an_adapter_of_even_bursts_is_due_before_the_next_one() -> None:
    history = UseHistory()
    for burst in range(4):
        assert history.take_due(int((60 * burst + 50) * SECOND)) == []
        used(history, "job", [60 * burst, 60 * burst + 0.5, 60 * burst + 3])
    due_ns = history.next_ns()
    assert due_ns == 240 * SECOND - LEAD_NS
    assert history.take_due(due_ns - 1) == []
    assert history.take_due(due_ns) == ["job"]
    assert history.next_ns() is None


def test_intervals_that_vary_make_it_due_earlier() -> None:
    history = UseHistory()
    used(history, "job", [0, 60, 122, 180, 241])
    # The use at 241 s came after it was expected.
    assert history.take_due(241 * SECOND) == []
    due_ns = history.next_ns()
    assert due_ns is not None
    assert 295 * SECOND < due_ns < 301 * SECOND - LEAD_NS


def test_a_use_before_it_is_due_begins_the_next_interval() -> None:
    history = UseHistory()
    used(history, "job", [0, 60, 120, 180])
    used(history, "job", [230])
    assert history.take_due(250 * SECOND) == []


def test_uses_at_random_are_hardly_expected() -> None:
    rng, history, time_s, due = random.Random(1), UseHistory(), 0.0, 0
    for _ in range(5_000):
        time_s += rng.expovariate(1.0)
        used(history, f"a{rng.randrange(20)}", [time_s])
        due += len(history.take_due(int(time_s * SECOND)))
    assert due < 100


def test_the_least_recently_used_are_forgotten() -> None:
    history = UseHistory(adapters_max=2)
    for time_s in (0, 60, 120, 180):
        used(history, "job", [time_s])
    used(history, "b", [181])
    used(history, "c", [182])
    assert history.take_due(300 * SECOND) == []
