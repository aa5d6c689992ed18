"""Metrics over ZeroMQ: the documented keys, computed from a status."""

from typing import Any

from loradock.client.methods import metrics_of
from loradock.messages.requests import StatusShown
from loradock.messages.views import AdapterCounters, EngineStatistics, TierView
from tests.support.simulation.message_examples import example_of

DOCUMENTED = {
    "adapters": {"registered", "active", "capacity", "utilization"},
    "memory": {"adapter_memory_mb", "gpu_memory_usage", "memory_efficiency"},
    "performance": {
        *("avg_activation_time", "avg_switching_time"),
        *("punica_kernel_enabled", "punica_kernels"),
    },
}


def metrics(**changes: Any) -> dict[str, Any]:
    tiers = (
        TierView("host", 6, 8, 3 << 20, 1 << 30),
        TierView("pinned", 4, 8, 2 << 20, 1 << 30),
        TierView("device", 3, 4, 1 << 20, 4 << 20),
    )
    status: StatusShown = example_of(StatusShown)
    fields = {name: getattr(status, name) for name in status.__struct_fields__}
    return metrics_of(StatusShown(**{**fields, "tiers": tiers, **changes}))


def test_every_documented_key_has_its_documented_meaning() -> None:
    counters = AdapterCounters(
        activations=4, write_ns=2_000_000_000, misses=5, wait_ns=10_000_000_000, hits=9, evictions=1
    )
    engine = EngineStatistics(kernels="triton", allocated_bytes=7 << 20)
    found = metrics(counters=counters, engine=engine)
    assert {group: DOCUMENTED[group] - set(found[group]) for group in DOCUMENTED} == {
        group: set() for group in DOCUMENTED
    }
    assert found["adapters"]["utilization"] == 0.75
    memory, performance = found["memory"], found["performance"]
    assert (memory["adapter_memory_mb"], memory["gpu_memory_usage"]) == (5.0, 7.0)
    assert memory["memory_efficiency"] == 0.25
    assert performance["avg_activation_time"] == 0.5
    assert performance["avg_switching_time"] == 2.0
    assert performance["punica_kernel_enabled"] is True
    assert performance["punica_kernels"] == "triton"
    assert (performance["hits"], performance["misses"], performance["evictions"]) == (9, 5, 1)
    assert found["counters"]["wait_ns"] == 10_000_000_000


def test_without_an_engine_nothing_is_divided_by_zero() -> None:
    tiers = tuple(TierView(name, 0, 0, 0, 0) for name in ("host", "pinned", "device"))
    found = metrics(tiers=tiers, counters=AdapterCounters(), engine=EngineStatistics())
    assert found["adapters"]["utilization"] == 0.0
    assert found["memory"]["memory_efficiency"] == 0.0
    assert found["performance"]["avg_activation_time"] == 0.0
    assert found["performance"]["punica_kernel_enabled"] is False
