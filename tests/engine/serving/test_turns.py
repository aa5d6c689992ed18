"""Turns in the slots: when an adapter leaves its slot, and what is computed meanwhile."""

from collections.abc import Callable

import pytest

from loradock.engine.serving.scheduler import PROMPT_STEPS_MAX, TURN_S_MAX
from loradock.messages import commands, reports
from loradock.messages.ids import GPU_SLOT, PINNED
from tests.support.engine.engine_bench import EngineBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

TURN = 5


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench], no_eos: None) -> EngineBench:
    """An engine with an adapter in slot 0 of generation 1, and another one that is staged."""
    bench = make_engine()
    bench.promote(1, "attention", GPU_SLOT, slot=0, generation=1)
    bench.promote(2, "mlp", PINNED)
    return bench


def preempt(bench: EngineBench, tokens: int = TURN, generation: int = 1) -> int:
    return bench.submit(commands.PreemptSlot, slot=0, generation=generation, tokens=tokens)


def step(bench: EngineBench) -> None:
    bench.engine.step()
    bench.poll()


def tokens_until(bench: EngineBench, op: int, generation: int) -> int:
    """Return the tokens of a generation when an operation has its report."""
    while not bench.reports_of(op):
        step(bench)
    return len(bench.tokens(generation))


def test_a_turn_ends_with_its_tokens(bench: EngineBench) -> None:
    generation = bench.generate(1, 0, 1, max_tokens=40)
    assert tokens_until(bench, preempt(bench), generation) == TURN


def test_a_turn_whose_generations_have_ended_is_over(bench: EngineBench) -> None:
    generation = bench.generate(1, 0, 1, max_tokens=3)
    assert tokens_until(bench, preempt(bench), generation) == 3
    generation = bench.adapters()[1]
    assert (generation.state, bench.engine.is_idle) == (PINNED, True)


def test_generations_are_computed_until_another_adapter_is_copied(bench: EngineBench) -> None:
    """No step is without a token of either: what leaves the slot is computed during the copy."""
    leaving = bench.generate(1, 0, 1, max_tokens=40)
    tokens_until(bench, preempt(bench), leaving)
    assert bench.adapters()[1].state == PINNED
    assert bench.engine.inventory().suspended == (leaving,)
    for number in range(1, 4):
        step(bench)
        assert len(bench.tokens(leaving)) == TURN + number
    written = bench.submit(commands.WriteSlot, adapter_id=2, slot=0, generation=2)
    bench.wait(written)
    last = len(bench.tokens(leaving))
    entering = bench.generate(2, 0, 2, max_tokens=40)
    for _ in range(3):
        step(bench)
    assert (len(bench.tokens(leaving)), len(bench.tokens(entering))) == (last, 3)
    assert bench.engine.residency.residents[0] == 2
    bench.engine.residency.arena.check()


def test_a_suspended_generation_continues_when_its_slot_is_written(bench: EngineBench) -> None:
    first = bench.generate(1, 0, 1, max_tokens=40)
    tokens_until(bench, preempt(bench), first)
    bench.do(commands.WriteSlot, adapter_id=2, slot=0, generation=2)
    step(bench)
    before = len(bench.tokens(first))
    assert bench.engine.inventory().suspended == (first,)
    bench.do(commands.WriteSlot, adapter_id=1, slot=1, generation=3)
    step(bench)
    step(bench)
    assert bench.engine.inventory().suspended == ()
    assert len(bench.tokens(first)) > before
    bench.wait(first)
    alone = bench.generate(1, 1, 3, max_tokens=40)
    bench.wait(alone)
    assert bench.tokens(first) == bench.tokens(alone)


def test_an_adapter_that_enters_the_slot_it_leaves_continues(bench: EngineBench) -> None:
    first = bench.generate(1, 0, 1, max_tokens=40)
    tokens_until(bench, preempt(bench), first)
    bench.do(commands.WriteSlot, adapter_id=1, slot=0, generation=2)
    bench.submit(commands.PreemptSlot, slot=0, generation=2, tokens=TURN)
    for _ in range(2 * TURN):
        step(bench)
    assert len(bench.tokens(first)) >= 2 * TURN
    bench.engine.residency.arena.check()


def test_a_slot_is_cleared_if_the_next_adapter_has_no_memory_beside_it(
    bench: EngineBench, make_engine: Callable[..., EngineBench]
) -> None:
    size_bytes = bench.adapters()[2].blob_bytes
    bench = make_engine(device_bytes_max=size_bytes + size_bytes // 2)
    bench.promote(1, "mlp", GPU_SLOT, slot=0, generation=1)
    bench.promote(2, "mlp", PINNED)
    first = bench.generate(1, 0, 1, max_tokens=40)
    tokens_until(bench, preempt(bench), first)
    arena = bench.engine.residency.arena
    assert not arena.has_hole(bench.adapters()[2].blob_bytes)
    report = bench.do(commands.WriteSlot, adapter_id=2, slot=0, generation=2)
    assert isinstance(report, reports.SlotWritten)
    assert bench.engine.inventory().suspended == (first,)
    arena.check()


def test_a_generation_that_leaves_its_slot_can_be_stopped(bench: EngineBench) -> None:
    first = bench.generate(1, 0, 1, max_tokens=40)
    tokens_until(bench, preempt(bench), first)
    bench.submit(commands.StopGeneration, target=first)
    assert isinstance(bench.wait(first), reports.GenerationEnded)
    assert bench.engine.is_idle
    assert bench.engine.inventory().suspended == ()


def test_slow_steps_and_waiting_prompts_end_a_turn(bench: EngineBench) -> None:
    """The controller's time for an operation bounds a turn, whatever its tokens."""
    bench.generate(1, 0, 1, max_tokens=100)
    op = preempt(bench, tokens=60_000)
    bench.engine.poll(now_s=1.0)
    bench.reports += bench.engine.poll(now_s=1.0 + TURN_S_MAX)
    assert not bench.reports_of(op)
    bench.reports += bench.engine.poll(now_s=1.1 + TURN_S_MAX)
    assert bench.reports_of(op)
    op = bench.submit(commands.WriteSlot, adapter_id=2, slot=0, generation=2)
    bench.wait(op)
    bench.generate(2, 0, 2, max_tokens=100)
    order = preempt(bench, tokens=0, generation=2)
    for _ in range(PROMPT_STEPS_MAX):
        bench.reports += bench.engine.poll(now_s=0.0)
    assert not bench.reports_of(order)
    bench.reports += bench.engine.poll(now_s=0.0)
    assert bench.reports_of(order)
