"""The slowest of the last hour are kept, bounded, and ages are those since the arrival."""

from random import Random

from loradock.controller.server.operating.request_times import (
    SLOW_KEPT_NS,
    SLOW_MAX,
    RequestTimes,
    SlowestTable,
)

MS = 1_000_000


def test_the_slowest_are_kept() -> None:
    random, table = Random(3), SlowestTable()
    durations = [random.randrange(1, 10_000) * MS for _ in range(500)]
    for number, duration_ns in enumerate(durations):
        table.add(number, duration_ns, "load", str(number), "done")
    found = [view.duration_ms for view in table.views(500)]
    assert found == [one // MS for one in sorted(durations, reverse=True)[:SLOW_MAX]]


def test_what_ended_more_than_an_hour_ago_makes_space() -> None:
    table = SlowestTable()
    for number in range(SLOW_MAX):
        table.add(number, 1000 * MS, "load", "old", "done")
    table.add(SLOW_KEPT_NS + SLOW_MAX, MS, "load", "new", "L002")
    (view,) = table.views(SLOW_KEPT_NS + SLOW_MAX + 5 * MS)
    assert (view.adapter, view.duration_ms, view.ended_ms_ago, view.outcome) == (
        "new",
        1,
        5,
        "L002",
    )


def test_ages_and_tokens_of_requests() -> None:
    times = RequestTimes(10 * MS)
    times.begin_request("a", "generate", "x", 20 * MS)
    times.begin_request("a", "generate", "x", 30 * MS)
    times.count_tokens("a", 5)
    times.count_tokens("a", 3)
    pending = [("a", "generate", "x", True), ("before", "load", "y", False)]
    first, second = times.views(iter(pending), 50 * MS)
    assert (first.phase, first.age_ms, first.tokens) == ("running", 30, 5)
    assert (second.phase, second.age_ms, second.tokens) == ("waiting", 40, 0)
    times.end_request("a", "done", 60 * MS)
    times.end_request("a", "done", 90 * MS)
    assert [view.duration_ms for view in times.slow_requests(60 * MS)] == [40]


def test_operations_that_the_engine_does_not_run_are_forgotten() -> None:
    times = RequestTimes(0)
    for op in range(1, 4):
        times.begin_operation(op, "load", str(op), 0)
    times.keep_operations((2,))
    for op in range(1, 4):
        times.end_operation(op, "done", 5 * MS)
    assert [view.adapter for view in times.slow_operations(60 * MS)] == ["2"]
