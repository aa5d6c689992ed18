"""Metrics: readable by Prometheus' parser, consistent, growing, bounded, and documented."""

import math
import re
from collections import Counter
from types import SimpleNamespace
from typing import Any, Final, NamedTuple

import msgspec
import pytest
from prometheus_client.parser import text_string_to_metric_families

from loradock.gateway.adapters.follower import AdapterTable
from loradock.gateway.adapters.models import ModelNames
from loradock.gateway.metrics import Metrics, joined, top_names
from loradock.gateway.recorder import Histogram, Recorder
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.views import AdapterCounters, AdapterUse, EngineStatistics
from tests.support.gateway.served import Served, data_of
from tests.support.simulation.message_examples import example_of
from tests.support.sources import ROOT

VLLM = {
    *("vllm:lora_requests_info", "vllm:num_requests_running", "vllm:num_requests_waiting"),
    *("vllm:prompt_tokens", "vllm:generation_tokens", "vllm:request_success"),
    *("vllm:time_to_first_token_seconds", "vllm:inter_token_latency_seconds"),
    *("vllm:e2e_request_latency_seconds", "vllm:lora_adapter_loaded"),
    *("vllm:num_gpu_loaded_lora_adapters", "vllm:num_cpu_loaded_lora_adapters"),
    *("vllm:max_gpu_lora_adapters", "vllm:lora_adapter_load_seconds"),
    *("vllm:kv_cache_usage_perc", "vllm:request_queue_time_seconds", "vllm:num_preemptions"),
    *("vllm:num_requests_waiting_by_reason", "vllm:cache_config_info"),
    *("vllm:prefix_cache_queries", "vllm:prefix_cache_hits"),
}


def metrics(table: AdapterTable, adapters_max: int = 5) -> Any:
    follower: Any = SimpleNamespace(table=table)
    return Metrics(follower, Recorder(), ModelNames(("base",)), adapters_max)


def scrape(served: Served) -> Any:
    response = served.get("/metrics")
    assert response.headers["content-type"].startswith("text/plain")
    return {family.name: family for family in text_string_to_metric_families(response.text)}


def value(families: Any, name: Any, **labels: Any) -> Any:
    family = families[re.sub("_(total|count|sum|bucket)$", "", name)]
    found = [
        s.value for s in family.samples if s.name == name and labels.items() <= s.labels.items()
    ]
    return sum(found)


def counters(families: Any) -> Any:
    return {
        (sample.name, *sorted(sample.labels.items())): sample.value
        for family in families.values()
        if family.type in ("counter", "histogram") and "process" not in family.name
        for sample in family.samples
    }


def test_the_names_of_vllm_are_there(served: Served) -> None:
    families = scrape(served)
    assert set(families) >= VLLM
    assert value(families, "vllm:max_gpu_lora_adapters") == 8
    [info] = families["vllm:lora_requests_info"].samples
    assert set(info.labels) == {"max_lora", "running_lora_adapters", "waiting_lora_adapters"}


def test_the_states_are_those_of_the_controller(served: Served) -> None:
    families = scrape(served)
    assert value(families, "loradock_adapters", state="gpu-slot") == 1
    assert value(families, "loradock_adapters", state="evicted") == 1
    assert sum(sample.value for sample in families["loradock_adapters"].samples) == 2
    assert value(families, "loradock_tier_bytes", tier="device") == 4096


def test_counters_of_the_controller_and_of_its_engine_are_passed_on() -> None:
    engine = EngineStatistics(
        kernels="cpu", steps=7, kv_bytes=25, kv_bytes_max=100, queued=3, queue_ns=2_500_000_000,
        queue_counts=(1, *[0] * 6, 2, *[0] * 9),
    )  # fmt: skip
    counters = AdapterCounters(
        loads=4, load_ns=6_000_000_000, stall_ns=1_500_000_000, stall_caused_ns=1_500_000_000,
        prefix_tokens=8,
    )  # fmt: skip
    table = AdapterTable()
    status = msgspec.structs.replace(example_of(rq.StatusShown), counters=counters, engine=engine)
    table.reset(rq.AdaptersListed("", (), 0))
    families = {family.name: family for family in metrics(table).of(status)}
    assert value(families, "loradock_transitions_total", transition="load") == 4
    assert value(families, "loradock_transition_seconds_total", transition="load") == 6
    for role in ("caused", "suffered"):
        assert value(families, "loradock_stall_seconds_total", role=role) == 1.5
    assert value(families, "loradock_prefix_tokens_total") == 8
    assert value(families, "loradock_engine_steps_total") == 7
    assert value(families, "vllm:kv_cache_usage_perc") == 0.25
    assert value(families, "vllm:request_queue_time_seconds_count") == 3
    assert value(families, "vllm:request_queue_time_seconds_sum") == 2.5
    assert value(families, "vllm:request_queue_time_seconds_bucket", le="0.5") == 1
    assert value(families, "vllm:request_queue_time_seconds_bucket", le="1.0") == 3


def test_requests_are_measured_and_counters_only_grow(served: Served) -> None:
    before = scrape(served)
    for _ in range(3):
        served.post("/v1/completions", {"prompt": "p"})
    data_of(served.events("/v1/completions", {"prompt": ["p", "q"], "stream": True}))
    after = scrape(served)

    def grown(name: Any, **labels: Any) -> Any:
        return value(after, name, **labels) - value(before, name, **labels)

    assert grown("vllm:request_success_total", finished_reason="length") == 5
    assert grown("vllm:prompt_tokens_total") == 5 * 4
    assert grown("vllm:generation_tokens_total") == 5 * 3
    assert grown("vllm:time_to_first_token_seconds_count") == 5
    assert grown("vllm:inter_token_latency_seconds_count") == 5 * 2
    assert grown("vllm:e2e_request_latency_seconds_count") == 5
    old, new = counters(before), counters(after)
    assert old.keys() <= new.keys()
    assert [name for name in old if new[name] < old[name]] == []


def test_a_failed_request_is_counted_as_such(served: Served) -> None:
    before = scrape(served)
    served.controller.answers[rq.Generate] = lambda request: rq.Refused(
        request.request_id, ErrorCode.OVERLOADED, "too many"
    )
    served.post("/v1/completions", {"prompt": "p"})
    name = "vllm:request_success_total"
    after = scrape(served)
    reason = {"finished_reason": "error"}
    assert value(after, name, **reason) == value(before, name, **reason) + 1


def test_poolings_are_measured_as_generations_are(served: Served) -> None:
    before = scrape(served)
    loads = []

    def on_embed(request: Any) -> Any:
        loads.append(served.get("/load").json()["server_load"])
        return rq.PoolingDone(request.request_id, None, "embed", 1, 5)

    served.controller.answers[rq.Embed] = on_embed
    served.post("/v1/embeddings", {"input": "a"})
    del served.controller.answers[rq.Embed]
    after = scrape(served)

    def grown(name: Any, **labels: Any) -> Any:
        return value(after, name, **labels) - value(before, name, **labels)

    assert (loads, served.get("/load").json()["server_load"]) == ([1], 0)
    assert grown("vllm:request_success_total", finished_reason="stop") == 1
    assert grown("vllm:prompt_tokens_total") == 5
    assert grown("vllm:e2e_request_latency_seconds_count") == 1


def test_times_between_tokens_are_those_of_one_output(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    recorder = Recorder()
    measurement = recorder.begin()
    for after, index, count in ((2, 0, 1), (2, 1, 1), (4, 0, 2), (6, 1, 1)):
        now[0] = 100.0 + after
        measurement.on_tokens(index, count)
    assert recorder.output_tokens == 5
    measurement.on_done(rq.GenerationDone("r", None, "length", 7, 5))
    # Output 0: two tokens after 2 s; output 1: one after 4 s.
    assert (recorder.first_token.sum, recorder.between_tokens.sum) == (4.0, 6.0)
    assert recorder.per_output_token.sum == 1.0 + 4.0
    assert (recorder.output_lengths.sum, recorder.longest_outputs.sum) == (5, 3)
    assert (recorder.output_tokens, recorder.active) == (5, 0)


def test_a_histogram_counts_like_a_list() -> None:
    histogram = Histogram((0.1, 1.0))
    for number in (0.05, 0.1, 0.5, 1.0, 2.0):
        histogram.observe(number)
    assert histogram.buckets() == [("0.1", 2.0), ("1.0", 4.0), ("+Inf", 5.0)]
    assert math.isclose(histogram.sum, 3.65)


def a_status(adapters: Any) -> Any:
    """Return a status with adapters that are in slots and have waiting requests."""
    uses = tuple(
        AdapterUse(f"a{number}", slot=number, queued=1) for number in reversed(range(adapters))
    )
    engine = EngineStatistics(kernels="cpu")
    return msgspec.structs.replace(example_of(rq.StatusShown), uses=uses, engine=engine)


def test_the_number_of_labels_is_bounded() -> None:
    table, status = AdapterTable(), a_status(1000)
    table.seq = 0
    for number in range(1000):
        for _ in range(1 + (number == 7)):
            event = ev.GenerationFinished(f"a{number}", "stop", 1, 1)
            table.apply(ev.Published(table.seq + 1, 0, event))
    by_name = {family.name: family for family in metrics(table, 3).of(status)}
    samples = by_name["loradock_requests"].samples
    counts = {sample.labels["adapter"]: sample.value for sample in samples}
    assert counts == {"a7": 2, "a0": 1, "a1": 1, "other": 997}
    loaded = by_name["vllm:lora_adapter_loaded"].samples
    assert {s.labels["lora_name"]: s.value for s in loaded} == {
        "a0": 1,
        "a1": 1,
        "a10": 1,
        "other": 997,
    }
    table.reset(rq.AdaptersListed("", (), 0))
    by_name = {family.name: family for family in metrics(table, 3).of(status)}
    assert by_name["loradock_requests"].samples == []
    [info] = by_name["vllm:lora_requests_info"].samples
    assert info.labels["waiting_lora_adapters"] == "a0,a1,a10,other"
    # A router takes an adapter that is not named for one that is not in a slot.
    assert info.labels["running_lora_adapters"].split(",") == sorted(s.adapter for s in status.uses)


@pytest.mark.parametrize(("names_max", "expected"), [(0, set()), (1, {"b"}), (5, {"a", "b"})])
def test_the_names_with_the_largest_counts_are_kept(names_max: int, expected: Any) -> None:
    assert top_names(Counter({"a": 1, "b": 2}), names_max) == expected


def test_names_are_joined_in_order() -> None:
    assert joined(["b", "a"], 2) == "a,b"
    assert joined([], 2) == ""


_, _, REST = (ROOT / "docs/from-vllm.md").read_text().partition("<!-- metrics: ")
TABLE, _, _ = REST.partition("<!-- end of the metrics -->")
COMMON: Final[dict[str, tuple[str, ...]]] = {
    "lora_requests_info": (),
    "cache_config_info": ("engine",),
}
"""Labels in addition to the table's; every other family has `model_name` and `engine`."""
ADDED: Final = re.findall("`vllm:([^`]+)`", TABLE.partition("there are also")[2])
"""Families under vLLM's prefix that vLLM's engine does not have."""


class DocumentedMetric(NamedTuple):
    """A family of vLLM's; `scope`: what it describes, `note`: what it counts, or why nothing."""

    name: str
    kind: str
    labels: set[str]
    scope: str
    note: str

    @property
    def is_served(self) -> bool:
        return self.scope != "not served"


ROW: Final = re.compile(r"^\| `vllm:([^`]+)` \| (\w+) \| (.*?) ?\| ([\w ]+) \| (.*?) ?\|$", re.M)
METRICS: Final = [
    DocumentedMetric(
        name,
        kind,
        {*COMMON.get(name, ("model_name", "engine")), *re.findall(r"\w+", labels)},
        scope,
        note,
    )
    for name, kind, labels, scope, note in ROW.findall(TABLE)
]


def families(served: Served) -> Any:
    served.post("/v1/completions", {"model": "upper", "prompt": "p"})
    found = text_string_to_metric_families(served.get("/metrics").text)
    return {family.name: family for family in found if family.name.startswith("vllm:")}


def test_what_is_served_is_in_the_table_and_nothing_else(served: Served) -> None:
    expected = {f"vllm:{one.name}" for one in METRICS if one.is_served}
    assert set(families(served)) == expected | {f"vllm:{name}" for name in ADDED}


def test_types_and_labels_are_those_of_the_table(served: Served) -> None:
    found = families(served)
    for one in METRICS:
        if one.is_served:
            family = found[f"vllm:{one.name}"]
            labels = {label for sample in family.samples for label in sample.labels} - {"le"}
            assert (family.type, labels) == (one.kind, one.labels), one.name


def test_what_is_not_served_has_a_reason_and_no_family_is_listed_twice() -> None:
    # A row that the pattern does not match is in no other test.
    assert len(METRICS) >= 45
    assert all(one.note for one in METRICS if not one.is_served)
    assert len({one.name for one in METRICS}) == len(METRICS)
