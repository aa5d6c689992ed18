"""The table of adapters: events applied, counted, kept for readers, and gaps."""

import msgspec
import pytest

from loradock.gateway.adapters.follower import RECENT_EVENTS, AdapterTable
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.views import AdapterUse
from tests.support.simulation.message_examples import example_of
from tests.support.simulation.standin_controller import view


def a_table(*views, seq=0):
    table = AdapterTable()
    table.reset(rq.AdaptersListed("", views, seq))
    return table


def apply(table, *happened):
    for event in happened:
        table.apply(ev.Published(table.seq + 1, 0, event))


@pytest.mark.parametrize(
    ("event", "state", "slot"),
    [
        (ev.AdapterCached("a"), "cpu-cached", -1),
        (ev.AdapterPinned("a"), "pinned", -1),
        (ev.AdapterActivated("a", 3, 9), "gpu-slot", 3),
        (ev.AdapterDeactivated("a", 2), "pinned", -1),
        (ev.AdapterUnpinned("a"), "cpu-cached", -1),
        (ev.AdapterEvicted("a", "policy"), "evicted", -1),
    ],
)
def test_an_event_changes_the_state_at_once(event, state, slot):
    table = a_table(view("a"), view("b"))
    apply(table, event)
    assert (table.views["a"].state, table.views["a"].slot) == (state, slot)
    assert table.views["b"] == view("b")
    assert table.stale == {"a"}


def test_holds_are_followed():
    table = a_table(view("a"))
    apply(table, ev.AdapterHeld("a"))
    assert table.views["a"].held
    apply(table, ev.AdapterReleased("a"))
    assert not table.views["a"].held


def test_unknown_names_are_read_again_and_removed_ones_forgotten():
    table = a_table()
    apply(table, ev.AdapterAccepted("new", "ab", 8, 100), ev.AdapterCached("new"))
    assert table.views == {}
    assert table.stale == {"new"}
    table.update("new", view("new"))
    assert table.stale == set()
    apply(table, ev.AdapterRemoved("new"))
    assert table.stale == {"new"}
    table.update("new", None)
    assert table.views == {}


@pytest.mark.parametrize(
    "event",
    [ev.EngineAttached("e", "m"), ev.EngineDetached("e", "killed"), ev.ControllerResumed(2)],
)
def test_everything_is_read_again_after_a_restart(event):
    table = a_table(view("a"))
    apply(table, event)
    assert table.needs_list
    table.reset(rq.AdaptersListed("", (view("b"), view("c", retired=True)), 5))
    assert not table.needs_list
    assert list(table.views) == ["b"]
    # The stream continues at its own position.
    assert table.seq == 1


def test_totals_are_sums_of_events():
    table = a_table(view("a"))
    apply(
        table,
        *(ev.AdapterCached("a"), ev.AdapterPinned("a"), ev.AdapterActivated("a", 0, 1)),
        *(ev.AdapterEvicted("a", "policy"), ev.AdapterEvicted("a", "policy")),
        ev.AdapterFailed("a", "evicted", ErrorCode.NOT_FOUND, "x"),
        *(ev.GenerationFinished("a", "stop", 3, 4), ev.GenerationFinished("", "stop", 1, 1)),
        ev.PoolingFinished("a", "embed", "done", 2, 7),
    )
    totals = table.totals
    assert (totals.loads, totals.stagings, totals.activations) == (1, 1, 1)
    assert totals.evictions == {"policy": 2}
    assert totals.failures == {"L002": 1}
    assert totals.requests == {("a", "stop"): 1, ("", "stop"): 1, ("a", "done"): 1}
    assert (totals.prompt_tokens, totals.output_tokens) == (11, 5)


def test_recent_events_are_kept_for_readers():
    table = a_table(seq=10)
    assert table.events_after(10) == ()
    assert table.events_after(9) is None
    assert table.events_after(11) is None
    apply(table, *(ev.AdapterCached(f"a{number}") for number in range(3)))
    assert [published.seq for published in table.events_after(10)] == [11, 12, 13]
    assert [published.seq for published in table.events_after(12)] == [13]
    assert table.events_after(13) == ()
    assert table.events_after(9) is None
    apply(table, *(ev.AdapterCached("a") for _ in range(RECENT_EVENTS)))
    assert table.events_after(10) is None


def test_a_gap_ends_what_readers_can_continue_from():
    table = a_table(seq=10)
    apply(table, ev.AdapterCached("a"))
    table.on_gap(19)
    assert table.needs_list
    assert table.totals.gaps == 1
    assert table.events_after(11) is None
    table.apply(ev.Published(20, 0, ev.AdapterCached("a")))
    assert [published.seq for published in table.events_after(19)] == [20]


def test_nothing_is_known_before_the_first_list():
    table = AdapterTable()
    assert table.events_after(0) is None
    assert not table.synced


def test_loads_are_measured_from_acceptance_to_the_host():
    table = a_table()

    def at(time_ns, event):
        table.apply(ev.Published(table.seq + 1, time_ns, event))

    at(0, ev.AdapterAccepted("a", "ab", 8, 100))
    at(0, ev.AdapterAccepted("b", "ab", 8, 100))
    at(20_000_000, ev.AdapterCached("a"))
    # A failed load, a later one of known files, and a clock that was set back do not count.
    at(30_000_000, ev.AdapterFailed("b", "unregistered", ErrorCode.NOT_FOUND, "x"))
    at(40_000_000, ev.AdapterCached("b"))
    at(50_000_000, ev.AdapterCached("a"))
    at(60_000_000, ev.AdapterAccepted("c", "ab", 8, 100))
    at(10_000_000, ev.AdapterCached("c"))
    assert table.totals.load_s.sum == pytest.approx(0.02)
    assert table.totals.load_s.buckets()[-1] == ("+Inf", 1.0)


def test_views_that_were_read_are_kept_for_readers():
    table = a_table(view("a"), view("b"))
    count = table.update_count
    assert table.updated_after(count) == []
    table.update("a", view("a", "pinned"))
    table.update("a", view("a", "gpu-slot"))
    table.reset(rq.AdaptersListed("", (view("a", "gpu-slot"), view("b", "evicted")), 0))
    assert table.updated_after(count) == [view("a", "gpu-slot"), view("b", "evicted")]
    for _ in range(RECENT_EVENTS):
        table.update("a", view("a"))
    assert table.updated_after(count) is None
    assert table.updated_after(table.update_count - RECENT_EVENTS) == [view("a")]


def a_status(*uses):
    return msgspec.structs.replace(example_of(rq.StatusShown), uses=uses)


def test_requests_are_those_of_the_last_status():
    """No event reports that a request begins to wait, or that it ends to."""
    table = a_table(view("a"), view("b", waiting=4), view("c"))
    table.set_status(a_status(AdapterUse("a", 2, leases=3), AdapterUse("new", -1, waiters=1)))
    counts = {name: (one.leases, one.waiting) for name, one in table.views.items()}
    assert counts == {"a": (3, 0), "b": (0, 0), "c": (0, 0)}
    table.update("c", view("c", leases=7))
    count = table.update_count
    table.set_status(a_status(AdapterUse("a", 2, leases=3)))
    counts = {name: (one.leases, one.waiting) for name, one in table.views.items()}
    assert counts == {"a": (3, 0), "b": (0, 0), "c": (0, 0)}
    # Readers receive what has changed, and nothing else.
    assert [one.adapter for one in table.updated_after(count)] == ["c"]
