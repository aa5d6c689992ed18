"""Operations that the engine never reports: the engine is lost after the second deadline."""

from typing import Any

import pytest

from loradock.controller.core.actions import RestartEngine
from loradock.messages import commands, events, records, requests
from loradock.messages.errors import ErrorCode
from tests.support.simulation.core_bench import CoreBench

TIMEOUT_MS = 100


class OverdueBench(CoreBench):
    """A bench whose engine does not end the operations of `never`, and a list of restarts."""

    def __init__(self, never: type, **limits: int) -> None:
        self.restarts: list[RestartEngine] = []
        self.never: type | None = None
        super().__init__(operation_timeout_ms=TIMEOUT_MS, **limits)
        self.never = never

    def _perform(self, action: Any, replaying: bool) -> None:
        if isinstance(action, RestartEngine) and not replaying:
            self.restarts.append(action)
            # What the supervisor does.
            self.engine = None
            self.synced = False
            self.channel.clear()
            self.unacknowledged.clear()
        super()._perform(action, replaying)

    def settle(self, rounds: int = 20) -> None:
        for _ in range(rounds):
            self.transmit(len(self.channel))
            if self.engine is not None:
                for op in self.engine.completable():
                    if not isinstance(self.engine.running[op].command, self.never or ()):
                        self.engine.complete(op)
            self.deliver(100)


OF_ADAPTERS = {
    commands.CheckAdapter: requests.LoadAdapter,
    commands.LoadWeights: requests.LoadAdapter,
    commands.StageWeights: requests.StageAdapter,
    commands.WriteSlot: requests.ActivateAdapter,
}


@pytest.mark.parametrize("never", OF_ADAPTERS)
def test_an_operation_that_is_never_reported_costs_the_engine_and_no_room(never: type) -> None:
    bench = OverdueBench(never)
    published = bench.record_events()
    waiting = bench.send(OF_ADAPTERS[never], "a")
    bench.settle()
    (op,) = bench.world.operations
    inventories = bench.inventory_requests
    bench.advance(TIMEOUT_MS + 1)
    assert bench.reply(waiting).code is ErrorCode.ENGINE_GONE
    assert events.OperationOverdue(op, never.__name__, "a") in published
    assert bench.inventory_requests == inventories + 1
    bench.settle()
    assert list(bench.world.operations) == [op]
    assert bench.restarts == []
    bench.advance(TIMEOUT_MS + 1)
    (restart,) = bench.restarts
    assert (restart.engine_id, restart.pid) == ("engine-1", 1)
    for part in (f"operation {op}", never.__name__, "'a'", f"twice {TIMEOUT_MS} ms"):
        assert part in restart.reason
    assert bench.world.engine is None
    assert not bench.world.operations
    assert all((t.count, t.size_bytes) == (0, 0) for t in bench.world.tiers.values())
    bench.never = None
    bench.start_engine()
    assert bench.request(requests.ActivateAdapter, "a").state == "gpu-slot"


def test_an_adapter_whose_slot_is_never_reset_can_be_removed_in_the_end() -> None:
    bench = OverdueBench(commands.ResetSlot)
    bench.activate("a")
    removal = bench.send(requests.RemoveAdapter, "a", force=True)
    bench.settle()
    bench.advance(TIMEOUT_MS + 1)
    assert bench.reply(removal).code is ErrorCode.ENGINE_GONE
    assert bench.state("a") == "gpu-slot"
    bench.advance(TIMEOUT_MS + 1)
    assert bench.state("a") == "evicted"
    removal = bench.send(requests.RemoveAdapter, "a", force=True)
    assert bench.reply(removal).state == "unregistered"


def test_an_operation_that_the_inventory_shows_as_ended_is_done_again() -> None:
    bench = OverdueBench(commands.StageWeights)
    bench.request(requests.StageAdapter, "a")
    assert bench.engine is not None
    (op,) = bench.world.operations
    # The engine has ended it and its report was lost for good.
    bench.engine.complete(op)
    bench.engine.outbox.clear()
    bench.advance(TIMEOUT_MS + 1)
    bench.settle()
    assert op not in bench.world.operations
    assert bench.state("a") == "pinned"
    bench.advance(TIMEOUT_MS + 1)
    assert bench.restarts == []


@pytest.mark.parametrize("never", [commands.StartGeneration, commands.StartPooling])
def test_an_inference_that_does_not_end_when_it_is_stopped_is_overdue(never: type) -> None:
    bench = OverdueBench(never)
    bench.activate("a")
    request = bench.send(
        *(
            (records.GenerationRequested, "a", 30)
            if never is commands.StartGeneration
            else (records.PoolingRequested, "a", "embed", 30)
        )
    )
    bench.settle()
    # As long as its own deadline has not passed, it may take any time.
    assert not bench.world.operations[bench.world.pending_requests[request].op].deadline_ns
    bench.advance(31)
    bench.settle()
    assert bench.adapter("a").leases == 1
    bench.advance(TIMEOUT_MS + 1)
    bench.settle()
    assert bench.restarts == []
    bench.advance(TIMEOUT_MS + 1)
    assert len(bench.restarts) == 1
    assert bench.adapter("a").leases == 0
    assert not bench.world.pending_requests


def test_a_cancelled_generation_that_does_not_end_is_overdue() -> None:
    bench = OverdueBench(commands.StartGeneration)
    bench.activate("a")
    running = bench.send(records.GenerationRequested, "a")
    bench.settle()
    for _ in range(2):
        # A second cancellation does not extend the time.
        bench.send(requests.CancelGeneration, running)
        bench.advance(TIMEOUT_MS // 2 + 1)
    bench.settle()
    bench.advance(TIMEOUT_MS + 1)
    assert len(bench.restarts) == 1
    assert bench.reply(running).code is ErrorCode.ENGINE_GONE


def running_unknown_operation() -> OverdueBench:
    """Return a bench whose engine runs a generation that the log has lost."""
    bench = OverdueBench(commands.StartGeneration)
    bench.activate("a")
    inputs = len(bench.inputs)
    bench.generate("a")
    bench.restart_controller(lost_inputs=len(bench.inputs) - inputs)
    bench.settle()
    assert bench.world.unknown_operations
    assert not bench.world.engine_ready
    return bench


def test_an_unknown_operation_that_does_not_end_when_it_is_stopped_costs_the_engine() -> None:
    bench = running_unknown_operation()
    # Another inventory does not extend the time.
    bench.advance(TIMEOUT_MS // 2)
    bench.cut_link(0)
    bench.settle()
    assert bench.restarts == []
    bench.advance(TIMEOUT_MS // 2 + 1)
    (restart,) = bench.restarts
    assert "is not in the log" in restart.reason
    assert bench.world.engine is None


def test_an_unknown_operation_that_has_ended_is_forgotten() -> None:
    """Its report was dropped, as are those of an engine that the log does not know."""
    bench = running_unknown_operation()
    assert bench.engine is not None
    bench.engine.running.clear()
    bench.cut_link(0)
    bench.settle()
    bench.advance(2 * TIMEOUT_MS)
    assert (bench.restarts, bench.world.unknown_operations) == ([], {})
    assert bench.world.engine_ready
