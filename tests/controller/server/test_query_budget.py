"""The time for queries: a share of the loop while other requests arrive, slices while none do."""

from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.server.query_budget import (
    BUSY_NS,
    BUSY_SLICE_NS,
    PAUSE_FACTOR,
    PAUSE_NS_MAX,
    QUIET_SLICE_NS,
    QueryBudget,
)

QUERIES_NS = st.lists(st.integers(1_000, 1_000_000), min_size=1, max_size=200)


def run(budget: QueryBudget, queries_ns: list[int], arrives: bool) -> tuple[int, int]:
    """Answer queries that take these times; return the time in slices, and all of it."""
    now = spent = 0
    waiting = list(queries_ns)
    while waiting:
        if arrives:
            budget.note_request(now)
        assert budget.begin(now) == (budget.wait_ns(now) == 0)
        if budget.wait_ns(now):
            now += budget.wait_ns(now)
            continue
        started = now
        while waiting:
            now += waiting.pop()
            if budget.is_over(now):
                break
        spent += now - started
        budget.end(now)
    return spent, now + budget.wait_ns(now)


@given(queries_ns=QUERIES_NS)
def test_queries_have_a_small_share_while_other_requests_arrive(queries_ns: list[int]) -> None:
    spent, total = run(QueryBudget(), queries_ns, arrives=True)
    assert spent == sum(queries_ns)
    assert total >= (1 + PAUSE_FACTOR) * spent


@given(queries_ns=QUERIES_NS)
def test_queries_wait_for_nothing_while_no_other_request_arrives(queries_ns: list[int]) -> None:
    assert run(QueryBudget(), queries_ns, arrives=False) == (sum(queries_ns), sum(queries_ns))


def test_a_slice_in_which_the_process_did_not_run_is_no_long_pause() -> None:
    budget = QueryBudget()
    budget.note_request(10**10)
    assert budget.begin(0)
    budget.end(10**10)
    assert budget.wait_ns(10**10) == PAUSE_NS_MAX


def test_slices_are_short_only_for_some_time_after_a_request() -> None:
    budget = QueryBudget()
    budget.note_request(0)
    for now, slice_ns in ((1, BUSY_SLICE_NS), (BUSY_NS, QUIET_SLICE_NS)):
        assert budget.begin(now)
        assert not budget.is_over(now + slice_ns - 1)
        assert budget.is_over(now + slice_ns)
