"""Every field of a world is in the digest, derived or a label; derived ones can be forgotten."""

import copy
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.core.controller import Controller
from loradock.controller.core.counters import Counters
from loradock.controller.core.indexes import DigestDict
from loradock.controller.core.limits import Limits
from loradock.controller.core.rankings import Fifo
from loradock.controller.core.restore import derive
from loradock.controller.core.world import Operation, World
from loradock.messages import requests
from loradock.messages.records import Record
from tests.support.simulation.core_bench import CoreBench
from tests.support.simulation.workload import random_history

IN_DIGEST = {
    *("seq", "time_ns", "epoch", "events_seq", "lru_counter", "answered", "refused"),
    *("next_op", "next_adapter_id", "next_generation"),
    *("engine", "engine_ready", "unknown_operations"),
    *("adapters", "warnings"),
    *("answers", "answers_chain", "operations", "pending_requests", "tiers"),
    *("totals", "past_counters", "base_counters"),
    *("rankings", "policy_failure"),
}
DERIVED = {
    *("names", "free_slots", "lru_order", "queues", "demoting", "promoting"),
    *("held", "batches", "current_batch", "deadlines", "deadlines_max", "timer_ns"),
}
LABELS = {"wall_offset_ns"}

_decoder = msgspec.msgpack.Decoder(Record)


def test_every_field_of_a_world_is_of_one_kind() -> None:
    kinds = (IN_DIGEST, DERIVED, LABELS)
    assert set(vars(World(Limits()))) == set.union(*kinds)
    assert sum(map(len, kinds)) == len(set.union(*kinds))


CHANGES: dict[str, Any] = {
    "epoch": 9,
    "answers_chain": b"r",
    "engine_ready": True,
    "engine": "an engine",
    "unknown_operations": {3: 4},
    "operations": {3: Operation("DropWeights", 1, 0)},
    "pending_requests": {"r": 4},
    "rankings": {"host": Fifo()},
    "policy_failure": "raised KeyError",
    **dict.fromkeys(("totals", "past_counters", "base_counters"), Counters(hits=1)),
}


@pytest.mark.parametrize("name", sorted(IN_DIGEST))
def test_the_digest_depends_on_each_of_its_fields(name: str) -> None:
    world = World(Limits())
    before, value = world.digest(), getattr(world, name)
    if name in ("adapters", "warnings"):
        value["key"] = "value"
    elif name == "answers":
        value.by_id["key"] = "value"
    elif name == "tiers":
        value["pinned"].count += 1
    else:
        setattr(world, name, CHANGES.get(name, value + 1 if isinstance(value, int) else value))
    assert world.digest() != before


def without_derived(controller: Controller) -> Controller:
    """Return a controller whose world has copies of the stored fields, and computes the others."""
    made = Controller(controller.limits, controller.policy_name, checked=True)
    for name in IN_DIGEST | LABELS:
        value = getattr(controller.world, name)
        if isinstance(value, DigestDict):
            setattr(made.world, name, DigestDict())
            for key, entry in value.items():
                getattr(made.world, name)[key] = copy.deepcopy(entry)
        elif name == "answers":
            made.world.answers.restore(value.by_id.values())
        else:
            setattr(made.world, name, copy.deepcopy(value))
    derive(made.world, controller.limits)
    return made


@settings(max_examples=25)
@given(seed=st.integers(0, 1_000_000), at=st.integers(0, 120))
def test_a_world_that_computes_its_derived_fields_decides_as_before(seed: int, at: int) -> None:
    deployment = random_history(seed, 80).deployment
    inputs = [_decoder.decode(data) for data in deployment.inputs]
    controller = Controller(deployment.limits)
    for record in inputs[:at]:
        controller.handle(record.input, record.time_ns)
    restored = without_derived(controller)
    assert restored.digest() == controller.digest()
    for record in inputs[at:]:
        expected = controller.handle(record.input, record.time_ns)
        assert restored.handle(record.input, record.time_ns) == expected
        assert restored.digest() == controller.digest()


def test_ended_deadlines_are_dropped_and_live_ones_are_kept() -> None:
    kinds = set()
    for seed in range(5):
        deployment = random_history(seed, 80).deployment
        controller = Controller(deployment.limits)
        world = controller.world
        for data in deployment.inputs:
            record = _decoder.decode(data)
            controller.handle(record.input, record.time_ns)
            live = sorted(filter(world.is_live, world.deadlines))
            world.deadlines_max = 0
            # Of an operation that does not exist.
            world.add_deadline(1, "operation", 0)
            assert sorted(world.deadlines) == live
            kinds |= {kind for _, kind, _ in live}
    assert kinds >= {"operation", "request"}


def test_a_queue_is_computed_from_the_records() -> None:
    bench = CoreBench(slots=1)
    bench.activate("a")
    bench.generate("a")
    bench.send(requests.ActivateAdapter, "b")
    bench.settle()
    queues = without_derived(bench.controller).world.queues
    assert queues.by_tier == bench.world.queues.by_tier
    assert queues.members == bench.world.queues.members != {}
