"""The core through random histories: clients, reports, loss, restarts, in any order.

The same machine runs longer with LORADOCK_SIM_EXAMPLES and LORADOCK_SIM_STEPS set (`make sim`);
hypothesis prints the smallest failing history and the seed that repeats it.
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

from messages import records, requests
from messages.errors import ErrorCode
from tests.support.simulation.clients import (
    CODES,
    NAMES,
    PATHS,
    PAUSES,
    TIMEOUTS,
    Clients,
    Sizes,
    small_limits,
)
from tests.support.simulation.clients import random_history as made_by_a_seed

EXAMPLES = int(os.environ.get("LORADOCK_SIM_EXAMPLES", "400"))
STEPS = int(os.environ.get("LORADOCK_SIM_STEPS", "60"))

names = st.sampled_from(NAMES)
sizes = st.integers(1, 6).map(lambda tens: 10 * tens)
budgets = st.integers(6, 24).map(lambda tens: 10 * tens)
tight_budgets = st.integers(6, 14).map(lambda tens: 10 * tens)
timeouts = st.sampled_from(TIMEOUTS)
numbers = st.integers(0, 100)


class Histories(RuleBasedStateMachine):
    """One history; every oracle of `simulated_world` holds after every input of it."""

    clients: Clients

    @initialize(
        slots=st.integers(1, 3),
        more_on_host=st.integers(0, 3),
        bytes_max=st.tuples(budgets, tight_budgets, budgets),
        taken=st.lists(st.tuples(sizes, sizes), min_size=len(PATHS), max_size=len(PATHS)),
    )
    def begin(
        self, slots: int, more_on_host: int, bytes_max: tuple[int, int, int], taken: Sizes
    ) -> None:
        self.clients = Clients(small_limits(slots, more_on_host, bytes_max), taken)

    @rule(name=names, path=st.sampled_from(("", "", *PATHS)), replace=st.booleans(), ms=timeouts)
    def load(self, name: str, path: str, replace: bool, ms: int) -> None:
        self.clients.ask(requests.LoadAdapter, name, path, replace, ms)

    @rule(name=names, ms=timeouts)
    def stage(self, name: str, ms: int) -> None:
        self.clients.ask(requests.StageAdapter, name, "", ms)

    @rule(name=names, ms=timeouts)
    def activate(self, name: str, ms: int) -> None:
        self.clients.ask(requests.ActivateAdapter, name, "", ms)

    @rule(name=names, path=st.sampled_from(("", "", "missing")), ms=timeouts)
    def hold(self, name: str, path: str, ms: int) -> None:
        self.clients.ask(requests.HoldAdapter, name, path, ms)

    @rule(name=names)
    def release(self, name: str) -> None:
        self.clients.ask(requests.ReleaseAdapter, name)

    @rule(name=names, ms=timeouts)
    def deactivate(self, name: str, ms: int) -> None:
        self.clients.ask(requests.DeactivateAdapter, name, ms)

    @rule(name=names, ms=timeouts)
    def evict(self, name: str, ms: int) -> None:
        self.clients.ask(requests.EvictAdapter, name, ms)

    @rule(name=names, force=st.booleans(), ms=timeouts)
    def remove(self, name: str, force: bool, ms: int) -> None:
        self.clients.ask(requests.RemoveAdapter, name, force, ms)

    @rule(batch=st.lists(names, min_size=1, max_size=4), ms=timeouts)
    def batch(self, batch: list[str], ms: int) -> None:
        self.clients.ask(requests.ActivateBatch, tuple(batch), ms)

    @rule(name=st.sampled_from((*NAMES, None)), ms=timeouts)
    def generate(self, name: str | None, ms: int) -> None:
        self.clients.ask(records.GenerationRequested, name, ms)

    @rule(
        name=st.sampled_from((*NAMES, None)),
        task=st.sampled_from(("embed", "classify")),
        ms=timeouts,
    )
    def pool(self, name: str | None, task: str, ms: int) -> None:
        self.clients.ask(records.PoolingRequested, name, task, ms)

    @rule(number=numbers)
    def cancel(self, number: int) -> None:
        self.clients.cancel(number)

    @rule(number=numbers)
    def ask_again(self, number: int) -> None:
        self.clients.ask_again(number)

    @rule(number=numbers)
    def report_again(self, number: int) -> None:
        self.clients.report_again(number)

    @rule(count=st.integers(1, 6))
    def transmit(self, count: int) -> None:
        self.clients.sim.transmit(count)

    @rule(number=st.integers(0, 5), count=st.integers(1, 4))
    def complete(self, number: int, count: int) -> None:
        self.clients.complete(number, count)

    @rule(number=st.integers(0, 5), code=st.sampled_from(CODES))
    def fail(self, number: int, code: ErrorCode) -> None:
        self.clients.sim.complete(number, code)

    @rule(count=st.integers(1, 6))
    def deliver(self, count: int) -> None:
        self.clients.sim.deliver(count)

    @rule(rounds=st.integers(1, 8))
    def go_on(self, rounds: int) -> None:
        self.clients.go_on(rounds)

    @rule()
    def acknowledge(self) -> None:
        self.clients.sim.unacknowledged.clear()

    @rule(ms=st.sampled_from(PAUSES))
    def wait(self, ms: int) -> None:
        self.clients.sim.advance(ms)

    @rule(path=names)
    def change_file(self, path: str) -> None:
        self.clients.change_file(path)

    @rule(silently=st.booleans())
    def lose_engine(self, silently: bool) -> None:
        self.clients.lose_engine(silently)

    @rule()
    def start_engine(self) -> None:
        self.clients.start_engine()

    @rule(
        ids=st.lists(st.integers(1, 8), min_size=1, max_size=2, unique=True),
        path=names,
        is_running=st.booleans(),
    )
    def start_foreign_engine(self, ids: list[int], path: str, is_running: bool) -> None:
        self.clients.start_foreign_engine(ids, path, is_running)

    @rule(lost=st.integers(0, 3))
    def cut_link(self, lost: int) -> None:
        self.clients.sim.cut_link(lost)

    @rule(lost=st.sampled_from((0, 0, 0, 1, 4, 12)))
    def restart_controller(self, lost: int) -> None:
        self.clients.sim.restart_controller(lost)

    def teardown(self) -> None:
        if hasattr(self, "clients"):
            self.clients.sim.run_dry()
            self.clients.sim.restart_controller()


def test_histories() -> None:
    run_state_machine_as_test(
        Histories,
        settings=settings(
            max_examples=EXAMPLES,
            stateful_step_count=STEPS,
            deadline=None,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
            report_multiple_bugs=False,
        ),
    )


FOLD = """
import sys
from tests.support.simulation.clients import random_history
sim = random_history(int(sys.argv[1]), 300).sim
print(len(sim.inputs), sim.controller.digest())
"""


def test_the_digest_is_the_same_in_other_processes() -> None:
    """Nothing depends on the order in which a process hashes strings."""
    tests = Path(__file__).parents[2]
    sim = made_by_a_seed(7, 300).sim
    for hash_seed in ("1", "2"):
        found = subprocess.run(
            [sys.executable, "-c", FOLD, "7"],
            env={"PYTHONHASHSEED": hash_seed, "PYTHONPATH": f"{tests.parent}:{tests}"},
            capture_output=True,
            text=True,
            check=True,
        )
        assert found.stdout.split() == [str(len(sim.inputs)), sim.controller.digest()]
