"""A load that fails at any point changes nothing, and running sequences do not notice it.

The points are those that a load without failures passes: each call of the operating system, and
each function of reading, packing and writing a slot with each of its callers.
"""

import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import loradock.engine
from loradock.engine.jobs import InlineJobs
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages.ids import GPU_SLOT
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.injected_faults import Faults, Point, fail_everywhere

pytest_plugins = ("tests.support.engine.engine_fixtures",)

ENGINE = Path(loradock.engine.__file__).parent
FILES = tuple(
    ENGINE / name for name in ("adapters", "residency", "kernels/directory.py", "memory.py")
)
WITHIN = ("InlineJobs.start", "Arena.begin_write", "ThreadCopy.wait", "Arena._publish")
"""What a load consists of: jobs, an extent that is reserved, a copy, a row of the directory."""

RUNNING, LOADED = 1, 2


class LoadBench:
    """An engine with a sequence that always runs, and an adapter that is loaded meanwhile."""

    def __init__(self, bench: EngineBench) -> None:
        self._bench = bench
        bench.promote(RUNNING, "mlp", GPU_SLOT)
        self._source = {
            "adapter": "patterns",
            "path": "patterns",
            "fingerprint": bench.fingerprint("patterns"),
        }
        # The thread of the test reads the files, and records what it calls.
        bench.engine.residency._jobs = InlineJobs()
        self._generation = 0
        self.outputs: list[list[int]] = []
        self._op = bench.generate(RUNNING, 0, 1)

    def run(self, kind: type) -> rp.Report:
        """Execute one operation of the load, without a step."""
        fields: dict[str, Any] = {"adapter_id": LOADED}
        match kind:
            case cm.CheckAdapter:
                fields |= {name: self._source[name] for name in ("adapter", "path")}
            case cm.LoadWeights:
                fields |= self._source
            case cm.WriteSlot:
                self._generation += 1
                fields |= {"slot": 1, "generation": self._generation}
            case cm.ResetSlot:
                fields = {"slot": 1, "generation": self._generation}
        op = self._bench.submit(kind, **fields)
        self._bench.engine.residency.collect(wait=True)
        self._bench.poll()
        return self._bench.reports_of(op)[0]

    def state(self) -> tuple[object, ...]:
        """Everything that a failed operation must not change."""
        arena = self._bench.engine.residency.arena
        arena.check()
        adapters = self._bench.adapters()
        return adapters, arena.free_bytes, len(os.listdir("/proc/self/fd"))

    def step(self) -> None:
        """Run a step of the sequence, and start it again if it has ended."""
        self._bench.engine.step()
        self._bench.poll()
        if self._bench.reports_of(self._op):
            self.outputs.append(self._bench.tokens(self._op))
            self._op = self._bench.generate(RUNNING, 0, 1)


UNDONE_BY: dict[type, tuple[type, ...]] = {
    cm.LoadWeights: (cm.DropWeights,),
    cm.StageWeights: (cm.DropWeights, cm.LoadWeights),
    cm.WriteSlot: (cm.ResetSlot,),
    cm.CheckAdapter: (),
}
"""The operations of a load, and what leads back to the state before each."""


@pytest.mark.parametrize(
    ("injected", "points_min"),
    [(Faults.of_system_calls, 25), (lambda faults: faults.of_functions(FILES, WITHIN), 150)],
    ids=["system calls", "functions"],
)
def test_a_load_that_fails_at_any_point_changes_nothing(
    make_engine: Callable[..., EngineBench],
    no_eos: None,
    injected: Callable[[Faults], AbstractContextManager[None]],
    points_min: int,
) -> None:
    bench = LoadBench(make_engine())
    known: set[Point] = set()
    for kind, undone_by in UNDONE_BY.items():
        before = bench.state()
        for report, point in fail_everywhere(partial(bench.run, kind), injected, known):
            bench.step()
            if not isinstance(report, rp.OperationFailed):
                for undoing in undone_by:
                    assert not isinstance(bench.run(undoing), rp.OperationFailed)
            assert bench.state() == before, point
        assert not isinstance(bench.run(kind), rp.OperationFailed)
    assert len(known) >= points_min
    assert len(bench.outputs) > 1
    assert all(output == bench.outputs[0] for output in bench.outputs)
