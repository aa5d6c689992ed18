"""Embedding and classifying: leased like a generation, answered once, with counts."""

import pytest

from loradock.messages import commands, events, records, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import PoolingDone, Refused
from loradock.messages.views import PoolingTask
from tests.support.simulation.core_bench import CoreBench

TASKS = ("embed", "classify")


@pytest.mark.parametrize("task", TASKS)
@pytest.mark.parametrize("name", ["a", None])
def test_it_is_answered_with_its_counts(task: PoolingTask, name: str | None) -> None:
    bench = CoreBench()
    bench.activate("a")
    published = bench.record_events()
    request_id = bench.pool(name, task)
    assert bench.adapter("a").leases == (1 if name else 0)
    assert bench.reply(request_id) is None
    bench.end_generation(request_id)
    assert bench.reply(request_id) == PoolingDone(request_id, name, task, 2, 7)
    [finished] = published
    done = events.PoolingFinished(name or "", task, "done", 2, 7, finished.duration_ns)
    assert finished == done
    assert bench.adapter("a").leases == 0


@pytest.mark.parametrize("task", TASKS)
def test_the_adapter_is_activated_first_and_leased(
    task: PoolingTask,
) -> None:
    bench = CoreBench(slots=1)
    bench.activate("a", "b")
    request_id = bench.pool("a", task)
    assert bench.in_slots() == {"a"}
    waiting = bench.send(requests.ActivateAdapter, "b")
    bench.settle()
    assert bench.in_slots() == {"a"}
    bench.end_generation(request_id)
    assert isinstance(bench.reply(waiting), requests.AdapterDone)


def test_the_command_names_the_task() -> None:
    bench = CoreBench()
    sent = []
    on_command = bench.oracle.on_command
    bench.oracle.on_command = lambda command: (sent.append(command), on_command(command))[1]  # type: ignore[method-assign]
    for task in TASKS:
        bench.pool(None, task)
    kinds = [(type(command), command.task) for command in sent]
    assert kinds == [(commands.StartPooling, task) for task in TASKS]


@pytest.mark.parametrize("task", TASKS)
def test_a_failure_is_reported_with_its_code(task: PoolingTask) -> None:
    bench = CoreBench()
    bench.activate("a")
    published = bench.record_events()
    request_id = bench.pool("a", task)
    bench.end_generation(request_id, ErrorCode.NOT_SERVED)
    refused = bench.reply(request_id)
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.NOT_SERVED
    [finished] = published
    failed = events.PoolingFinished("a", task, "L016", 0, 0, finished.duration_ns)
    assert finished == failed
    assert bench.adapter("a").leases == 0


@pytest.mark.parametrize("task", TASKS)
def test_one_that_takes_too_long_is_refused_stopped_and_still_leased(
    task: PoolingTask,
) -> None:
    bench = CoreBench()
    bench.activate("a")
    request_id = bench.send(records.PoolingRequested, "a", task, 5)
    bench.settle()
    bench.advance(6)
    refused = bench.reply(request_id)
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.ENGINE_GONE
    assert "send fewer inputs" in refused.message
    assert bench.adapter("a").leases == 1
    bench.settle()
    bench.end_generation(request_id)
    assert bench.adapter("a").leases == 0
    assert bench.reply(request_id) == refused


def test_a_repeated_one_gets_its_first_answer() -> None:
    bench = CoreBench()
    bench.activate("a")
    request_id = bench.pool("a")
    bench.end_generation(request_id)
    uses = bench.adapter("a").counters.uses
    bench.handle(records.PoolingRequested(request_id, "a", "embed"))
    bench.settle()
    assert bench.adapter("a").counters.uses == uses
    assert not bench.world.pending_requests


def test_inputs_lost_with_the_controller_are_sent_again() -> None:
    bench = CoreBench()
    bench.activate("a")
    bench.lose_engine()
    request_id = bench.send(records.PoolingRequested, "a", "embed")
    uses = bench.adapter("a").counters.uses
    bench.restart_controller()
    bench.start_engine()
    bench.settle()
    assert request_id in bench.oracle.forgotten
    assert bench.reply(request_id) is None
    assert bench.adapter("a").counters.uses == uses - 1
    bench.handle(records.PoolingRequested(request_id, "a", "embed"))
    bench.settle()
    bench.end_generation(request_id)
    assert bench.reply(request_id) == PoolingDone(request_id, "a", "embed", 2, 7)


def test_one_for_the_base_model_starts_when_an_engine_attaches() -> None:
    bench = CoreBench(engine=False)
    request_id = bench.pool(None)
    assert not bench.world.pending_requests[request_id].op
    bench.start_engine()
    bench.settle()
    bench.end_generation(request_id)
    assert bench.reply(request_id) == PoolingDone(request_id, None, "embed", 2, 7)


def test_a_lost_engine_ends_it() -> None:
    bench = CoreBench()
    bench.activate("a")
    request_id = bench.pool("a")
    bench.lose_engine()
    refused = bench.reply(request_id)
    assert isinstance(refused, Refused)
    assert refused.code is ErrorCode.ENGINE_GONE


def test_it_can_not_be_cancelled_like_a_generation() -> None:
    bench = CoreBench()
    request_id = bench.pool(None)
    cancelled = bench.request(requests.CancelGeneration, request_id)
    assert cancelled.found is False
    bench.end_generation(request_id)
    assert isinstance(bench.reply(request_id), PoolingDone)


def test_an_unknown_adapter_is_refused_and_changes_nothing() -> None:
    CoreBench().refused(
        ErrorCode.UNKNOWN_ADAPTER, ("missing",), records.PoolingRequested, "missing", "embed"
    )
