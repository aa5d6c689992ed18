"""Advice: what gained most in a simulation, with the command that shows the same."""

import json
from pathlib import Path

import msgspec
import pytest

from loradock.cli.what_if import parse_what_if, what_if_text
from loradock.lab.advice import GAIN_MIN, advise, simulations
from loradock.lab.simulator import Changes, simulate, what_if
from loradock.lab.traffic import Traffic
from loradock.lab.workloads import make_workload
from tests.support.simulation.command_runs import run
from tests.support.simulation.logged_histories import write_history

REQUESTS = 400


@pytest.fixture(scope="module")
def traffic() -> Traffic:
    """Many adapters for few slots, and little memory behind these."""
    made = make_workload("jobs", 40, REQUESTS).traffic(0.2, host_share=0.4)
    limits = msgspec.structs.replace(made.limits, max_loras=8, max_cpu_loras=16)
    return msgspec.structs.replace(made, limits=limits)


def test_advice_is_of_different_kinds_and_its_replay_shows_the_gain(traffic: Traffic) -> None:
    done: list[int] = []
    found = advise(traffic, seed=2, observe=done.append)
    assert sum(done) == simulations(traffic)
    assert 1 <= len(found) <= 3
    assert len({one.kind for one in found}) == len(found)
    gains = [one.gain for one in found]
    assert gains == sorted(gains, reverse=True)
    assert gains[-1] >= GAIN_MIN
    before = simulate(traffic, seed=2).outcome
    for one in found:
        assert one.cost
        assert one.before == before
        shown = what_if(traffic, parse_what_if(what_if_text(one.changes)), seed=2).outcome
        assert shown == one.after
        assert shown.first_token_s.p95 < before.first_token_s.p95
        assert shown.served == REQUESTS


def test_nothing_is_advised_where_everything_fits(traffic: Traffic) -> None:
    ample = {"max_loras": 40, "max_cpu_loras": 80, "device_bytes_max": 1 << 40}
    more = {"pinned_bytes_max": 1 << 40, "host_bytes_max": 1 << 40}
    limits = msgspec.structs.replace(traffic.limits, **ample, **more)
    found = advise(msgspec.structs.replace(traffic, limits=limits))
    # Half of the requests are fewer for a server, however it is set.
    assert {one.kind for one in found} <= {"replicas"}


def test_the_command_advises_from_a_log(tmp_path: Path) -> None:
    write_history(tmp_path / "log", 9)
    person = run("advise", directory=tmp_path)
    assert person.exit_code == 0, person.stderr
    found = json.loads(run("advise", "--json", directory=tmp_path).stdout)
    for one in found:
        changes = msgspec.convert(one["changes"], Changes)
        assert f"--what-if {what_if_text(changes)}" in person.stdout
    assert found or "No change" in person.stdout
