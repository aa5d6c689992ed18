"""Metric families under the names and labels of vLLM, for its dashboards and alerts.

They describe the requests of this gateway; only the gauges describe the whole controller.
`model_name` is the base model.
"""

from collections.abc import Iterator
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from gateway.adapters.names import ModelNames
from gateway.adapters.table import AdapterTable
from gateway.histogram import Histogram
from gateway.metrics.families import OTHER, joined
from gateway.metrics.recorder import Recorder
from gateway.timestamps import unix_seconds
from messages.ids import CPU_CACHED, GPU_SLOT, PINNED
from messages.views import QUEUE_BOUNDS_S, AdapterView, EngineStatistics

_LABELS: Final = ["model_name", "engine"]
_ENGINE: Final = "0"
_REASONS: Final = ("stop", "length", "abort", "error")


class VllmFamilies:
    """The compatible set; `adapters_max` bounds the adapters that labels name."""

    def __init__(
        self, table: AdapterTable, recorder: Recorder, names: ModelNames, adapters_max: int
    ) -> None:
        self._table = table
        self._recorder = recorder
        self._names = names
        self._adapters_max = adapters_max

    def families(self) -> Iterator[Metric]:
        """Yield every family."""
        yield from self._queue()
        yield from self._adapters()
        yield from self._requests()
        yield from self._durations()

    @property
    def _values(self) -> list[str]:
        return [self._names.base, _ENGINE]

    def _gauge(self, name: str, text: str, value: float) -> GaugeMetricFamily:
        family = GaugeMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _queue(self) -> Iterator[Metric]:
        status = self._table.status
        pending = 0 if status is None else status.requests
        is_served = status is not None and bool(status.engine_id)
        waiting = sum(view.waiting for view in self._table.views.values()) if is_served else pending
        running = max(0, pending - waiting)
        yield self._gauge("num_requests_running", "Requests that are executed.", running)
        yield self._gauge("num_requests_waiting", "Requests that wait for an adapter.", waiting)
        engine = EngineStatistics() if status is None else status.engine
        usage = engine.kv_bytes / engine.kv_bytes_max if engine.kv_bytes_max else 0.0
        yield self._gauge("kv_cache_usage_perc", "Part of the KV cache in use; 1: all.", usage)
        yield self._counter("num_preemptions", "Requests that waited again.", engine.preempted)
        queued = Histogram(QUEUE_BOUNDS_S, engine.queue_counts, engine.queue_ns / 1e9)
        yield self._histogram(
            "request_queue_time_seconds",
            "Time in the engine's queue before the first step.",
            queued,
        )

    def _adapters(self) -> Iterator[Metric]:
        views = self._table.views.values()
        in_slots = [view for view in views if view.state == GPU_SLOT]
        on_host = [view for view in views if view.state in (CPU_CACHED, PINNED, GPU_SLOT)]
        slots = self._slots_max()
        yield self._info(slots)
        yield self._loaded(in_slots)
        yield self._gauge("num_gpu_loaded_lora_adapters", "Adapters in slots.", len(in_slots))
        yield self._gauge("num_cpu_loaded_lora_adapters", "Adapters on the host.", len(on_host))
        yield self._gauge("max_gpu_lora_adapters", "Slots.", slots)

    def _info(self, slots: int) -> Metric:
        running = [view.adapter for view in self._table.views.values() if view.leases]
        waiting = [view.adapter for view in self._table.views.values() if view.waiting]
        labels = ["max_lora", "running_lora_adapters", "waiting_lora_adapters"]
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters of running and of waiting requests; the value is the time.",
            labels=labels,
        )
        shown = [joined(names, self._adapters_max) for names in (running, waiting)]
        family.add_metric([str(slots), *shown], unix_seconds())
        return family

    def _loaded(self, in_slots: list[AdapterView]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Adapters in slots.",
            labels=[*_LABELS, "lora_name"],
        )
        names = sorted(view.adapter for view in in_slots)
        for name in names[: self._adapters_max]:
            family.add_metric([*self._values, name], 1)
        if len(names) > self._adapters_max:
            more = len(names) - self._adapters_max
            family.add_metric([*self._values, OTHER], more)
        return family

    def _slots_max(self) -> int:
        tiers = () if self._table.status is None else self._table.status.tiers
        return next((tier.count_max for tier in tiers if tier.name == "device"), 0)

    def _requests(self) -> Iterator[Metric]:
        recorder = self._recorder
        yield self._counter("prompt_tokens", "Tokens of prompts.", recorder.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", recorder.output_tokens)
        family = CounterMetricFamily(
            "vllm:request_success",
            "Requests by how they ended.",
            labels=[*_LABELS, "finished_reason"],
        )
        counts = {
            **{reason: recorder.finished[reason] for reason in _REASONS},
            "abort": recorder.finished["cancelled"] + recorder.aborted,
            "error": recorder.failed,
        }
        for reason in _REASONS:
            family.add_metric([*self._values, reason], counts[reason])
        yield family

    def _durations(self) -> Iterator[Metric]:
        recorder = self._recorder
        yield self._histogram(
            "time_to_first_token_seconds", "Time to the first token.", recorder.first_token
        )
        yield self._histogram(
            "inter_token_latency_seconds", "Time between tokens.", recorder.between_tokens
        )
        yield self._histogram(
            "e2e_request_latency_seconds", "Time of a whole request.", recorder.request
        )
        yield self._histogram(
            "lora_adapter_load_seconds",
            "From an adapter's accepted files to its weights on the host.",
            self._table.totals.load_s,
        )

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, histogram.buckets(), histogram.sum)
        return family
