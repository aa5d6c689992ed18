"""Metric families under LoRADock's own names: what the controller counted and holds."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Final, get_args

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    Metric,
)

from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.metrics.controller_counters import counter_families, engine_families
from loradock.gateway.metrics.metric_types import counter, gauge, histogram, labelled_counter
from loradock.messages.ids import AdapterState
from loradock.messages.requests import StatusShown

OTHER: Final = "other"
BASE: Final = "base"


def top_names(counts: Mapping[str, int], names_max: int) -> frozenset[str]:
    """Return the names with the largest counts; equal counts are in order of name."""
    ordered = sorted(counts, key=lambda name: (-counts[name], name))
    return frozenset(ordered[:names_max])


class ControllerFamilies:
    """What the controller reports: adapters, tiers, log position, and the events since the start.

    `adapters_max` bounds the adapters with a label of their own.
    """

    def __init__(self, table: AdapterTable, adapters_max: int) -> None:
        self._table = table
        self._adapters_max = adapters_max

    def families(self, status: StatusShown | None) -> Iterator[Metric]:
        """Yield every family; without a status, those that this gateway knows by itself."""
        yield gauge(
            "loradock_synced",
            "Whether this gateway follows the controller's events.",
            float(self._table.synced),
        )
        yield gauge(
            "loradock_controller_up",
            "Whether the controller answered this scrape; its families are absent otherwise.",
            float(status is not None),
        )
        if status is not None:
            yield from self._adapters(status)
            yield from self._requests_now(status)
            yield from self._tiers(status)
            yield from self._controller(status)
        yield from self._events()
        yield self._requests()

    def _adapters(self, status: StatusShown) -> Iterator[Metric]:
        family = GaugeMetricFamily("loradock_adapters", "Adapters by state.", labels=["state"])
        counts = dict(status.states)
        for state in get_args(AdapterState):
            family.add_metric([state], counts.get(state, 0))
        yield family
        yield gauge("loradock_adapters_held", "Adapters exempt from eviction.", status.held)

    def _requests_now(self, status: StatusShown) -> Iterator[Metric]:
        uses = status.uses
        yield gauge(
            "loradock_leases",
            "Requests that the engine has with an adapter in a slot.",
            sum(use.leases for use in uses),
        )
        yield gauge(
            "loradock_requests_waiting_for_residency",
            "Requests that wait for an adapter to reach its slot.",
            sum(use.waiters for use in uses),
        )
        yield gauge("loradock_requests_pending", "Requests without an answer.", status.requests)
        yield gauge("loradock_operations", "Operations of the engine in flight.", status.operations)

    def _tiers(self, status: StatusShown) -> Iterator[Metric]:
        bounds = GaugeMetricFamily("loradock_tier_bytes_max", "Budget per tier.", labels=["tier"])
        sizes = GaugeMetricFamily("loradock_tier_bytes", "Bytes in use per tier.", labels=["tier"])
        counts = GaugeMetricFamily(
            "loradock_tier_adapters", "Adapters per tier; on the device, slots.", labels=["tier"]
        )
        most = GaugeMetricFamily(
            "loradock_tier_adapters_max", "Bound on adapters per tier; 0: none.", labels=["tier"]
        )
        for tier in status.tiers:
            sizes.add_metric([tier.name], tier.size_bytes)
            bounds.add_metric([tier.name], tier.size_bytes_max)
            counts.add_metric([tier.name], tier.count)
            most.add_metric([tier.name], tier.count_max)
        yield from (sizes, bounds, counts, most)

    def _controller(self, status: StatusShown) -> Iterator[Metric]:
        yield gauge("loradock_engine_up", "Whether an engine is attached.",
                    float(bool(status.engine_id)))  # fmt: skip
        yield from counter_families(status.counters)
        if status.engine.kernels:
            yield from engine_families(status.engine)
        yield gauge("loradock_log_seq", "Number of the last input in the log.", status.seq)
        yield gauge("loradock_log_bytes", "Size of the log.", status.log_bytes)
        age_s = status.snapshot_age_ms / 1000
        yield gauge("loradock_snapshot_age_seconds", "Age of the newest snapshot.", age_s)
        yield gauge("loradock_epoch", "Number of the controller's start.", status.epoch)
        yield counter("loradock_answered", "Requests that were answered.", status.answered)
        yield counter("loradock_refused", "Requests that were refused.", status.refused)

    def _events(self) -> Iterator[Metric]:
        totals = self._table.totals
        since = "since this gateway started"
        yield histogram(
            "loradock_load_seconds",
            f"From an adapter's accepted files to its weights on the host {since}.",
            totals.load_s,
        )
        yield counter("loradock_loads", f"Adapters loaded to the host {since}.", totals.loads)
        yield counter("loradock_stagings", f"Adapters staged {since}.", totals.stagings)
        yield counter("loradock_activations", f"Slots written {since}.", totals.activations)
        yield labelled_counter(
            "loradock_evictions", f"Evictions {since}.", "reason", totals.evictions
        )
        yield labelled_counter(
            "loradock_failures", f"Failed operations {since}.", "code", totals.failures
        )
        yield counter("loradock_engine_starts", f"Engines attached {since}.", totals.engines)
        yield counter("loradock_event_gaps", f"Gaps in the events {since}.", totals.gaps)
        yield counter("loradock_prompt_tokens", f"Tokens of prompts {since}.", totals.prompt_tokens)
        yield counter("loradock_output_tokens", f"Tokens generated {since}.", totals.output_tokens)

    def _requests(self) -> Metric:
        family = CounterMetricFamily(
            "loradock_requests",
            'Requests that ended, by adapter; those with the fewest are "other".',
            labels=["adapter", "outcome"],
        )
        for (adapter, outcome), count in sorted(self._bounded(self._table.totals.requests).items()):
            family.add_metric([adapter, outcome], count)
        return family

    def _bounded(self, requests: Mapping[tuple[str, str], int]) -> Counter[tuple[str, str]]:
        """Return the counts with at most `adapters_max` adapters, and `OTHER`."""
        totals: Counter[str] = Counter()
        for (adapter, _), count in requests.items():
            totals[adapter] += count
        kept = top_names(totals, self._adapters_max)
        bounded: Counter[tuple[str, str]] = Counter()
        for (adapter, outcome), count in requests.items():
            bounded[(adapter or BASE) if adapter in kept else OTHER, outcome] += count
        return bounded


def joined(names: Iterable[str], names_max: int) -> str:
    """Return names between commas, and `OTHER` for those beyond the bound."""
    ordered = sorted(names)
    kept = ordered[:names_max]
    return ",".join([*kept, *([OTHER] if len(ordered) > names_max else [])])
