"""Which events are printed: since when, of which adapters and types."""

import time

import pytest

from loradock.cli.event_filter import EventFilter, start_of
from loradock.cli.exit_codes import CommandError
from loradock.client.streams import Gap
from loradock.messages.events import AdapterHeld, AdapterReleased, ControllerResumed, Published

EVENTS = (
    Published(1, 100, AdapterHeld("acme-1")),
    Published(2, 200, AdapterReleased("acme-2")),
    Published(3, 300, AdapterHeld("other")),
    Published(4, 400, ControllerResumed(1)),
    Gap(5, 7),
)


@pytest.mark.parametrize(
    ("adapters", "types", "since_ns", "found"),
    [
        ((), (), 0, [1, 2, 3, 4]),
        (("acme-*",), (), 0, [1, 2]),
        (("acme-1", "other"), (), 0, [1, 3]),
        ((), ("adapterheld", "Controller-Resumed"), 0, [1, 3, 4]),
        (("acme-*",), ("AdapterHeld",), 0, [1]),
        ((), (), 300, [3, 4]),
    ],
)
def test_events_are_selected_and_gaps_are_kept(adapters, types, since_ns, found):
    *events, gap = filter(EventFilter(adapters, types, 0, since_ns).has, EVENTS)
    assert isinstance(gap, Gap)
    assert [one.seq for one in events] == found


def test_a_start_is_a_number_or_a_time():
    assert start_of(None, follow=True) == (None, 0)
    assert start_of(None, follow=False) == (0, 0)
    assert start_of("7", follow=True) == (7, 0)
    before = time.time_ns()
    start, since_ns = start_of("2h", follow=True)
    assert start == 0
    assert before <= since_ns + 7200 * 10**9 <= time.time_ns()
    for wrong in ("soon", "-1", "1.5h", "10"[:0], "3w"):
        with pytest.raises(CommandError, match="--since must be"):
            start_of(wrong, follow=True)


def test_an_unknown_type_names_a_close_one():
    with pytest.raises(CommandError) as caught:
        EventFilter((), ("AdapterHold",), 0, 0)
    assert "AdapterHeld" in caught.value.hint
