"""Metric families under the names and labels of vLLM, for its dashboards, alerts and routers.

Those in `_of_gateway` describe the requests of this gateway; all others the whole server.
`model_name` is the base model. docs/from-vllm.md lists which of vLLM's families are served.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)

from loradock.gateway.adapters.names import ModelNames
from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.histogram import Histogram
from loradock.gateway.metrics.families import OTHER, joined
from loradock.gateway.metrics.recorder import Recorder
from loradock.gateway.timestamps import unix_seconds
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED
from loradock.messages.requests import StatusShown
from loradock.messages.views import (
    DURATION_BOUNDS_S,
    PREEMPTION_BOUNDS,
    TOKEN_BOUNDS,
    Distribution,
    EngineStatistics,
)

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

    def families(self, status: StatusShown | None) -> Iterator[Metric]:
        """Yield every family; without a status, those of this gateway alone."""
        yield from self._of_gateway()
        if status is not None:
            yield from self._requests(status)
            yield from self._adapters(status)
            # Before the first heartbeat nothing is known, and zeros would be wrong.
            if status.engine.kernels:
                yield from self._engine(status.engine)
                yield from self._cache(status.engine, status.dtype)

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

    def _histogram(self, name: str, text: str, histogram: Histogram) -> HistogramMetricFamily:
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=_LABELS)
        family.add_metric(self._values, histogram.buckets(), histogram.sum)
        return family

    def _durations(self, name: str, text: str, found: Distribution) -> HistogramMetricFamily:
        histogram = Histogram(DURATION_BOUNDS_S, found.counts, found.total / 1e9)
        return self._histogram(name, text, histogram)

    def _counts(
        self, name: str, text: str, found: Distribution, bounds: Sequence[int]
    ) -> HistogramMetricFamily:
        return self._histogram(name, text, Histogram(bounds, found.counts, found.total))

    def _requests(self, status: StatusShown) -> Iterator[Metric]:
        waiting = status.queued + status.waiting
        yield self._gauge("num_requests_running", "Requests in the engine's batch.", status.running)
        yield self._gauge(
            "num_requests_waiting", "Requests that wait in the engine or for a slot.", waiting
        )
        family = GaugeMetricFamily(
            "vllm:num_requests_waiting_by_reason",
            "Waiting requests: capacity, in the engine; deferred, for a slot.",
            labels=[*_LABELS, "reason"],
        )
        family.add_metric([*self._values, "capacity"], status.queued)
        family.add_metric([*self._values, "deferred"], status.waiting)
        yield family

    def _adapters(self, status: StatusShown) -> Iterator[Metric]:
        in_slots = [use.adapter for use in status.uses if use.slot != NO_SLOT]
        states = dict(status.states)
        on_host = sum(states.get(state, 0) for state in (CPU_CACHED, PINNED, GPU_SLOT))
        slots = next((tier.count_max for tier in status.tiers if tier.name == "device"), 0)
        waiting = [use.adapter for use in status.uses if use.queued or use.waiting]
        yield self._info(slots, in_slots, waiting)
        yield self._loaded(in_slots)
        yield self._gauge("num_gpu_loaded_lora_adapters", "Adapters in slots.", len(in_slots))
        yield self._gauge("num_cpu_loaded_lora_adapters", "Adapters on the host.", on_host)
        yield self._gauge("max_gpu_lora_adapters", "Slots.", slots)

    def _info(self, slots: int, in_slots: Sequence[str], waiting: Iterable[str]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_requests_info",
            "Adapters that are ready in a slot, and those with requests that wait; the value is "
            "the time.",
            labels=["max_lora", "running_lora_adapters", "waiting_lora_adapters"],
        )
        # A router takes a name that is missing for an adapter that has to be loaded first, so those
        # in slots are all named: their number is that of the slots.
        names = [joined(in_slots, len(in_slots)), joined(waiting, self._adapters_max)]
        family.add_metric([str(slots), *names], unix_seconds())
        return family

    def _loaded(self, in_slots: Sequence[str]) -> Metric:
        family = GaugeMetricFamily(
            "vllm:lora_adapter_loaded",
            "Adapters in slots.",
            labels=[*_LABELS, "lora_name"],
        )
        names = sorted(in_slots)
        for name in names[: self._adapters_max]:
            family.add_metric([*self._values, name], 1)
        if len(names) > self._adapters_max:
            more = len(names) - self._adapters_max
            family.add_metric([*self._values, OTHER], more)
        return family

    def _engine(self, engine: EngineStatistics) -> Iterator[Metric]:
        yield self._counter("num_preemptions", "Requests that waited again.", engine.preempted)
        yield self._durations(
            "request_queue_time_seconds",
            "Time in the engine's queue before the first step.",
            Distribution(engine.queue_ns, engine.queue_counts),
        )
        yield self._durations(
            "request_prefill_time_seconds", "From the first step to the first token.",
            engine.prefill,
        )  # fmt: skip
        yield self._durations(
            "request_decode_time_seconds", "From the first token to the end.", engine.decode
        )
        yield self._durations(
            "request_inference_time_seconds", "From the first step to the end.", engine.inference
        )
        yield self._counts(
            "request_num_preemptions", "How often a request waited again.",
            engine.preemptions, PREEMPTION_BOUNDS,
        )  # fmt: skip
        yield self._counts(
            "request_prefill_kv_computed_tokens", "Computed tokens of a prompt.",
            engine.computed_tokens, TOKEN_BOUNDS,
        )  # fmt: skip

    def _cache(self, engine: EngineStatistics, dtype: str) -> Iterator[Metric]:
        usage = engine.kv_bytes / engine.kv_bytes_max if engine.kv_bytes_max else 0.0
        yield self._gauge("kv_cache_usage_perc", "Part of the KV cache in use; 1: all.", usage)
        if engine.kv_blocks:
            yield _config(
                {
                    "engine": _ENGINE,
                    "block_size": str(engine.kv_block_tokens),
                    "num_gpu_blocks": str(engine.kv_blocks),
                    "cache_dtype": dtype,
                    "enable_prefix_caching": str(engine.shares_prefixes),
                }
            )
        if not engine.shares_prefixes:
            return
        hits = engine.prefix_hits
        yield self._counter(
            "prefix_cache_queries", "Tokens of prompts that were looked up.", engine.prefix_queries
        )
        yield self._counter("prefix_cache_hits", "Those that were found.", hits)
        yield self._counter("prompt_tokens_cached", "Tokens of prompts that were found.", hits)
        computed = engine.prefix_queries - hits
        sources = {"local_compute": computed, "local_cache_hit": hits, "external_kv_transfer": 0}
        yield self._by_label(
            "prompt_tokens_by_source", "Tokens of prompts by source.", "source", sources
        )

    def _of_gateway(self) -> Iterator[Metric]:
        recorder = self._recorder
        yield self._counter("prompt_tokens", "Tokens of prompts.", recorder.prompt_tokens)
        yield self._counter("generation_tokens", "Tokens generated.", recorder.output_tokens)
        counts = {
            **{reason: recorder.finished[reason] for reason in _REASONS},
            "abort": recorder.finished["cancelled"] + recorder.aborted,
            "error": recorder.failed,
        }
        yield self._by_label(
            "request_success", "Requests by how they ended.", "finished_reason", counts
        )
        for name, text, histogram in (
            ("time_to_first_token_seconds", "Time to the first token.", recorder.first_token),
            ("inter_token_latency_seconds", "Time between tokens.", recorder.between_tokens),
            (
                "request_time_per_output_token_seconds",
                "Mean time between the tokens of an output.",
                recorder.per_output_token,
            ),
            ("e2e_request_latency_seconds", "Time of a whole request.", recorder.request),
            ("request_prompt_tokens", "Tokens of a prompt.", recorder.prompt_lengths),
            ("request_generation_tokens", "Tokens of an output.", recorder.output_lengths),
            (
                "request_max_num_generation_tokens",
                "Tokens of the longest output of a request.",
                recorder.longest_outputs,
            ),
            ("request_params_n", "The parameter n.", recorder.outputs),
            ("request_params_max_tokens", "The parameter max_tokens.", recorder.max_tokens),
            (
                "lora_adapter_load_seconds",
                "From an adapter's accepted files to its weights on the host.",
                self._table.totals.load_s,
            ),
        ):
            yield self._histogram(name, text, histogram)

    def _by_label(
        self, name: str, text: str, label: str, counts: Mapping[str, int]
    ) -> CounterMetricFamily:
        family = CounterMetricFamily(f"vllm:{name}", text, labels=[*_LABELS, label])
        for value, count in counts.items():
            family.add_metric([*self._values, value], count)
        return family


def _config(labels: Mapping[str, str]) -> Metric:
    family = GaugeMetricFamily(
        "vllm:cache_config_info",
        "The size of the KV cache, in labels; the value is 1.",
        labels=[*labels],
    )
    family.add_metric([*labels.values()], 1)
    return family
