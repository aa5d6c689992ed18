"""Spans of requests: names, the caller's context, the adapter's state, results, and failures."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
from opentelemetry.semconv._incubating.attributes import gen_ai_attributes
from opentelemetry.trace import SpanKind, StatusCode

from loradock.gateway.adapters.follower import AdapterTable
from loradock.gateway.adapters.models import ModelNames
from loradock.gateway.inference.traces import Traces
from loradock.gateway.server import gateway as gateway_module
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from tests.support.gateway.outputs import refuse
from tests.support.gateway.served import Served, serve_gateway
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.spans import TRACE_ID, TRACEPARENT, KeptSpans, parent_of
from tests.support.waiting import wait_until

PATH = "/v1/completions"
GEN_AI = {v for k, v in vars(gen_ai_attributes).items() if k.startswith("GEN_AI_")}
OWN = {"error.type", *(f"loradock.adapter.{name}" for name in ("name", "state", "wait_s"))}


@pytest.fixture(scope="module")
def kept() -> Any:
    return KeptSpans()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory, kept: KeptSpans) -> Iterator[Served]:
    """A gateway whose spans are kept, in front of a stand-in."""
    directory = tmp_path_factory.mktemp("gw")
    with pytest.MonkeyPatch.context() as patch, StandIn(directory) as controller:
        patch.setattr(gateway_module, "configured_tracer", lambda _: kept.tracer)
        with serve_gateway(controller) as gateway:
            yield gateway


@pytest.fixture(autouse=True)
def _no_spans(kept: KeptSpans) -> None:
    kept.clear()


def only_span(kept: KeptSpans) -> Any:
    """The one span, which ends after its answer."""
    wait_until(kept.ended)
    [span] = kept.ended()
    assert set(span.attributes or ()) <= GEN_AI | OWN
    return span


def test_a_request_has_a_span_below_the_callers_and_sends_its_own_to_the_engine(
    served: Served, kept: KeptSpans
) -> None:
    body = {"model": "upper", "prompt": "secret", "max_tokens": 3, "temperature": 0.5, "n": 2}
    answer = served.post(PATH, body, traceparent=TRACEPARENT)
    assert answer.status_code == 200
    span = only_span(kept)
    assert (span.name, span.kind) == ("text_completion upper", SpanKind.SERVER)
    assert f"{span.context.trace_id:032x}" == TRACE_ID
    assert parent_of(span) == tuple(TRACEPARENT.split("-")[1:3])
    expected = f"00-{TRACE_ID}-{span.context.span_id:016x}-01"
    assert {one.trace for one in served.controller.requests(rq.Generate)} == {expected}
    first_s = span.attributes["gen_ai.response.time_to_first_chunk"]
    assert first_s > 0
    assert dict(span.attributes) == {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "loradock",
        "gen_ai.request.model": "upper",
        "gen_ai.request.max_tokens": 3,
        "gen_ai.request.temperature": 0.5,
        "gen_ai.request.choice.count": 2,
        "gen_ai.response.id": answer.json()["id"],
        "gen_ai.response.model": "upper",
        "gen_ai.response.finish_reasons": ("length", "length"),
        "gen_ai.response.time_to_first_chunk": first_s,
        "gen_ai.usage.input_tokens": 4,
        "gen_ai.usage.output_tokens": 6,
        "loradock.adapter.name": "upper",
        "loradock.adapter.state": "gpu-slot",
        "loradock.adapter.wait_s": span.attributes["loradock.adapter.wait_s"],
    }
    assert "secret" not in span.to_json()


@pytest.mark.parametrize("header", ["", "x", TRACEPARENT.upper(), f"00-{'0' * 32}-{'0' * 16}-01"])
def test_without_a_valid_context_a_request_begins_a_trace(
    served: Served, kept: KeptSpans, header: Any
) -> None:
    served.post(PATH, {"prompt": "p"}, traceparent=header)
    span = only_span(kept)
    assert (span.name, span.parent) == ("text_completion", None)
    assert "loradock.adapter.name" not in span.attributes


def test_a_stream_ends_its_span_with_its_last_event(served: Served, kept: KeptSpans) -> None:
    served.events(PATH, {"prompt": "p", "stream": True, "max_tokens": 2})
    span = only_span(kept)
    assert span.attributes["gen_ai.request.stream"] is True
    assert span.attributes["gen_ai.response.finish_reasons"] == ("length",)
    assert span.attributes["gen_ai.usage.output_tokens"] == 2


def test_vectors_have_spans(served: Served, kept: KeptSpans) -> None:
    answer = served.post("/v1/embeddings", {"input": ["a", "b"], "model": "reverse"})
    span = only_span(kept)
    assert span.attributes["gen_ai.response.id"] == answer.json()["id"]
    assert span.name == "embeddings reverse"
    assert span.attributes["gen_ai.usage.input_tokens"] == 5
    assert span.attributes["loradock.adapter.state"] == "evicted"
    [request] = served.controller.requests(rq.Embed)
    assert request.trace.split("-")[2] == f"{span.context.span_id:016x}"


@pytest.mark.parametrize(
    ("code", "failed"), [(ErrorCode.NOT_SERVED, False), (ErrorCode.ENGINE_GONE, True)]
)
@pytest.mark.parametrize("stream", [False, True])
def test_a_failure_is_named_by_its_code(
    served: Served, kept: KeptSpans, code: ErrorCode, failed: bool, stream: bool
) -> None:
    refuse(served, code)
    assert served.post(PATH, {"prompt": "p", "stream": stream}).status_code >= 400
    span = only_span(kept)
    assert span.attributes["error.type"] == code.value
    assert (span.status.status_code is StatusCode.ERROR) == failed


def test_a_failure_within_a_stream_is_named_too(served: Served, kept: KeptSpans) -> None:
    refuse(served, ErrorCode.ENGINE_GONE, after_one_token=True)
    events = served.events(PATH, {"prompt": "p", "stream": True})
    assert json.loads(events[-2])["error"]["code"] == 503
    assert only_span(kept).attributes["error.type"] == ErrorCode.ENGINE_GONE.value


def test_an_unknown_model_is_no_failure_of_the_server(served: Served, kept: KeptSpans) -> None:
    served.post(PATH, {"prompt": "p", "model": "nope"})
    span = only_span(kept)
    assert span.attributes["error.type"] == "L006"
    assert span.status.status_code is StatusCode.UNSET


def test_a_client_that_leaves_ends_its_span(served: Served, kept: KeptSpans) -> None:
    served.controller.answers[rq.Generate] = lambda _: None
    with served.connect() as connection:
        body = json.dumps({"prompt": "p", "stream": True}).encode()
        head = f"POST {PATH} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        connection.sendall(f"{head}content-length: {len(body)}\r\n\r\n".encode() + body)
        wait_until(lambda: served.controller.requests(rq.Generate))
    assert only_span(kept).attributes["error.type"] == "CancelledError"


def test_the_wait_for_an_adapter_ends_with_its_slot(kept: KeptSpans) -> None:
    table = AdapterTable()
    table.reset(rq.AdaptersListed("", (view("a", "pinned"), view("b", "evicted")), 0))
    traces = Traces(kept.tracer, table, ModelNames(()))
    waiting = [traces.begin("chat", {}, None) for _ in range(3)]
    for span, name in zip(waiting, ("a", "b", "c"), strict=True):
        span.on_adapter(name)
    table.apply(ev.Published(1, 0, ev.AdapterActivated("a", 3, 9)))
    for span in waiting:
        span.end()
    attributes = [dict(span.attributes or {}) for span in kept.ended()]
    found = {one["loradock.adapter.name"]: one for one in attributes}
    states = {name: one["loradock.adapter.state"] for name, one in found.items()}
    assert states == {"a": "pinned", "b": "evicted", "c": "unregistered"}
    assert [name for name, one in found.items() if "loradock.adapter.wait_s" in one] == ["a"]
    # What has ended is forgotten: a later event does not reach it.
    table.apply(ev.Published(2, 0, ev.AdapterActivated("b", 3, 10)))
    assert table._waiting == {}
