"""The metrics of a server, under the keys of `LoRAModelManager.get_lora_metrics`."""

from typing import Any, Final

import msgspec

from loradock.messages.requests import StatusShown

MEBIBYTE: Final = 1 << 20
_SECOND_NS: Final = 1_000_000_000


def metrics_of(status: StatusShown) -> dict[str, Any]:
    """Return the metrics of a status.

    Sizes are in bytes, `adapter_memory_mb` and `gpu_memory_usage` in MiB; durations in seconds.
    `utilization` is the part of the slots in use, `memory_efficiency` that of the device's adapter
    memory. `avg_activation_time` is that of a copy into a slot, `avg_switching_time` how long a
    request waited for an adapter that was not in a slot. `engine` is as of the engine's last
    heartbeat, except for its requests, which are those of now. `counters` are those of all adapters
    since the start of the log.
    """
    tiers = {tier.name: tier for tier in status.tiers}
    host, pinned, device = tiers["host"], tiers["pinned"], tiers["device"]
    counters, engine = status.counters, status.engine
    activations = _durations(counters.activations, counters.write_ns)
    switches = _durations(counters.misses, counters.wait_ns)
    return {
        "adapters": {
            "registered": host.count,
            "active": device.count,
            "capacity": host.count_max,
            "utilization": _ratio(device.count, device.count_max),
            "host_utilization": _ratio(host.count, host.count_max),
        },
        "memory": {
            "adapter_memory_mb": (host.size_bytes + pinned.size_bytes) / MEBIBYTE,
            "gpu_memory_usage": engine.allocated_bytes / MEBIBYTE,
            "memory_efficiency": _ratio(device.size_bytes, device.size_bytes_max),
            "tiers": {name: msgspec.structs.asdict(tier) for name, tier in tiers.items()},
            "device": {
                "size_bytes": device.size_bytes_max,
                "free_bytes": device.size_bytes_max - device.size_bytes,
            },
        },
        "performance": {
            "avg_activation_time": activations["average_seconds"],
            "avg_switching_time": switches["average_seconds"],
            "activations": activations,
            "switches": switches,
            "loads": _durations(counters.loads, counters.load_ns),
            "hits": counters.hits,
            "misses": counters.misses,
            "evictions": counters.evictions,
            "punica_kernel_enabled": bool(engine.kernels),
            "punica_kernels": engine.kernels,
        },
        "engine": msgspec.structs.asdict(engine),
        "counters": msgspec.structs.asdict(counters),
    }


def _durations(count: int, total_ns: int) -> dict[str, float]:
    return {
        "count": count,
        "seconds": total_ns / _SECOND_NS,
        "average_seconds": _ratio(total_ns, count) / _SECOND_NS,
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
