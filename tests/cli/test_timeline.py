"""The picture of a log: the events that it draws, and where they come from."""

import json

import pytest

from loradock.cli.timeline import events_of
from loradock.controller.log.events import EventWriter
from loradock.controller.log.writer import Log
from loradock.gateway import web
from loradock.messages import events as ev
from loradock.messages.records import Record
from tests.support.simulation.command_runs import run
from tests.support.simulation.logged_histories import HISTORY, LIMITS, header_of


@pytest.fixture
def directory(tmp_path):
    """A server's directory with a log."""
    with Log(tmp_path / "log", header_of(LIMITS)) as log:
        for seq, message in enumerate(HISTORY, start=1):
            log.append([Record(1000 * seq, message)], 1)
    return tmp_path


def test_a_recorded_log_is_drawn(directory):
    found = events_of(directory)
    assert [one.seq for one in found] == list(range(1, len(found) + 1))
    assert any(isinstance(one.event, ev.AdapterActivated) for one in found)
    output = directory / "picture.html"
    assert run("timeline", "-o", str(output), directory=directory).exit_code == 0
    drawn = events_in(output.read_text())
    assert [one["seq"] for one in drawn] == [one.seq for one in found]
    part = run("timeline", "--from", "1", "--to", "2", directory=directory)
    assert part.exit_code == 0
    assert [one["seq"] for one in events_in(part.stdout)] == [1, 2]


def test_a_hostile_text_does_not_end_the_script():
    event = ev.AdapterEvicted("</script><script>alert(1)", "x")
    text = web.timeline([ev.Published(1, 0, event)])
    assert events_in(text)[0]["event"]["adapter"] == event.adapter
    assert text.count("</script>") == 2


def events_in(document):
    """Return the events that a document draws."""
    data = document.partition('id="events">')[2].partition("</script>")[0]
    return json.loads(data)


def test_older_events_are_read_from_the_database(directory):
    made = events_of(directory)
    with EventWriter(directory / "log") as older:
        # Other events than those of the replay, so that the use of the database is visible.
        older.add([ev.Published(one.seq, one.time_ns, ev.AdapterHeld("older")) for one in made[:3]])
    found = events_of(directory)
    assert [one.event for one in found[:3]] == [ev.AdapterHeld("older")] * 3
    assert found[3:] == made[3:]


def test_what_can_not_be_drawn_is_refused(directory, tmp_path):
    assert run("timeline", "-o", "x.png", directory=directory).exit_code == 2
    assert run("timeline", "--from", "999999", directory=directory).exit_code == 3
    assert run("timeline", directory=tmp_path / "none").exit_code == 3
