"""Spans of inference in the engine: below the caller's, from the command to the report."""

import pytest
from opentelemetry.trace import StatusCode

from loradock.engine.worker.spans import FIRST_OUTPUT, InferenceSpans
from loradock.messages import commands, reports
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import TokensStreamed
from tests.support.spans import TRACEPARENT, KeptSpans, parent_of


@pytest.fixture
def kept():
    return KeptSpans()


@pytest.fixture
def spans(kept):
    return InferenceSpans(kept.tracer)


def generation(op, request_id, trace=TRACEPARENT):
    return commands.StartGeneration(op, request_id, 5, 3, 9, "secret", trace=trace)


def test_a_generation(spans, kept):
    spans.on_command(generation(7, "r"))
    spans.on_report(TokensStreamed("other", 0, (1,)))
    spans.on_report(TokensStreamed("r", 0, (1,)))
    spans.on_report(TokensStreamed("r", 1, (2,)))
    spans.on_report(reports.GenerationEnded(7, "length", 4, 2))
    [span] = kept.ended()
    assert parent_of(span) == tuple(TRACEPARENT.split("-")[1:3])
    assert [event.name for event in span.events] == [FIRST_OUTPUT]
    assert span.attributes["gen_ai.usage.output_tokens"] == 2
    assert span.attributes["loradock.adapter.slot"] == 3
    assert "secret" not in span.to_json()


def test_a_pooling(spans, kept):
    spans.on_command(commands.StartPooling(8, "p", 0, -1, 0, "embed", ("x",), TRACEPARENT))
    spans.on_report(reports.PoolingEnded(8, 1, 5))
    [span] = kept.ended()
    assert (span.name, span.attributes["gen_ai.usage.input_tokens"]) == ("engine pool", 5)


def test_a_failure_before_the_first_token(spans, kept):
    spans.on_command(generation(7, "r"))
    spans.on_report(reports.OperationFailed(7, ErrorCode.NOT_RESIDENT, "stale"))
    [span] = kept.ended()
    assert span.status.status_code is StatusCode.ERROR
    assert span.attributes["error.type"] == ErrorCode.NOT_RESIDENT.value
    # The same id may be used again.
    spans.on_report(TokensStreamed("r", 0, (1,)))


def test_what_has_no_trace_has_no_span(spans, kept):
    spans.on_command(generation(7, "r", trace=""))
    spans.on_command(commands.DropWeights(8, 1))
    spans.on_report(reports.GenerationEnded(7, "stop", 4, 2))
    spans.on_report(reports.OperationFailed(8, ErrorCode.NOT_FOUND, "no"))
    assert kept.ended() == ()


def test_a_damaged_trace_begins_another(spans, kept):
    spans.on_command(generation(7, "r", trace="x" * 55))
    spans.on_report(reports.GenerationEnded(7, "stop", 4, 2))
    [span] = kept.ended()
    assert span.parent is None
