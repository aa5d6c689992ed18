"""The picture of a log: bars, marks, and the recorded log of the demo."""

from xml.etree import ElementTree

import pytest

from loradock.cli.timeline import Bar, Mark, draw, events_of, svg_of
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.events import EventWriter
from loradock.controller.log.writer import Log
from loradock.messages import events as ev
from loradock.messages.errors import ErrorCode
from loradock.messages.records import FORMAT, ControllerStarted, Header, Record
from loradock.messages.reports import (
    AdapterChecked,
    EngineInventory,
    SlotWritten,
    WeightsLoaded,
    WeightsStaged,
)
from loradock.messages.requests import HoldAdapter, ReleaseAdapter
from tests.support.simulation.command_runs import run

LIMITS = Limits(max_loras=2, max_cpu_loras=4)
HISTORY = (
    ControllerStarted(1),
    EngineInventory("engine", 1, "model", 2, 1 << 40),
    HoldAdapter("r-1", "upper"),
    AdapterChecked(1, "fingerprint", 8, 100, 50),
    WeightsLoaded(2),
    WeightsStaged(3),
    SlotWritten(4),
    ReleaseAdapter("r-2", "upper"),
)
SPACE = "{http://www.w3.org/2000/svg}"


@pytest.fixture
def directory(tmp_path):
    """A server's directory with a log."""
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    with Log.open(tmp_path / "log", header) as log:
        for seq, message in enumerate(HISTORY, start=1):
            log.append([Record(1000 * seq, message)], 1)
    return tmp_path


def published(*happened):
    return [ev.Published(seq, 100 * seq, event) for seq, event in enumerate(happened, 1)]


def test_bars_begin_and_end_with_events():
    picture = draw(
        published(
            ev.AdapterCached("a"),
            ev.AdapterActivated("a", 1, 1),
            ev.AdapterDeactivated("a", 1),
            ev.AdapterActivated("b", 0, 1),
            ev.AdapterFailed("c", "evicted", ErrorCode.NOT_FOUND, "x"),
            ev.EngineDetached("e", "killed"),
            ev.AdapterEvicted("b", "engine-lost"),
            ev.AdapterActivated("a", 1, 2),
            ev.AdapterRemoved("a"),
        )
    )
    assert picture.lanes == ["slot 0", "slot 1", "a", "b", "c"]
    assert sorted(picture.bars) == [
        Bar("a", "a", 100, 900),
        Bar("slot 0", "b", 400, 700),
        Bar("slot 1", "a", 200, 300),
        Bar("slot 1", "a", 800, 900),
    ]
    assert picture.marks == [
        Mark("c", "failed: L002", 500),
        Mark("", "EngineDetached", 600),
        Mark("b", "evicted: engine-lost", 700),
    ]


def test_the_picture_has_a_box_per_bar_within_its_lane():
    happened = [ev.AdapterActivated("<a>&", 0, 1), ev.AdapterDeactivated("<a>&", 0)]
    svg = ElementTree.fromstring(svg_of(draw(published(*happened)), 100, 200))
    boxes = [one for one in svg.iter(f"{SPACE}rect") if one.find(f"{SPACE}title") is not None]
    [box] = boxes
    assert box.find(f"{SPACE}title").text.startswith("<a>&")
    assert float(box.get("x")) == 150
    assert float(box.get("x")) + float(box.get("width")) == 1200


def test_a_recorded_log_is_drawn(directory):
    found = events_of(directory)
    assert [one.seq for one in found] == list(range(1, len(found) + 1))
    assert any(isinstance(one.event, ev.AdapterActivated) for one in found)
    for name in ("picture.svg", "picture.html"):
        output = directory / name
        result = run("timeline", "-o", str(output), directory=directory)
        assert result.exit_code == 0, result.output
        text = output.read_text()
        assert (text.startswith("<!doctype html>")) == name.endswith("html")
        svg = ElementTree.fromstring(text[text.index("<svg") :])
        # The background, the slot's bar and the adapter's.
        assert len(list(svg.iter(f"{SPACE}rect"))) == 3
    part = run("timeline", "--from", "1", "--to", "2", directory=directory)
    assert part.exit_code == 0
    assert part.stdout.count("<rect") == 1


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
