"""Adapters take turns in the slots: when each leaves, and what suspended requests do."""

import random
from collections import Counter

import pytest
from msgspec.structs import replace

from loradock.controller.core.reconcile import FIRST_TOKEN_SHARE
from loradock.controller.core.views import show_status
from loradock.messages import commands, records, requests
from loradock.messages.errors import ErrorCode
from tests.support.simulation.core_bench import NAMES, CoreBench
from tests.support.simulation.engine_records import Content

TOKENS = 16


def bench_of(slots: int = 1, **limits: int) -> CoreBench:
    """Return a deployment that knows all adapters."""
    bench = CoreBench(slots, **{"turn_tokens": TOKENS, **limits})
    for name in NAMES:
        assert isinstance(bench.request(requests.LoadAdapter, name), requests.AdapterDone)
    return bench


def suspended(bench: CoreBench) -> set[str]:
    """Return the requests that the engine has suspended.

    The core has them too, and those whose turn it has ordered to end.
    """
    assert bench.engine is not None
    known = {
        request_id
        for adapter in bench.world.adapters.values()
        for request_id in adapter.waiters
        if bench.world.pending_requests[request_id].op
    }
    ordered = {(one.slot, one.generation) for one in orders(bench)}
    running = bench.engine.running.values()
    inference = [one for one in running if isinstance(one.command, commands.StartGeneration)]
    found = {work.command.request_id for work in inference if work.suspended}
    leaving = {
        work.command.request_id
        for work in inference
        if (work.command.slot, work.command.generation) in ordered
    }
    assert known == found | leaving
    return found


def is_inference(bench: CoreBench, op: int) -> bool:
    return isinstance(bench.engine.running[op].command, commands.StartInference)


def test_a_leased_adapter_keeps_its_slot_until_its_turn_is_over() -> None:
    bench = bench_of()
    first, second = bench.generate("a"), bench.generate("b")
    assert (bench.in_slots(), suspended(bench)) == ({"a"}, set())
    bench.end_turns()
    assert (bench.in_slots(), suspended(bench)) == ({"b"}, {first})
    assert bench.adapter("a").state == "pinned"
    bench.end_generation(second)
    assert (bench.in_slots(), suspended(bench)) == ({"a"}, set())
    bench.end_generation(first)
    assert isinstance(bench.reply(first), requests.GenerationDone)
    assert bench.reply(first).output_tokens == bench.reply(second).output_tokens == 5


def test_nothing_is_preempted_without_turns_or_waiting_adapters() -> None:
    bench = bench_of(turn_tokens=0)
    bench.generate("a")
    bench.generate("b")
    bench.end_turns()
    assert (bench.in_slots(), suspended(bench)) == ({"a"}, set())
    bench = bench_of()
    bench.generate("a")
    for _ in range(3):
        bench.end_turns()
    assert bench.adapter("a").counters.deactivations == 0


def test_every_adapter_has_its_turn_before_any_has_two() -> None:
    """Five adapters, two of which have several requests, on two slots: turns are equally many."""
    bench = bench_of(slots=2)
    for name in (*NAMES, "a", "a", "b"):
        bench.generate(name)
    for _ in range(10):
        bench.end_turns()
    # Twenty turns of two slots, of which those of the first two began at once.
    turns = Counter({name: bench.adapter(name).counters.activations for name in NAMES})
    assert set(turns.values()) <= {4, 5}, turns
    totals = bench.world.totals
    # The two in the slots are to leave them next.
    assert totals.evictions == totals.evictions_caused == totals.deactivations + 2


def test_requests_of_a_preempted_adapter_continue_together() -> None:
    bench = bench_of()
    running = {bench.generate("a") for _ in range(3)}
    other = bench.generate("b")
    waiting = bench.generate("a")
    assert bench.world.pending_requests[waiting].op == 0
    bench.end_turns()
    assert suspended(bench) == running
    bench.end_turns()
    assert suspended(bench) == {other}
    # Their turn is ordered to end too.
    assert set(bench.adapter("a").waiters) == {*running, waiting}


def test_poolings_are_not_preempted() -> None:
    bench = bench_of()
    pooling = bench.pool("a")
    bench.generate("b")
    bench.end_turns()
    assert bench.in_slots() == {"a"}
    bench.end_generation(pooling)
    assert bench.in_slots() == {"b"}


def test_a_suspended_generation_is_cancelled_like_a_running_one() -> None:
    bench = bench_of()
    first, second = bench.generate("a"), bench.generate("b")
    bench.end_turns()
    assert bench.request(requests.CancelGeneration, first).found
    bench.end_generation(first)
    assert bench.reply(first).finish_reason == "cancelled"
    assert (bench.in_slots(), bench.adapter("a").waiters) == ({"b"}, {})
    bench.end_generation(second)


def test_a_suspended_generation_ends_at_its_deadline() -> None:
    bench = bench_of(generation_timeout_ms=5)
    first = bench.generate("a")
    bench.generate("b")
    bench.end_turns()
    assert suspended(bench) == {first}
    bench.advance(5)
    assert bench.reply(first).code is ErrorCode.ENGINE_GONE
    bench.settle()
    bench.end_generation(first)
    assert first not in bench.world.pending_requests


def test_the_loss_of_the_engine_ends_suspended_generations() -> None:
    bench = bench_of()
    first = bench.generate("a")
    bench.generate("b")
    bench.end_turns()
    bench.lose_engine()
    assert bench.reply(first).code is ErrorCode.ENGINE_GONE
    assert not bench.world.pending_requests


@pytest.mark.parametrize("lost_inputs", [0, 1, 2, 3, 4, 5, 6])
@pytest.mark.parametrize("turns", [1, 2])
def test_a_restarted_controller_resumes_what_is_suspended(lost_inputs: int, turns: int) -> None:
    """Also where the log's tail is lost, which had the preemption, or the resumption."""
    bench = bench_of()
    first, second = bench.generate("a"), bench.generate("b")
    for _ in range(turns):
        bench.end_turns()
    bench.restart_controller(lost_inputs)
    bench.settle()
    for _ in range(2):
        bench.end_turns()
    # One more if a generation is not in the log any more.
    for _ in range(3):
        if bench.world.pending_requests:
            ending = [op for op in bench.engine.completable() if is_inference(bench, op)]
            bench.engine.complete(ending[0])
            bench.end_turns()
    assert not bench.world.pending_requests
    for request_id in {first, second} & set(bench.oracle.requests) - bench.oracle.forgotten:
        assert isinstance(bench.reply(request_id), requests.GenerationDone)


@pytest.mark.parametrize("lost_commands", [0, 1, 2, 3])
def test_commands_that_are_lost_are_repeated(lost_commands: int) -> None:
    bench = bench_of()
    first, second = bench.generate("a"), bench.generate("b")
    for _ in range(4):
        bench.end_turns()
        bench.cut_link(lost_commands)
        bench.settle()
    running = {first, second} - suspended(bench)
    assert len(running) == 1
    bench.end_generation(running.pop())
    bench.end_generation(*({first, second} & set(bench.world.pending_requests)))


def test_removal_by_force_waits_for_suspended_generations() -> None:
    bench = bench_of()
    first, second = bench.generate("a"), bench.generate("b")
    bench.end_turns()
    waiting = bench.generate("a")
    removal = bench.send(requests.RemoveAdapter, "a", True)
    bench.settle()
    assert [bench.reply(one) for one in (first, waiting)] == [None, None]
    bench.end_generation(second)
    assert bench.in_slots() == {"a"}
    for request in (first, waiting):
        assert bench.reply(removal) is None
        bench.end_generation(request)
        assert isinstance(bench.reply(request), requests.GenerationDone)
    assert isinstance(bench.reply(removal), requests.AdapterDone)
    assert "a" not in bench.world.names


def test_a_suspended_generation_ends_on_the_version_that_it_began_with() -> None:
    bench = bench_of(slots=1)
    first, second = bench.generate("a"), bench.generate("b")
    bench.end_turns()
    old = bench.adapter("a")
    bench.files["a"] = Content("other content of a", 10, 10)
    done = bench.request(requests.LoadAdapter, "a", "", True)
    assert isinstance(done, requests.AdapterDone)
    new = bench.generate("a")
    assert (old.retired, old.id in bench.world.adapters) == (True, True)
    assert list(old.waiters) == [first]
    bench.end_generation(second)
    bench.end_generation(new)
    # The oracle checks that it continues on the old content.
    bench.end_generation(first)
    assert old.id not in bench.world.adapters
    assert bench.adapter("a").fingerprint == "other content of a"


def test_a_hold_that_takes_the_last_slot_pauses_suspended_generations() -> None:
    bench = bench_of(retry_backoff_ms=20)
    first = bench.generate("a")
    hold = bench.send(requests.HoldAdapter, "b")
    bench.end_turns()
    assert isinstance(bench.reply(hold), requests.AdapterDone)
    late = bench.generate("a")
    assert bench.reply(late).code is ErrorCode.NO_ROOM
    assert (suspended(bench), bench.reply(first)) == ({first}, None)
    bench.request(requests.ReleaseAdapter, "b")
    bench.advance(20)
    bench.settle()
    assert bench.in_slots() == {"a"}
    bench.end_generation(first)


def test_a_suspended_generation_that_is_to_end_needs_no_slot() -> None:
    """The engine has not ended it yet, and a held adapter keeps the only slot."""
    bench = bench_of(retry_backoff_ms=20)
    first = bench.generate("a")
    bench.send(requests.HoldAdapter, "b")
    bench.end_turns()
    assert bench.request(requests.CancelGeneration, first).found
    bench.advance(20)
    late = bench.generate("a")
    assert bench.reply(late).code is ErrorCode.NO_ROOM
    assert suspended(bench) == {first}
    bench.end_generation(first)
    assert bench.reply(first).finish_reason == "cancelled"
    assert bench.state("a") == "pinned"


@pytest.mark.parametrize("removed", [False, True])
def test_files_that_changed_end_a_suspended_generation(removed: bool) -> None:
    """A removed adapter's record stays until the engine has ended it."""
    bench = bench_of()
    first = bench.generate("a")
    bench.generate("b")
    bench.end_turns()
    suspended_on = bench.adapter("a")
    removal = bench.send(requests.RemoveAdapter, "a", True) if removed else ""
    assert bench.engine is not None
    del bench.engine.adapters[suspended_on.id]
    bench.files["a"] = Content("other content of a", 10, 10)
    bench.cut_link(0)
    bench.settle()
    bench.end_turns()
    assert bench.reply(first).code is ErrorCode.CONFLICT
    assert (suspended_on.state, suspended_on.id in bench.world.adapters) == ("evicted", True)
    bench.end_generation(first)
    assert first not in bench.world.pending_requests
    is_known = suspended_on.id in bench.world.adapters
    assert (is_known, bool(bench.reply(removal))) == (not removed, removed)


def test_suspended_adapters_keep_their_host_memory() -> None:
    bench = bench_of(max_cpu_loras=2)
    bench.generate("a")
    bench.generate("b")
    bench.end_turns()
    bench.generate("c")
    bench.end_turns()
    assert bench.state("c") in {"unregistered", "evicted"}
    assert {bench.state("a"), bench.state("b")} == {"pinned", "gpu-slot"}


def test_a_preemption_that_fails_changes_nothing() -> None:
    bench = bench_of()
    first = bench.generate("a")
    bench.generate("b")
    bench.fail("PreemptSlot", ErrorCode.NOT_RESIDENT)
    assert bench.adapter("a").slot == 0
    bench.end_turns()
    assert bench.in_slots() == {"b"}
    assert suspended(bench) == {first}


def test_changed_settings_begin_and_end_the_turns() -> None:
    bench = bench_of(turn_tokens=0)
    first, second = bench.generate("a"), bench.generate("b")
    change(bench, TOKENS)
    bench.end_turns()
    assert suspended(bench) == {first}
    change(bench, 0)
    for _ in range(3):
        # The first one was ordered before the change.
        bench.end_turns()
    assert suspended(bench) == {second}
    bench.end_generation(first)
    assert bench.in_slots() == {"b"}


_MOVES = (commands.WriteSlot, commands.ResetSlot)


def bench_of_tokens(slots: int) -> CoreBench:
    """Return a deployment with turns of tokens, whose engine ends them when it is told to."""
    bench = bench_of(slots)
    for name in NAMES:
        bench.request(requests.StageAdapter, name)
    return bench


def request(bench: CoreBench, name: str) -> str:
    """Request a generation, and end nothing but writes and resets of slots."""
    request_id = bench.send(records.GenerationRequested, name)
    end_writes(bench)
    return request_id


def end_writes(bench: CoreBench) -> None:
    assert bench.engine is not None
    for _ in range(4):
        bench.transmit(len(bench.channel))
        for op in bench.engine.completable():
            if isinstance(bench.engine.running[op].command, _MOVES):
                bench.engine.complete(op)
        bench.deliver(100)


def end_turn(bench: CoreBench) -> None:
    """End the turn that was ordered to first."""
    assert bench.engine is not None
    bench.engine.complete(orders(bench)[0].op)
    bench.deliver(100)
    end_writes(bench)


def orders(bench: CoreBench) -> list[commands.PreemptSlot]:
    """Return the orders to leave a slot that have not ended."""
    assert bench.engine is not None
    sent = [*(work.command for work in bench.engine.running.values()), *bench.channel]
    return [one for one in sent if isinstance(one, commands.PreemptSlot)]


def test_an_adapter_is_ordered_to_leave_as_soon_as_another_waits() -> None:
    """No time passes: the engine counts the tokens of the turn, which the order states."""
    bench = bench_of_tokens(slots=1)
    first = request(bench, "a")
    assert orders(bench) == []
    request(bench, "b")
    [order] = orders(bench)
    # Fewer, because no token was generated of the request that waits.
    assert (order.slot, order.tokens) == (bench.adapter("a").slot, TOKENS // FIRST_TOKEN_SHARE)
    assert bench.in_slots() == {"a"}
    end_turn(bench)
    assert bench.in_slots() == {"b"}
    assert first in bench.adapter("a").waiters
    assert [order.tokens for order in orders(bench)] == [TOKENS]


def test_a_generation_that_ends_after_its_turn_is_answered() -> None:
    """It is computed until another adapter has been copied to its slot."""
    bench = bench_of_tokens(slots=1)
    first = request(bench, "a")
    request(bench, "b")
    assert bench.engine is not None
    bench.engine.complete(orders(bench)[0].op)
    bench.engine.complete(bench.world.pending_requests[first].op)
    bench.settle()
    assert isinstance(bench.reply(first), requests.GenerationDone)
    assert bench.in_slots() == {"b"}


def test_every_other_slot_is_for_an_adapter_whose_request_has_no_token() -> None:
    bench = bench_of_tokens(slots=1)
    for name in "ab":
        request(bench, name)
    end_turn(bench)
    for name in "cd":
        request(bench, name)
    entered = []
    for _ in range(2):
        end_turn(bench)
        entered += bench.in_slots()
    # `a` is suspended and has waited longest, `c` is the first of the new ones.
    assert sorted(entered) == ["a", "c"]


@pytest.mark.parametrize("seed", range(12))
def test_a_request_waits_for_two_turns_of_each_adapter_before_it_at_most(seed: int) -> None:
    """Requests arrive and generations end at any time, on one to three slots."""
    chance, waiting = random.Random(seed), {}
    bench = bench_of_tokens(slots=chance.randint(1, 3))
    world, longest = bench.world, 0
    for _ in range(80):
        running = [one for one in world.pending_requests if is_running(bench, one)]
        if chance.random() < 0.4:
            before = len(world.queues.by_tier["device"])
            request_id = request(bench, chance.choice(NAMES))
            waiting[request_id] = (before, world.next_generation)
        elif running and chance.random() < 0.3:
            bench.engine.complete(world.pending_requests[chance.choice(running)].op)
            bench.deliver(100)
            end_writes(bench)
        elif orders(bench):
            end_turn(bench)
        for request_id, (before, entered) in tuple(waiting.items()):
            pending = world.pending_requests.get(request_id)
            if pending is not None and not pending.op:
                turns = world.next_generation - entered
                longest = max(longest, turns)
                assert turns <= 2 * (before + 1) + 1
            else:
                del waiting[request_id]
    assert longest


def is_running(bench: CoreBench, request_id: str) -> bool:
    """Return whether the engine may end a generation."""
    op = bench.world.pending_requests[request_id].op
    return bool(op) and bench.engine is not None and op in bench.engine.completable()


def change(bench: CoreBench, tokens: int) -> None:
    bench.limits = replace(bench.limits, turn_tokens=tokens)
    for controller in (bench.controller, bench.shadow):
        actions = controller.reconfigure(bench.limits, "lru")
    for action in actions:
        bench._perform(action, replaying=False)
    bench.settle()


def test_a_request_runs_until_its_adapter_left_the_slot_whatever_the_engine_last_said() -> None:
    """A batch is reported before a turn ends, so what it says of suspended requests may be old."""
    bench = bench_of()
    first = bench.generate("a")
    bench.generate("b")
    batch = frozenset({bench.world.pending_requests[first].op})

    def shown() -> dict[str, tuple[bool, int, int]]:
        status = show_status(bench.controller, requests.ShowStatus("s", uses=True), batch)
        return {use.adapter: (use.slot >= 0, use.running, use.waiting) for use in status.uses}

    assert shown() == {"a": (True, 1, 0), "b": (False, 0, 1)}
    bench.end_turns()
    assert suspended(bench) == {first}
    assert shown() == {"a": (False, 0, 1), "b": (True, 0, 1)}


def test_a_lost_payload_of_a_request_that_is_over_changes_nothing() -> None:
    bench = bench_of()
    running = bench.generate("a")
    bench.handle(records.PayloadLost("r-unknown"))
    assert bench.world.pending_requests.keys() == {running}
    assert [one.request_id for one in bench.world.operations.values()] == [running]


def test_a_turn_that_the_log_has_lost_is_found_in_the_inventory() -> None:
    bench = bench_of()
    first = bench.generate("a")
    op = bench.world.pending_requests[first].op
    assert bench.engine is not None
    inventory = bench.engine.inventory()
    adapters = [
        replace(one, state="pinned", slot=-1, generation=0) if one.adapter == "a" else one
        for one in inventory.adapters
    ]
    moved = replace(inventory, adapters=tuple(adapters), suspended=(op,))
    bench.controller.handle(moved, bench.now + 1)
    assert bench.adapter("a").leases == 0
    assert bench.adapter("a").waiters.keys() == {first}
