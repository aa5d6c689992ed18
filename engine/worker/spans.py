"""Spans of inference in the engine, below the span of the client that caused it."""

from typing import Final

from opentelemetry.trace import Span, Status, StatusCode, Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loradock.messages.commands import Command, StartGeneration, StartInference
from loradock.messages.ids import OpId, RequestId
from loradock.messages.reports import GenerationEnded, OperationFailed, PoolingEnded, Report
from loradock.messages.requests import TokensStreamed

FIRST_OUTPUT: Final = "first output"
"""The event between waiting and prefill, and decoding."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()


class InferenceSpans:
    """One span per operation of inference whose command has a trace, until its report."""

    def __init__(self, tracer: Tracer) -> None:
        self._tracer = tracer
        self._spans: dict[OpId, tuple[Span, RequestId]] = {}
        # Generations without a token yet.
        self._starting: dict[RequestId, Span] = {}

    def on_command(self, command: Command) -> None:
        """Begin a span with the command of a traced request."""
        if not isinstance(command, StartInference) or not command.trace:
            return
        generates = isinstance(command, StartGeneration)
        attributes = {
            "loradock.operation": command.op,
            "loradock.adapter.id": command.adapter_id,
            "loradock.adapter.slot": command.slot,
        }
        span = self._tracer.start_span(
            "engine generate" if generates else "engine pool",
            _PROPAGATOR.extract({"traceparent": command.trace}),
            attributes=attributes,
        )
        self._spans[command.op] = span, command.request_id
        if generates:
            self._starting[command.request_id] = span

    def on_report(self, report: Report) -> None:
        """Note a generation's first token, or end the span of an operation."""
        match report:
            case TokensStreamed(request_id=request_id) if request_id in self._starting:
                self._starting.pop(request_id).add_event(FIRST_OUTPUT)
            case GenerationEnded():
                self._end(
                    report.op,
                    {
                        "gen_ai.usage.input_tokens": report.prompt_tokens,
                        "gen_ai.usage.output_tokens": report.output_tokens,
                        "gen_ai.response.finish_reasons": (report.finish_reason,),
                    },
                )
            case PoolingEnded():
                self._end(report.op, {"gen_ai.usage.input_tokens": report.input_tokens})
            case OperationFailed(op=op, code=code) if op in self._spans:
                self._spans[op][0].set_status(Status(StatusCode.ERROR, code.value))
                self._end(op, {"error.type": code.value})

    def _end(self, op: OpId, attributes: dict[str, int | str | tuple[str, ...]]) -> None:
        if op in self._spans:
            span, request_id = self._spans.pop(op)
            self._starting.pop(request_id, None)
            span.set_attributes(attributes)
            span.end()
