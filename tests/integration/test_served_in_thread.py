"""Core and engine together: adapters that arrive, are replaced and leave while requests run."""

import gc
import os
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from loradock.engine.worker import engine as engine_module
from loradock.messages import requests
from loradock.messages.requests import (
    ActivateAdapter,
    EvictAdapter,
    LoadAdapter,
    PrefetchAdapter,
    RemoveAdapter,
)
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.served_bench import ServedBench

pytest_plugins = ("tests.support.engine.engine_fixtures",)

LIFE_CYCLES = int(os.environ.get("LORADOCK_LIFE_CYCLES", "6"))
"""`LORADOCK_LIFE_CYCLES=10000` runs the whole number."""


@pytest.fixture
def bench(make_engine: Callable[..., EngineBench], no_eos: None) -> ServedBench:
    return ServedBench(make_engine())


def test_a_replaced_adapter_serves_both_versions_and_the_old_one_leaves_with_its_last_lease(
    bench: ServedBench,
) -> None:
    expected = {}
    for path in ("attention", "mlp"):
        bench.request(LoadAdapter, path, path)
        expected[path] = bench.alone(path, 40)
    assert expected["attention"] != expected["mlp"]
    bench.request(LoadAdapter, "hot", "attention")
    old = [bench.generate("hot", 40) for _ in range(3)]
    while not all(bench.tokens[request] for request in old):
        bench.step()
    replacing = bench.send(LoadAdapter, "hot", "mlp", True)
    new: list[str] = []
    while replacing not in bench.replies:
        bench.step()
    versions = [a for a in bench.world.adapters.values() if a.name == "hot"]
    assert sorted(a.retired for a in versions) == [False, True]
    new += [bench.generate("hot", 40) for _ in range(2)]
    bench.wait(*old, *new)
    assert [bench.tokens[request] for request in old] == [expected["attention"]] * 3
    assert [bench.tokens[request] for request in new] == [expected["mlp"]] * 2
    bench.step()
    [version] = [a for a in bench.world.adapters.values() if a.name == "hot"]
    ids = {entry.adapter_id for entry in bench.engine.inventory().adapters}
    assert version.id in ids
    assert len(ids) == 3, "the old version's memory is free"
    assert version.counters.served == 5


def test_a_cold_adapter_arrives_while_others_decode_and_no_step_waits_for_its_files(
    bench: ServedBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.request(ActivateAdapter, "attention")
    expected = bench.alone("attention", 60)
    bench.request(LoadAdapter, "mlp")
    expected_cold = bench.alone("mlp")
    bench.request(EvictAdapter, "mlp")
    read, may_read, reading = engine_module.read_adapter, threading.Event(), threading.Event()

    def slow_read(*arguments: Any, **named: Any) -> Any:
        reading.set()
        may_read.wait()
        return read(*arguments, **named)

    monkeypatch.setattr(engine_module, "read_adapter", slow_read)
    try:
        running = bench.generate("attention", 60)
        bench.send(PrefetchAdapter, "mlp")
        cold = bench.generate("mlp")
        reading.wait()
        # The whole output is decoded while the read stands still.
        bench.wait(running)
        assert bench.tokens[running] == expected
        assert not bench.tokens[cold]
    finally:
        may_read.set()
    bench.wait(cold)
    assert bench.tokens[cold] == expected_cold


def test_the_engines_statistics_agree_with_the_controllers_counters(bench: ServedBench) -> None:
    names = ("attention", "mlp", "output", "patterns", "everything")
    for name in names:
        bench.request(LoadAdapter, name)
    bench.wait(*(bench.generate(name) for name in (*names, None, *names)))
    statistics, totals = bench.engine.statistics(), bench.world.totals
    assert totals.served == 11
    assert statistics.output_tokens == totals.output_tokens == 11 * 12
    assert statistics.prompt_tokens == totals.prompt_tokens - totals.prefix_tokens
    assert (statistics.slot_writes, statistics.slot_resets) == (
        totals.activations,
        totals.deactivations,
    )
    assert statistics.queued == sum(statistics.queue_counts) == 11
    tiers = bench.world.tiers
    assert statistics.pinned_bytes == tiers["pinned"].size_bytes
    assert statistics.arena_bytes == tiers["device"].size_bytes
    assert (statistics.running, statistics.waiting, statistics.preempted) == (0, 0, 0)
    assert 0 < statistics.steps <= bench.steps


def test_an_adapter_has_the_weight_of_its_name(
    make_engine: Callable[..., EngineBench], no_eos: None
) -> None:
    weights = {"attention": 4}
    bench = ServedBench(make_engine(max_num_seqs=1, adapter_weights=weights))
    for name in ("attention", "mlp"):
        bench.request(ActivateAdapter, name)
    ids = {name: bench.world.current(name).id for name in ("attention", "mlp")}
    assert {name: bench.engine._weight_of(key) for name, key in ids.items()} == {
        "attention": 4,
        "mlp": 1,
    }
    assert bench.engine._weight_of(0) == 1


def test_memory_after_many_life_cycles_is_that_before(bench: ServedBench) -> None:
    def cycle() -> None:
        for name in ("attention", "mlp"):
            bench.request(LoadAdapter, name)
            bench.alone(name, 2)
            bench.request(EvictAdapter, name)
            bench.request(requests.StageAdapter, name)
            bench.request(RemoveAdapter, name)

    for _ in range(3):
        cycle()
    before = live_tensor_bytes()
    for _ in range(LIFE_CYCLES):
        cycle()
    assert live_tensor_bytes() == before
    statistics = bench.engine.statistics()
    assert (statistics.arena_bytes, statistics.host_bytes, statistics.pinned_bytes) == (0, 0, 0)
    assert not bench.world.adapters
    assert statistics.slot_writes == statistics.slot_resets == 2 * (LIFE_CYCLES + 3)
    assert len(bench.world.deadlines) <= bench.world.deadlines_max


def live_tensor_bytes() -> int:
    """Return the bytes of all storages that tensors of this process use."""
    gc.collect()
    # Not those of subclasses: a compiler that another test used keeps tensors without memory.
    kinds = (torch.Tensor, torch.nn.Parameter)
    tensors = [one for one in gc.get_objects() if type(one) in kinds]
    storages = {one.untyped_storage().data_ptr(): one.untyped_storage() for one in tensors}
    return sum(storage.nbytes() for storage in storages.values())
