"""The core with its engine in the same thread: answers at once, and time passes only if needed."""

from collections.abc import Iterable

import pytest
from msgspec import structs

from loradock.controller.core import deadlines
from loradock.controller.core.context import Refusal
from loradock.controller.core.in_process import InProcessController
from loradock.controller.core.limits import Limits
from loradock.messages import commands, events, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import EVICTED, GPU_SLOT, PINNED

SUCCESS = {
    commands.LoadWeights: reports.WeightsLoaded,
    commands.StageWeights: reports.WeightsStaged,
    commands.UnstageWeights: reports.WeightsUnstaged,
    commands.WriteSlot: reports.SlotWritten,
    commands.ResetSlot: reports.SlotReset,
    commands.DropWeights: reports.WeightsDropped,
}


class InProcessBench:
    """A core with adapters of ten bytes; each command type in `failing` fails once."""

    def __init__(self, slots: int, capacity: int, policy: str, **limits: int) -> None:
        self.done: list[commands.Command] = []
        self.events: list[events.Event] = []
        self.failing: list[type] = []
        self.slots = slots
        bounds = Limits(max_loras=slots, max_cpu_loras=capacity, answers_max=1, **limits)
        self.core = InProcessController(
            bounds, policy, self.execute, self.events.append, checked=True
        )
        self.core.attach(self.inventory())

    def inventory(self) -> reports.EngineInventory:
        held = [a for a in self.core.world.adapters.values() if a.state in (PINNED, GPU_SLOT)]
        rows = [
            reports.InventoryAdapter(
                a.id, a.name, a.path, a.fingerprint, 1, a.state, a.slot, a.generation, 10, 10
            )
            for a in held
        ]
        return reports.EngineInventory("e", 0, "", self.slots, 1 << 30, adapters=tuple(rows))

    def execute(self, command: commands.Command) -> Iterable[reports.LoggedReport]:
        self.done.append(command)
        if isinstance(command, commands.RequestInventory):
            return [self.inventory()]
        if type(command) in self.failing:
            self.failing.remove(type(command))
            return [
                reports.OperationFailed(command.op, ErrorCode.NOT_FOUND, "as ordered by the test")
            ]
        if isinstance(command, commands.CheckAdapter):
            return [reports.AdapterChecked(command.op, command.adapter, 1, 10, 10)]
        return [SUCCESS[type(command)](command.op)]

    def activate(self, *names: str) -> None:
        for name in names:
            self.core.request(requests.ActivateAdapter, name)

    def refused(self, kind: type, *fields: object) -> Refusal:
        with pytest.raises(Refusal) as caught:
            self.core.request(kind, *fields)
        return caught.value

    def states(self) -> dict[str, str]:
        return {a.name: a.state for a in self.core.world.adapters.values()}


def test_a_request_returns_after_everything_that_follows_from_it() -> None:
    bench = InProcessBench(1, 2, "lru")
    bench.activate("a", "b")
    assert bench.states() == {"a": PINNED, "b": GPU_SLOT}
    assert not bench.core.world.operations
    assert not bench.core.world.pending_requests
    kinds = [type(command) for command in bench.done]
    assert kinds[:4] == [
        commands.CheckAdapter,
        commands.LoadWeights,
        commands.StageWeights,
        commands.WriteSlot,
    ]
    assert [type(event) for event in bench.events].count(events.AdapterActivated) == 2


def test_a_request_is_refused_at_once_where_no_adapter_may_leave() -> None:
    bench = InProcessBench(1, 2, "none")
    bench.activate("a")
    refusal = bench.refused(requests.ActivateAdapter, "b")
    assert refusal.code is ErrorCode.NO_ROOM
    for words in ("1 of 1 slots", "1 of 2 adapters are on the host", "0 adapters are held"):
        assert words in refusal.message
    assert "wait" not in refusal.message
    assert bench.states() == {"a": GPU_SLOT}
    bench.core.request(requests.StageAdapter, "b")
    assert bench.refused(requests.LoadAdapter, "c").code is ErrorCode.NO_ROOM
    assert bench.states() == {"a": GPU_SLOT, "b": PINNED}
    bench.core.request(requests.DeactivateAdapter, "a")
    bench.activate("b")
    assert bench.states() == {"a": PINNED, "b": GPU_SLOT}


def test_a_failure_has_the_engines_text_and_may_be_tried_again() -> None:
    bench = InProcessBench(1, 1, "lru")
    bench.failing = [commands.CheckAdapter]
    refusal = bench.refused(requests.LoadAdapter, "a")
    assert (refusal.code, refusal.message) == (ErrorCode.NOT_FOUND, "as ordered by the test")
    assert bench.states() == {}
    bench.activate("a")
    bench.failing = [commands.ResetSlot]
    assert bench.refused(requests.DeactivateAdapter, "a").code is ErrorCode.NOT_FOUND
    assert isinstance(bench.done[-1], commands.RequestInventory)
    assert bench.states() == {"a": GPU_SLOT}
    bench.core.request(requests.DeactivateAdapter, "a")
    assert bench.states() == {"a": PINNED}


def test_time_passes_to_the_end_of_a_backoff() -> None:
    """The request waits for the backoff of a victim that could not be demoted, and no longer."""
    bench = InProcessBench(1, 2, "lru")
    bench.activate("a")
    bench.failing = [commands.ResetSlot]
    before = bench.core.world.time_ns
    bench.activate("b")
    assert bench.states() == {"a": PINNED, "b": GPU_SLOT}
    waited_ms = (bench.core.world.time_ns - before) / 1e6
    assert waited_ms == Limits().retry_backoff_ms


def test_no_command_is_sent_before_a_requested_inventory_is_handled() -> None:
    """The order to another victim follows from the failure of the first, as the request for it."""
    bench = InProcessBench(2, 3, "lru")
    bench.activate("a", "b")
    bench.failing, bench.done = [commands.ResetSlot], []
    bench.activate("c")
    kinds = [type(command) for command in bench.done if not isinstance(command, commands.WriteSlot)]
    assert kinds.count(commands.ResetSlot) == 2
    assert kinds.index(commands.RequestInventory) == kinds.index(commands.ResetSlot) + 1
    assert bench.states() == {"a": GPU_SLOT, "b": PINNED, "c": GPU_SLOT}


def test_the_least_recently_used_is_resident_and_not_held() -> None:
    bench = InProcessBench(2, 4, "none")
    assert bench.core.least_recently_used() is None
    bench.activate("a", "b")
    bench.core.request(requests.LoadAdapter, "c")
    bench.core.request(requests.ActivateAdapter, "a")
    assert bench.core.least_recently_used() == "b"
    bench.core.request(requests.HoldAdapter, "b")
    assert bench.core.least_recently_used() == "c"
    bench.core.request(requests.RemoveAdapter, "c")
    assert bench.core.least_recently_used() == "a"


def test_a_permanent_shortage_is_known_before_any_request() -> None:
    bench = InProcessBench(2, 4, "lru", device_bytes_max=25)
    bench.activate("a")
    bench.core.request(requests.HoldAdapter, "a")
    done = len(bench.done)
    core = bench.core
    assert core.permanent_shortage_of_batch({"a": None, "new": 10}) is None
    assert core.permanent_shortage_of_batch({"new": 15}) is None
    assert "slots" in (core.permanent_shortage_of_batch({"new": 1, "newer": 1}) or "")
    assert "bytes" in (core.permanent_shortage_of_batch({"new": 16}) or "")
    # A new size for a known adapter replaces its size and is not added to it.
    assert core.permanent_shortage_of_batch({"a": 25}) is None
    assert core.permanent_shortage_of_batch({"a": 16, "new": 10}) is not None
    assert len(bench.done) == done


def test_answers_are_not_stored_longer_than_needed() -> None:
    bench = InProcessBench(1, 1, "lru")
    for _ in range(50):
        bench.activate("a")
        bench.activate("b")
    assert bench.states()["a"] == EVICTED
    assert len(bench.core.world.answers) == 1
    assert not bench.core._replies


def test_removed_adapters_leave_nothing() -> None:
    bench = InProcessBench(1, 2, "lru")
    for number in range(50):
        bench.activate(f"adapter-{number}")
        bench.core.request(requests.RemoveAdapter, f"adapter-{number}")
    world = bench.core.world
    assert not world.adapters
    # No digest is computed here, which would forget them.
    assert not world.adapters._changed


def test_an_adapter_is_found_once_it_was_loaded() -> None:
    bench = InProcessBench(2, 2, "lru")
    assert bench.core.find("a") is None
    bench.core.request(requests.LoadAdapter, "a")
    found = bench.core.find("a")
    assert found is not None
    assert found.name == "a"


def test_an_engine_that_does_not_complete_a_command_is_an_error() -> None:
    execute = InProcessBench(2, 2, "lru").execute
    empty, running = reports.EngineInventory("e", 0, "", 2, 1 << 30), []

    def never_loads(command: commands.Command) -> Iterable[reports.LoggedReport]:
        if isinstance(command, commands.LoadWeights):
            running.append(command.op)
            return []
        if isinstance(command, commands.RequestInventory):
            return [structs.replace(empty, last_op=running[-1], running=tuple(running))]
        return execute(command)

    limits = Limits(max_loras=2, max_cpu_loras=2, operation_timeout_ms=1)
    core = InProcessController(limits, "lru", never_loads)
    core.attach(empty)
    with pytest.raises(Refusal, match="did not report on LoadWeights"):
        core.request(requests.LoadAdapter, "a")
    # It is lost with the second deadline of the operation.
    with pytest.raises(RuntimeError, match="did not complete"):
        core.request(requests.LoadAdapter, "b")


def test_a_core_that_sets_no_timer_does_not_wait_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "set_timer", lambda _context: None)
    core = InProcessController(Limits(), "lru", lambda _command: [])
    with pytest.raises(RuntimeError, match="no deadline"):
        core.request(requests.LoadAdapter, "a")
