"""The screen of `top`: what it shows, its rates, and that it fits into 80 columns."""

import io

import msgspec
import pytest
from rich.console import Console

from loradock.cli.top import Reading, screen
from loradock.messages import requests as rq
from tests.support.simulation.command_runs import run, run_json
from tests.support.simulation.standin_controller import StandIn, view


@pytest.fixture
def status(tmp_path):
    return StandIn(tmp_path)._status(rq.ShowStatus("id"))


def text_of(before, reading):
    console = Console(file=io.StringIO(), width=80)
    console.print(screen(before, reading))
    return console.file.getvalue()


def a_reading(status, at_s, *views):
    return Reading(at_s, status, rq.AdaptersListed("id", views, 0))


def test_slots_states_and_waits_are_shown(status):
    views = (
        view("in-slot", slot=3, leases=2, held=True),
        view("waited-for", "evicted", goal="gpu-slot", waiting=5),
        view("old", retired=True, slot=1),
    )
    text = text_of(None, a_reading(status, 0.0, *views))
    assert "engine e1 (tiny)" in text
    assert "gpu-slot 1" in text
    assert "evicted 1" in text
    assert "held" in text
    assert "evicted > gpu-slot" in text
    assert "4 KiB of 1 GiB" in text
    assert "/s" not in text


def test_rates_are_differences(status):
    before = a_reading(status, 10.0, view("a", loads=1, evictions=0))
    later = msgspec.structs.replace(status, answered=status.answered + 20)
    after = a_reading(later, 12.0, view("a", loads=5, evictions=1))
    text = text_of(before, after)
    assert "10.0 answers/s, 0.0 refusals/s, 2.0 loads/s, 0.5 evictions/s" in text
    restarted = msgspec.structs.replace(later, epoch=later.epoch + 1)
    assert "restarted" in text_of(before, a_reading(restarted, 12.0))


def test_a_screen_is_bounded(status):
    views = [view(f"{'long-name-' * 12}{number}", slot=number, leases=1) for number in range(500)]
    views += [view(f"w{number}", "evicted", waiting=1) for number in range(500)]
    text = text_of(None, a_reading(status, 0.0, *views))
    assert max(map(len, text.splitlines())) <= 80
    assert len(text.splitlines()) <= 60
    assert text.count("and 484 more") == 2


def test_the_command_prints_one_reading(controller):
    result = run("top", "--once", directory=controller.directory)
    assert result.exit_code == 0, result.output
    assert "upper" in result.stdout
    [document] = run_json("top", directory=controller.directory)
    assert document["status"]["engine_id"] == "e1"
    assert [one["adapter"] for one in document["adapters"]] == ["reverse", "upper"]
