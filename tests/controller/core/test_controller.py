"""Random histories of the core: requests, reports, losses and restarts in any order.

`make histories` runs the same machine longer, with LORADOCK_SIM_EXAMPLES and LORADOCK_SIM_STEPS.
Hypothesis prints the smallest failing history and the seed that repeats it.
"""

import os
import subprocess
import sys
from pathlib import Path

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    rule,
    run_state_machine_as_test,
)

from loradock.messages import records, requests
from loradock.messages.errors import ErrorCode
from tests.support.simulation.deployment import TESTED_POLICIES
from tests.support.simulation.workload import (
    CODES,
    NAMES,
    PATHS,
    PAUSES,
    TARGETS,
    TIMEOUTS,
    Sizes,
    Workload,
    random_history,
    small_limits,
)

EXAMPLES = int(os.environ.get("LORADOCK_SIM_EXAMPLES", "100"))
STEPS = int(os.environ.get("LORADOCK_SIM_STEPS", "60"))

names = st.sampled_from(NAMES)
sizes = st.integers(1, 6).map(lambda tens: 10 * tens)
budgets = st.integers(6, 24).map(lambda tens: 10 * tens)
tight_budgets = st.integers(6, 14).map(lambda tens: 10 * tens)
timeouts = st.sampled_from(TIMEOUTS)
numbers = st.integers(0, 100)


class Histories(RuleBasedStateMachine):
    """One history; every oracle of `Deployment` is checked after each of its inputs."""

    workload: Workload

    @initialize(
        slots=st.integers(1, 3),
        more_on_host=st.integers(0, 3),
        bytes_max=st.tuples(budgets, tight_budgets, budgets),
        turn_tokens=st.sampled_from((0, 8)),
        contents=st.lists(st.tuples(sizes, sizes), min_size=len(PATHS), max_size=len(PATHS)),
        # Under `none`, requests wait for ever.
        policy=st.sampled_from(sorted({*TESTED_POLICIES} - {"none"})),
    )
    def begin(
        self,
        slots: int,
        more_on_host: int,
        bytes_max: tuple[int, int, int],
        turn_tokens: int,
        contents: Sizes,
        policy: str,
    ) -> None:
        limits = small_limits(slots, more_on_host, bytes_max, turn_tokens)
        self.workload = Workload(limits, contents, policy)

    @rule(name=names, path=st.sampled_from(("", "", *PATHS)), replace=st.booleans(), ms=timeouts)
    def load(self, name: str, path: str, replace: bool, ms: int) -> None:
        self.workload.send(requests.LoadAdapter, name, path, replace, ms)

    @rule(name=names, ms=timeouts)
    def stage(self, name: str, ms: int) -> None:
        self.workload.send(requests.StageAdapter, name, "", ms)

    @rule(name=names, ms=timeouts)
    def activate(self, name: str, ms: int) -> None:
        self.workload.send(requests.ActivateAdapter, name, "", ms)

    @rule(name=names, path=st.sampled_from(("", "", "missing")), ms=timeouts)
    def hold(self, name: str, path: str, ms: int) -> None:
        self.workload.send(requests.HoldAdapter, name, path, ms)

    @rule(name=names, path=st.sampled_from(("", "", "missing")), goal=st.sampled_from(TARGETS))
    def prefetch(self, name: str, path: str, goal: str) -> None:
        self.workload.send(requests.PrefetchAdapter, name, path, goal)

    @rule(name=names)
    def release(self, name: str) -> None:
        self.workload.send(requests.ReleaseAdapter, name)

    @rule(name=names, ms=timeouts)
    def deactivate(self, name: str, ms: int) -> None:
        self.workload.send(requests.DeactivateAdapter, name, ms)

    @rule(name=names, ms=timeouts)
    def evict(self, name: str, ms: int) -> None:
        self.workload.send(requests.EvictAdapter, name, ms)

    @rule(name=names, force=st.booleans(), ms=timeouts)
    def remove(self, name: str, force: bool, ms: int) -> None:
        self.workload.send(requests.RemoveAdapter, name, force, ms)

    @rule(batch=st.lists(names, min_size=1, max_size=4), ms=timeouts)
    def batch(self, batch: list[str], ms: int) -> None:
        self.workload.send(requests.ActivateBatch, tuple(batch), ms)

    @rule(name=st.sampled_from((*NAMES, None)), ms=timeouts)
    def generate(self, name: str | None, ms: int) -> None:
        self.workload.send(records.GenerationRequested, name, ms)

    @rule(
        name=st.sampled_from((*NAMES, None)),
        task=st.sampled_from(("embed", "classify")),
        ms=timeouts,
    )
    def pool(self, name: str | None, task: str, ms: int) -> None:
        self.workload.send(records.PoolingRequested, name, task, ms)

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        self.workload.cancel(number)

    @rule(number=numbers)
    def send_again(self, number: int) -> None:
        self.workload.send_again(number)

    @rule(number=numbers)
    def repeat_report(self, number: int) -> None:
        self.workload.repeat_report(number)

    @rule(count=st.integers(1, 6))
    def transmit(self, count: int) -> None:
        self.workload.deployment.transmit(count)

    @rule(number=st.integers(0, 5), count=st.integers(1, 4))
    def complete(self, number: int, count: int) -> None:
        self.workload.complete(number, count)

    @rule(number=st.integers(0, 5), code=st.sampled_from(CODES))
    def fail(self, number: int, code: ErrorCode) -> None:
        self.workload.deployment.complete(number, code)

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        self.workload.deployment.deliver(count)

    @rule(rounds=st.integers(1, 8))
    def advance_all(self, rounds: int) -> None:
        self.workload.advance_all(rounds)

    @rule(rounds=st.integers(1, 8))
    def take_turns(self, rounds: int) -> None:
        self.workload.take_turns(rounds)

    @rule()
    def acknowledge(self) -> None:
        self.workload.deployment.unacknowledged.clear()

    @rule(ms=st.sampled_from(PAUSES))
    def wait(self, ms: int) -> None:
        self.workload.deployment.advance(ms)

    @rule(path=names)
    def change_file(self, path: str) -> None:
        self.workload.change_file(path)

    @rule(silently=st.booleans())
    def lose_engine(self, silently: bool) -> None:
        self.workload.lose_engine(silently)

    @rule()
    def start_engine(self) -> None:
        self.workload.start_engine()

    @rule(
        ids=st.lists(st.integers(1, 8), min_size=1, max_size=2, unique=True),
        path=names,
        is_running=st.booleans(),
    )
    def start_foreign_engine(self, ids: list[int], path: str, is_running: bool) -> None:
        self.workload.start_foreign_engine(ids, path, is_running)

    @rule(lost=st.integers(0, 3))
    def cut_link(self, lost: int) -> None:
        self.workload.deployment.cut_link(lost)

    @rule(lost=st.sampled_from((0, 0, 0, 1, 4, 12)))
    def restart_controller(self, lost: int) -> None:
        self.workload.deployment.restart_controller(lost)

    def teardown(self) -> None:
        if hasattr(self, "workload"):
            self.workload.deployment.run_dry()
            self.workload.deployment.restart_controller()


def test_histories() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            suppress_health_check=list(HealthCheck),
            report_multiple_bugs=False,
        ),
    )


REPLAY = """
import sys
from tests.support.simulation.workload import random_history
deployment = random_history(int(sys.argv[1]), 300).deployment
print(len(deployment.inputs), deployment.controller.digest())
"""


def test_the_digest_is_the_same_in_other_processes() -> None:
    """Nothing depends on the order in which a process hashes strings."""
    tests = Path(__file__).parents[2]
    deployment = random_history(7, 300).deployment
    for hash_seed in ("1", "2"):
        process = subprocess.run(
            [sys.executable, "-c", REPLAY, "7"],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{tests.parent}:{tests}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert process.stdout.split() == [
            str(len(deployment.inputs)),
            deployment.controller.digest(),
        ]
