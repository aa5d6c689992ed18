"""Core and engine together: more adapters than slots take turns, and every output is its own."""

from collections.abc import Callable
from typing import Any

import pytest
from msgspec import structs

from loradock.controller.core.controller import Controller
from loradock.messages import records, requests
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.served_bench import LIMITS, ServedBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

NAMES = ("attention", "mlp", "output", "patterns", "everything")
TOKENS = 30
STEP_NS = 1_000_000


class TurnsBench(ServedBench):
    """A step takes as long as a turn; the controller can be killed."""

    def __init__(self, bench: EngineBench) -> None:
        self._inputs: list[tuple[Any, int]] = []
        super().__init__(bench, structs.replace(LIMITS, max_loras=2, turn_tokens=4))

    def handle(self, message: Any) -> None:
        self._inputs.append((message, self._now_ns + 1000))
        super().handle(message)

    def step(self) -> None:
        super().step()
        self._now_ns += STEP_NS
        if 0 < self.world.timer_ns <= self._now_ns:
            self.handle(records.TimerFired())

    def kill_controller(self) -> None:
        """Replace the controller by one that has its log."""
        before, self.core = self.core, Controller(self.core.limits, checked=True)
        for message, time_ns in self._inputs:
            self.core.handle(message, time_ns)
        assert self.core.digest() == before.digest()
        self.handle(records.ControllerStarted(2))
        self.handle(self.engine.inventory())

    def suspended(self) -> list[int]:
        """Return the operations that the engine has suspended."""
        return list(self.engine.inventory().suspended)

    def wait_until_suspended(self, request_id: str) -> None:
        while self.world.pending_requests[request_id].op not in self.suspended():
            self.step()


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench], no_eos: None) -> TurnsBench:
    bench = TurnsBench(make_engine())
    for name in NAMES:
        bench.request(requests.LoadAdapter, name)
    return bench


def test_outputs_of_adapters_in_turns_are_their_own(bench: TurnsBench) -> None:
    """The controller is killed, and an adapter is replaced and one removed, while suspended."""
    expected = {name: bench.alone(name, TOKENS) for name in (*NAMES, None)}
    running = [(name, bench.generate(name, TOKENS)) for name in (*NAMES, None, *NAMES)]
    bench.wait_until_suspended(running[1][1])
    bench.kill_controller()
    bench.wait_until_suspended(running[0][1])
    replaced = bench.send(requests.LoadAdapter, "attention", "mlp", True)
    bench.wait_until_suspended(running[2][1])
    removed = bench.send(requests.RemoveAdapter, "output", True)
    bench.wait(replaced, removed, *(request_id for _, request_id in running))
    for name, request_id in running:
        reply = bench.replies[request_id]
        if isinstance(reply, requests.Refused):
            # It waited for the adapter that was removed.
            assert name == "output"
        else:
            assert bench.tokens[request_id] == expected[name]
    assert bench.alone("attention", TOKENS) == expected["mlp"]
    assert bench.world.totals.deactivations > 2 * len(NAMES)
    assert bench.suspended() == []
    assert bench.engine.statistics().kv_bytes == 0
