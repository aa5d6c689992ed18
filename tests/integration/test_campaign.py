"""Simulated schedules with faults keep all promises, and planted bugs are found.

A failing line states its seed; `make sim SEED=n` repeats it exactly. LORADOCK_SCHEDULES sets the
number of schedules.
"""

import os
import subprocess
import sys
from itertools import chain

import pytest

from tests.support.campaign.campaign import STEPS, ScheduleFailed, run_schedule
from tests.support.campaign.machine import simulated_machine
from tests.support.campaign.planted_bugs import BUGS, KNOWN_SEEDS, find_bug, planted
from tests.support.sources import ROOT

SCHEDULES = int(os.environ.get("LORADOCK_SCHEDULES", "300"))
PARTS = 4
BUG_SCHEDULES_MAX = 1_000
"""Bound on the schedules until a planted bug is found; most are found by the first ten."""


@pytest.mark.parametrize("part", range(PARTS))
def test_schedules_keep_every_promise(part: int) -> None:
    failed = []
    with simulated_machine():
        for seed in range(part, SCHEDULES, PARTS):
            try:
                run_schedule(seed)
            except ScheduleFailed as error:
                failed.append(str(error))
    assert failed == []


def test_a_schedule_has_clients_answers_and_crashes() -> None:
    with simulated_machine():
        outcomes = [run_schedule(seed) for seed in range(50)]
    assert sum(outcome.answers for outcome in outcomes) > 500
    assert sum(outcome.events for outcome in outcomes) > 500
    assert sum(outcome.starts for outcome in outcomes) > 75


def test_a_seed_repeats_exactly_also_in_another_process() -> None:
    seeds = range(300, 310)
    with simulated_machine():
        traces = [[run_schedule(seed).trace for seed in seeds] for _ in range(2)]
    assert traces[0] == traces[1]
    assert len(set(traces[0])) == len(seeds)
    assert _traces_elsewhere(list(seeds)) == traces[0]


def _traces_elsewhere(seeds: list[int]) -> list[str]:
    """Return the traces of another process with another hash seed."""
    code = (
        "import sys\n"
        "from tests.support.campaign.campaign import run_schedule\n"
        "from tests.support.campaign.machine import simulated_machine\n"
        "with simulated_machine():\n"
        "    for seed in sys.argv[1:]:\n"
        "        print(run_schedule(int(seed)).trace)\n"
    )
    command = [sys.executable, "-c", code, *map(str, seeds)]
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def test_every_planted_bug_is_found() -> None:
    missed = []
    with simulated_machine():
        for name in BUGS:
            seeds = chain([KNOWN_SEEDS.get(name, 0)], range(1, BUG_SCHEDULES_MAX))
            found = find_bug(name, seeds)
            where = "not found" if found is None else f"{found.schedules:5}  {found.check}"
            print(f"{name:34} {where}")
            if found is None:
                missed.append(name)
    assert missed == []
    assert len(BUGS) >= 25


def test_a_failure_states_its_seed_and_its_check() -> None:
    with simulated_machine(), planted("answers_not_kept"), pytest.raises(ScheduleFailed) as failure:
        run_schedule(0)
    assert failure.value.check
    assert str(failure.value).startswith(f"SEED=0 STEPS={STEPS}: {failure.value.check}")
