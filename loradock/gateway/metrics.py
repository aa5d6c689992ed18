"""`GET /metrics`: two tables of metric families in the text format of Prometheus.

`loradock_families` has LoRADock's own names: what the controller counted and holds, equal in all
gateways, and the events since this gateway started. `vllm_families` has the names and labels of
vLLM, for its dashboards, alerts and routers; docs/from-vllm.md lists them.

Each scrape shows what the controller reports after the scrape arrived; those that arrive during one
query for it share the next. If the controller does not answer within `STATUS_WAIT_S`, its families
are absent: an old value would be taken for a current one.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Final, NamedTuple, get_args

from prometheus_client import PlatformCollector, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.responses import Response

from loradock.gateway.adapters.follower import AdapterTable, EventTotals, Follower
from loradock.gateway.adapters.models import ModelNames
from loradock.gateway.http.endpoint import get
from loradock.gateway.recorder import Histogram, Recorder, unix_seconds
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, AdapterState
from loradock.messages.requests import StatusShown
from loradock.messages.views import (
    DURATION_BOUNDS_S,
    PREEMPTION_BOUNDS,
    TOKEN_BOUNDS,
    AdapterCounters,
    Distribution,
    EngineStatistics,
)

STATUS_WAIT_S: Final = 1.0
"""The longest wait of a scrape for the controller: routers scrape several times a second."""

OTHER: Final = "other"
BASE: Final = "base"

_SECOND_NS: Final = 1_000_000_000
_ENGINE: Final = "0"
_TRANSITIONS: Final = {
    "check": "checks",
    "load": "loads",
    "stage": "stagings",
    "write": "activations",
}
"""Transition -> the counter of how often it was made."""

Value = float | Histogram


class Family(NamedTuple):
    """A row of a table: a family of one type.

    `values`: one value, or values by what the labels are. `labels` are names.
    """

    make: Callable[..., Any]
    name: str
    text: str
    values: Value | Mapping[Any, Value]
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, values: Any, *labels: str) -> Family:
    return Family(GaugeMetricFamily, name, text, values, labels)


def _counter(name: str, text: str, values: Any, *labels: str) -> Family:
    return Family(CounterMetricFamily, name, text, values, labels)


def _histogram(name: str, text: str, histogram: Histogram) -> Family:
    return Family(HistogramMetricFamily, name, text, histogram)


def metric_of(family: Family, common: Mapping[str, str]) -> Metric:
    """Return a family whose samples have `common` labels before their own."""
    metric: Metric = family.make(family.name, family.text, labels=[*common, *family.labels])
    values = family.values if isinstance(family.values, Mapping) else {(): family.values}
    for key, value in values.items():
        labels = [*common.values(), *((key,) if isinstance(key, str) else key)]
        if isinstance(value, Histogram):
            metric.add_metric(labels, value.buckets(), value.sum)  # type: ignore[attr-defined]
        else:
            metric.add_metric(labels, value)  # type: ignore[attr-defined]
    return metric


class Metrics:
    """The endpoint; `adapters_max` bounds the adapters that have a label."""

    def __init__(
        self,
        follower: Follower,
        recorder: Recorder,
        names: ModelNames,
        adapters_max: int,
        *,
        has_vllm: bool = True,
    ) -> None:
        self._follower = follower
        self._table = follower.table
        self._recorder = recorder
        self._names = names
        self._adapters_max = adapters_max
        self._has_vllm = has_vllm
        self._process = (ProcessCollector(registry=None), PlatformCollector(registry=None))

    @get("/metrics", media_type="text/plain", access="public")
    async def metrics(self) -> Response:
        """Metrics for Prometheus."""
        status = await self._follower.status_now(STATUS_WAIT_S)
        of_process = chain.from_iterable(one.collect() for one in self._process)
        content = generate_latest(_Families(chain(self.of(status), of_process)))
        return Response(content, media_type=CONTENT_TYPE_LATEST)

    def of(self, status: StatusShown | None) -> Iterator[Metric]:
        """Yield every family; without a status, those that this gateway knows by itself."""
        for family in loradock_families(self._table, status, self._adapters_max):
            yield metric_of(family, {})
        if not self._has_vllm:
            return
        common = {"model_name": self._names.base, "engine": _ENGINE}
        families = [*_of_gateway(self._recorder, self._table.totals)]
        if status is not None:
            families += _of_server(status, self._adapters_max)
        for family in families:
            yield metric_of(family, {} if family.name in _WITHOUT_MODEL else common)


class _Families(Collector):
    """The families of one scrape."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        """Return the families."""
        return self._families


# LoRADock's own names.


def loradock_families(
    table: AdapterTable, status: StatusShown | None, adapters_max: int
) -> Iterator[Family]:
    """Yield the families under LoRADock's names."""
    yield _gauge(
        "loradock_synced",
        "Whether this gateway follows the controller's events.",
        float(table.synced),
    )
    yield _gauge(
        "loradock_controller_up",
        "Whether the controller answered this scrape; its families are absent otherwise.",
        float(status is not None),
    )
    if status is not None:
        yield from _of_controller(status)
        yield from _of_counters(status.counters)
        # Before the first heartbeat nothing is known, and zeros would be wrong.
        if status.engine.kernels:
            yield from _of_engine(status.engine)
    yield from _of_events(table.totals)
    yield _counter(
        "loradock_requests",
        'Requests of known adapters that ended; those with the fewest are "other".',
        dict(sorted(_requests(table.totals.requests, adapters_max).items())),
        "adapter",
        "outcome",
    )


def _of_controller(status: StatusShown) -> Iterator[Family]:
    counts, uses = dict(status.states), status.uses
    states = {state: counts.get(state, 0) for state in get_args(AdapterState)}
    leases = sum(use.leases for use in uses)
    tiers = status.tiers
    for name, text, values in (
        ("leases", "Requests that keep their adapter in its slot.", leases),
        (
            "requests_waiting_for_residency",
            "Requests that wait for an adapter to reach its slot.",
            status.waiting,
        ),
        ("adapters_held", "Adapters exempt from eviction.", status.held),
        ("requests_pending", "Requests without an answer.", status.requests),
        ("operations", "Operations of the engine in flight.", status.operations),
        ("engine_up", "Whether an engine is attached.", float(bool(status.engine_id))),
        ("log_seq", "Number of the last input in the log.", status.seq),
        ("log_bytes", "Size of the log.", status.log_bytes),
        ("log_writable", "Whether the log can be written.", float(not status.log_error)),
        ("disk_free_bytes", "Free space on the log's disk.", status.disk_free_bytes),
        ("ready", "Whether new work is taken.", float(not status.unready)),
        ("snapshot_age_seconds", "Age of the newest snapshot.", status.snapshot_age_ms / 1000),
        ("epoch", "Number of the controller's start.", status.epoch),
    ):
        yield _gauge(f"loradock_{name}", text, values)
    yield _gauge("loradock_adapters", "Adapters by state.", states, "state")
    for name, text, field in (
        ("tier_bytes", "Bytes in use per tier.", "size_bytes"),
        ("tier_bytes_max", "Budget per tier.", "size_bytes_max"),
        ("tier_adapters", "Adapters per tier; on the device, slots.", "count"),
        ("tier_adapters_max", "Bound on adapters per tier; 0: none.", "count_max"),
    ):
        by_tier = {tier.name: getattr(tier, field) for tier in tiers}
        yield _gauge(f"loradock_{name}", text, by_tier, "tier")
    yield _counter("loradock_answered", "Requests that were answered.", status.answered)
    yield _counter("loradock_refused", "Requests that were refused.", status.refused)


def _of_counters(counters: AdapterCounters) -> Iterator[Family]:
    """Yield what was counted of all adapters since the log began."""
    yield _counter(
        "loradock_transitions",
        "Moves of adapters towards a slot.",
        {name: getattr(counters, count) for name, count in _TRANSITIONS.items()},
        "transition",
    )
    yield _counter(
        "loradock_transition_seconds",
        "Time of the engine for moves of adapters towards a slot.",
        {name: getattr(counters, f"{name}_ns") / _SECOND_NS for name in _TRANSITIONS},
        "transition",
    )
    stalls_ns = {"suffered": counters.stall_ns, "caused": counters.stall_caused_ns}
    yield _counter(
        "loradock_stall_seconds",
        "Waits of adapters for room that others used.",
        {role: time_ns / _SECOND_NS for role, time_ns in stalls_ns.items()},
        "role",
    )
    for name, text, value in (
        ("stalls", "Waits of adapters for room.", counters.stalls),
        ("slot_hits", "Requests that found their adapter in a slot.", counters.hits),
        ("slot_misses", "Requests that did not find their adapter in a slot.", counters.misses),
        ("prefetches", "Requests to prefetch.", counters.prefetches),
        (
            "residency_wait_seconds",
            "Waits of requests for their adapters.",
            counters.wait_ns / _SECOND_NS,
        ),
        ("policy_evictions", "Adapters moved down for others.", counters.evictions),
        ("served", "Inferences that ended.", counters.served),
        (
            "served_prompt_tokens",
            "Tokens of the prompts of inferences that ended.",
            counters.prompt_tokens,
        ),
        (
            "served_output_tokens",
            "Tokens of the outputs of inferences that ended.",
            counters.output_tokens,
        ),
        ("prefix_hits", "Prompts that reused another one's KV cache.", counters.prefix_hits),
        ("prefix_tokens", "Tokens of prompts whose KV cache was reused.", counters.prefix_tokens),
    ):
        yield _counter(f"loradock_{name}", text, value)


def _of_engine(engine: EngineStatistics) -> Iterator[Family]:
    """Yield what the engine measured since its start; a new engine begins again."""
    for name, text, value in (
        ("engine_steps", "Forward passes.", engine.steps),
        ("engine_step_seconds", "Time of forward passes.", engine.step_ns / _SECOND_NS),
        ("engine_preemptions", "Requests that waited again.", engine.preempted),
        ("slot_writes", "Adapters copied into slots.", engine.slot_writes),
        ("slot_resets", "Slots that were cleared.", engine.slot_resets),
    ):
        yield _counter(f"loradock_{name}", text, value)
    for name, text, value in (
        ("engine_running", "Requests in the batch.", engine.running),
        ("engine_waiting", "Requests in the engine's queue.", engine.waiting),
        ("kv_cache_bytes", "Memory of keys and values.", engine.kv_bytes),
        ("kv_cache_bytes_max", "Budget of keys and values; 0: none.", engine.kv_bytes_max),
        ("arena_bytes", "Memory of adapters on the device in use.", engine.arena_bytes),
        ("arena_bytes_max", "Memory reserved for adapters on the device.", engine.arena_bytes_max),
        (
            "device_allocated_bytes",
            "Memory that the engine allocated on a GPU.",
            engine.allocated_bytes,
        ),
    ):
        yield _gauge(f"loradock_{name}", text, value)


def _of_events(totals: EventTotals) -> Iterator[Family]:
    since = "since this gateway started"
    yield _histogram(
        "loradock_load_seconds",
        f"From an adapter's accepted files to its weights on the host {since}.",
        totals.load_s,
    )
    for name, text, value in (
        ("loads", "Adapters loaded to the host", totals.loads),
        ("stagings", "Adapters staged", totals.stagings),
        ("activations", "Slots written", totals.activations),
        ("engine_starts", "Engines attached", totals.engines),
        ("event_gaps", "Gaps in the events", totals.gaps),
        ("prompt_tokens", "Tokens of prompts", totals.prompt_tokens),
        ("output_tokens", "Tokens generated", totals.output_tokens),
    ):
        yield _counter(f"loradock_{name}", f"{text} {since}.", value)
    for name, text, label, counts in (
        ("evictions", "Evictions", "reason", totals.evictions),
        ("failures", "Failed operations", "code", totals.failures),
    ):
        yield _counter(f"loradock_{name}", f"{text} {since}.", dict(sorted(counts.items())), label)


def _requests(
    requests: Mapping[str, Mapping[str, int]], adapters_max: int
) -> Counter[tuple[str, str]]:
    """Return the counts by adapter and outcome: of `adapters_max` adapters at most, and `OTHER`."""
    kept = top_names({name: sum(one.values()) for name, one in requests.items()}, adapters_max)
    bounded: Counter[tuple[str, str]] = Counter()
    for adapter, outcomes in requests.items():
        for outcome, count in outcomes.items():
            bounded[(adapter or BASE) if adapter in kept else OTHER, outcome] += count
    return bounded


def top_names(counts: Mapping[str, int], names_max: int) -> frozenset[str]:
    """Return the names with the largest counts; equal counts are in order of name."""
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return frozenset(ordered[:names_max])


# The names of vLLM.

_REASONS: Final = ("stop", "length", "abort", "error")
_WITHOUT_MODEL: Final = ("vllm:lora_requests_info", "vllm:cache_config_info")


def _of_gateway(recorder: Recorder, totals: EventTotals) -> Iterator[Family]:
    """Yield the families about the requests of this gateway."""
    yield _counter("vllm:prompt_tokens", "Tokens of prompts.", recorder.prompt_tokens)
    yield _counter("vllm:generation_tokens", "Tokens generated.", recorder.output_tokens)
    counts = {
        **{reason: recorder.finished[reason] for reason in _REASONS},
        "abort": recorder.finished["cancelled"] + recorder.aborted,
        "error": recorder.failed,
    }
    yield _counter("vllm:request_success", "Requests by how they ended.", counts, "finished_reason")
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
            totals.load_s,
        ),
    ):
        yield _histogram(f"vllm:{name}", text, histogram)


def _of_server(status: StatusShown, adapters_max: int) -> Iterator[Family]:
    """Yield the families about the whole server."""
    yield from _of_slots(status, adapters_max)
    waiting = {"capacity": status.queued, "deferred": status.waiting}
    yield _gauge("vllm:num_requests_running", "Requests in the engine's batch.", status.running)
    yield _gauge(
        "vllm:num_requests_waiting",
        "Requests that wait in the engine or for a slot.",
        status.queued + status.waiting,
    )
    yield _gauge(
        "vllm:num_requests_waiting_by_reason",
        "Waiting requests: capacity, in the engine; deferred, for a slot.",
        waiting,
        "reason",
    )
    if status.engine.kernels:
        yield from _of_steps(status.engine)
        yield from _of_cache(status.engine, status.dtype)


def _of_slots(status: StatusShown, adapters_max: int) -> Iterator[Family]:
    in_slots = sorted(use.adapter for use in status.uses if use.slot != NO_SLOT)
    waiting = [use.adapter for use in status.uses if use.queued or use.waiting]
    states = dict(status.states)
    on_host = sum(states.get(state, 0) for state in (CPU_CACHED, PINNED, GPU_SLOT))
    slots = next((tier.count_max for tier in status.tiers if tier.name == "device"), 0)
    # A router takes a name that is missing for an adapter that has to be loaded first, so those in
    # slots are all named: there are no more of them than slots.
    info = (str(slots), joined(in_slots, len(in_slots)), joined(waiting, adapters_max))
    yield _gauge(
        "vllm:lora_requests_info",
        "Adapters that are ready in a slot, and those with requests that wait; the value is "
        "the time.",
        {info: unix_seconds()},
        *("max_lora", "running_lora_adapters", "waiting_lora_adapters"),
    )
    loaded = dict.fromkeys(in_slots[:adapters_max], 1)
    if len(in_slots) > adapters_max:
        loaded[OTHER] = len(in_slots) - adapters_max
    yield _gauge("vllm:lora_adapter_loaded", "Adapters in slots.", loaded, "lora_name")
    yield _gauge("vllm:num_gpu_loaded_lora_adapters", "Adapters in slots.", len(in_slots))
    yield _gauge("vllm:num_cpu_loaded_lora_adapters", "Adapters on the host.", on_host)
    yield _gauge("vllm:max_gpu_lora_adapters", "Slots.", slots)


def joined(names: Iterable[str], names_max: int) -> str:
    """Return names between commas, and `OTHER` for those beyond the bound."""
    ordered = sorted(names)
    kept = ordered[:names_max]
    return ",".join([*kept, *([OTHER] if len(ordered) > names_max else [])])


def _of_steps(engine: EngineStatistics) -> Iterator[Family]:
    yield _counter("vllm:num_preemptions", "Requests that waited again.", engine.preempted)
    queue = Distribution(engine.queue_ns, engine.queue_counts)
    for name, text, found in (
        ("queue_time", "Time in the engine's queue before the first step.", queue),
        ("prefill_time", "From the first step to the first token.", engine.prefill),
        ("decode_time", "From the first token to the end.", engine.decode),
        ("inference_time", "From the first step to the end.", engine.inference),
    ):
        seconds = _histogram_of(found, DURATION_BOUNDS_S, _SECOND_NS)
        yield _histogram(f"vllm:request_{name}_seconds", text, seconds)
    yield _histogram(
        "vllm:request_num_preemptions",
        "How often a request waited again.",
        _histogram_of(engine.preemptions, PREEMPTION_BOUNDS),
    )
    yield _histogram(
        "vllm:request_prefill_kv_computed_tokens",
        "Computed tokens of a prompt.",
        _histogram_of(engine.computed_tokens, TOKEN_BOUNDS),
    )


def _histogram_of(found: Distribution, bounds: Sequence[float], unit: int = 1) -> Histogram:
    return Histogram(bounds, found.counts, found.total / unit)


def _of_cache(engine: EngineStatistics, dtype: str) -> Iterator[Family]:
    usage = engine.kv_bytes / engine.kv_bytes_max if engine.kv_bytes_max else 0.0
    yield _gauge("vllm:kv_cache_usage_perc", "Part of the KV cache in use; 1: all.", usage)
    if engine.kv_blocks:
        config = {
            "engine": _ENGINE,
            "block_size": str(engine.kv_block_tokens),
            "num_gpu_blocks": str(engine.kv_blocks),
            "cache_dtype": dtype,
            "enable_prefix_caching": str(engine.shares_prefixes),
        }
        yield _gauge(
            "vllm:cache_config_info",
            "The size of the KV cache, in labels; the value is 1.",
            {tuple(config.values()): 1},
            *config,
        )
    if not engine.shares_prefixes:
        return
    queries, hits = engine.prefix_queries, engine.prefix_hits
    sources = {"local_compute": queries - hits, "local_cache_hit": hits, "external_kv_transfer": 0}
    yield _counter("vllm:prefix_cache_queries", "Tokens of prompts that were looked up.", queries)
    yield _counter("vllm:prefix_cache_hits", "Those that were found.", hits)
    yield _counter("vllm:prompt_tokens_cached", "Tokens of prompts that were found.", hits)
    yield _counter(
        "vllm:prompt_tokens_by_source", "Tokens of prompts by source.", sources, "source"
    )
