"""The judgement about hanging processes, with a clock that the test sets."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterable

import pytest

from loradock.cli.serve.children import HangWatch, is_stopped, process_tree
from loradock.processes.progress import START_BOUND_S, Step
from tests.support.waiting import wait_until

MS = 1_000_000
TIMEOUTS_MS = (100, 350, 2_000, 60_000)


def step(number: int, bound_ms: int = 1_000) -> Step:
    return Step(number, 1, 0, bound_ms * MS, "work")


class Bench:
    """A watch, and a clock that starts anywhere."""

    def __init__(self, hang_timeout_ms: int = 2_000) -> None:
        self.watch = HangWatch(hang_timeout_ms)
        self.now_ns = 10**15
        self.watch.restart(self.now_ns)

    def tick(self, current: Step | None, stopped: bool = False, ticks: float = 1) -> str:
        self.now_ns += round(ticks * self.watch.tick_ms * MS)
        return self.watch.observe(self.now_ns, current, is_stopped=stopped)

    def first_reason(self, current: Step | None, **observed: object) -> tuple[str, int]:
        """Return the reason and the milliseconds until a process in one step hangs."""
        start_ns = self.now_ns
        while not (reason := self.tick(current, **observed)):
            assert self.now_ns - start_ns < 10**13, "it never hangs"
        return reason, (self.now_ns - start_ns) // MS


@pytest.mark.parametrize("timeout_ms", TIMEOUTS_MS)
def test_a_stopped_process_hangs_within_the_timeout(timeout_ms: int) -> None:
    bench = Bench(timeout_ms)
    for number in range(1, 20):
        assert not bench.tick(step(number))
    reason, took_ms = bench.first_reason(step(19, 10**6), stopped=True)
    # At the latest it was stopped just after the last tick before.
    assert timeout_ms / 2 <= took_ms <= timeout_ms
    assert reason == "it is stopped"


def test_a_process_that_continues_in_time_does_not_hang() -> None:
    bench = Bench()
    for _ in range(50):
        assert not any(bench.tick(step(1, 10**6), stopped=True) for _ in range(4))
        assert not bench.tick(step(1, 10**6))


def test_a_step_hangs_after_its_own_bound_and_not_before() -> None:
    for bound_ms in (0, 500, 1_000, 100_000):
        bench = Bench()
        assert not bench.tick(step(1))
        bench.tick(step(2, bound_ms))
        reason, took_ms = bench.first_reason(step(2, bound_ms))
        assert bound_ms < took_ms <= bound_ms + 2 * bench.watch.tick_ms
        assert reason == f"step work exceeds {bound_ms / 1000:g} s"


def test_many_short_steps_do_not_add_up() -> None:
    bench = Bench()
    for number in range(1, 1_000):
        for _ in range(4):
            assert not bench.tick(step(number, 1_000))


def test_the_start_has_a_bound_until_the_first_step() -> None:
    bench = Bench()
    reason, took_ms = bench.first_reason(None)
    assert START_BOUND_S * 1_000 < took_ms <= START_BOUND_S * 1_000 + 2 * bench.watch.tick_ms
    assert reason == f"step start exceeds {START_BOUND_S} s"
    bench.watch.restart(bench.now_ns)
    assert not bench.tick(None)


def test_a_page_that_can_not_be_read_for_a_moment_does_not_extend_a_step() -> None:
    bench = Bench()
    bench.tick(step(1))
    reasons: Iterable[str] = (bench.tick(current) for current in [step(1), None] * 5)
    assert any(reasons)


@pytest.mark.parametrize("stopped", [False, True])
def test_after_a_pause_of_everything_nothing_hangs(stopped: bool) -> None:
    """Whether clocks continue while a machine is suspended or a container is frozen."""
    for pause in (10, 1e3, 1e9):
        bench = Bench()
        bench.tick(step(1, 1_000))
        assert not bench.tick(step(1, 1_000), stopped=stopped, ticks=pause)
        assert not bench.tick(step(1, 1_000))
        assert not bench.tick(step(2, 1_000))


def test_a_supervisor_that_is_starved_judges_later_but_judges() -> None:
    bench = Bench()
    bench.tick(step(1))
    assert bench.first_reason(step(1), ticks=50)[0]
    bench.watch.restart(bench.now_ns)
    assert bench.first_reason(step(2, 10**6), stopped=True, ticks=50)[0] == "it is stopped"


def test_a_stopped_process_is_one_that_a_signal_stopped() -> None:
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as process:
        assert not is_stopped(process.pid)
        os.kill(process.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(process.pid))
        os.kill(process.pid, signal.SIGCONT)
        wait_until(lambda: not is_stopped(process.pid))
        process.kill()
        process.wait()
        assert not is_stopped(process.pid)


def test_the_tree_of_a_process_contains_its_descendants() -> None:
    code = (
        "import subprocess; inner = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        "print(inner.pid, flush=True); inner.wait()"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE) as process:
        inner = int(process.stdout.readline())
        assert process_tree(process.pid) == [process.pid, inner]
        os.kill(inner, signal.SIGKILL)
        process.wait()
        assert process_tree(process.pid) == [process.pid]
