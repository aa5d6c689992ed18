"""Spans of inference requests, named as OpenTelemetry's conventions for generative AI define.

A span lasts from the head of a request to the end of its answer. It has no text of prompts or
outputs. The caller's context is read from the headers, and the span's own is sent to the engine.
"""

import time
from collections.abc import Awaitable, Sequence
from contextvars import ContextVar
from typing import Any, Final

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from starlette.requests import Request

from loradock.client import AsyncGeneration, LoradockError
from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.http.endpoints import Answer, Handler
from loradock.gateway.http.errors import HttpError, error_of
from loradock.gateway.http.streams import EventStream
from loradock.gateway.inference.run import Output, Run, generated_tokens
from loradock.gateway.inference.service import Pooled, Service, finish_reason
from loradock.gateway.metrics.recorder import Recorder
from loradock.messages.ids import GPU_SLOT, UNREGISTERED

PROVIDER: Final = "loradock"

REQUEST_ATTRIBUTES: Final = {
    "max_tokens": "gen_ai.request.max_tokens",
    "max_completion_tokens": "gen_ai.request.max_tokens",
    "max_output_tokens": "gen_ai.request.max_tokens",
    "temperature": "gen_ai.request.temperature",
    "top_p": "gen_ai.request.top_p",
    "top_k": "gen_ai.request.top_k",
    "seed": "gen_ai.request.seed",
    "frequency_penalty": "gen_ai.request.frequency_penalty",
    "presence_penalty": "gen_ai.request.presence_penalty",
    "stream": "gen_ai.request.stream",
    "n": "gen_ai.request.choice.count",
}
"""Field of a request -> the attribute with its value."""

_PROPAGATOR: Final = TraceContextTextMapPropagator()
_current: ContextVar["RequestTrace"] = ContextVar("trace")


class RequestTrace:
    """The span of one request; `parent` is its `traceparent` for spans below it."""

    def __init__(self, span: Span, choices_per_prompt: int) -> None:
        self._span = span
        self._choices_per_prompt = choices_per_prompt
        self._began_s = time.monotonic()
        self._reasons: list[str] = []
        self._prompt_tokens: dict[int, int] = {}
        self._output_tokens = 0
        self._has_output = False
        self._awaited_since_s: float | None = None
        self.adapter: str | None = None
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span))
        self.parent: Final = carrier.get("traceparent", "")

    def on_adapter(self, name: str, state: str) -> None:
        """Note the adapter of the request, and its state before the request."""
        self.adapter = name
        self._awaited_since_s = time.monotonic()
        self._span.set_attributes({"loradock.adapter.name": name, "loradock.adapter.state": state})

    def on_resident(self) -> None:
        """Note that the adapter is in a slot, at the latest with the first output."""
        if self._awaited_since_s is not None:
            waited_s = time.monotonic() - self._awaited_since_s
            self._span.set_attribute("loradock.adapter.wait_s", waited_s)
            self._awaited_since_s = None

    def on_id(self, answer_id: str) -> None:
        """Note the id of the answer."""
        self._span.set_attribute("gen_ai.response.id", answer_id)

    def on_start(self, choices: int) -> None:
        """Note the number of choices; one without an end was cancelled by the client."""
        self._reasons = ["cancelled"] * choices

    def on_output(self, output: Output) -> None:
        """Note an output of a generation."""
        if not self._has_output:
            self._has_output = True
            self.on_resident()
            seconds = time.monotonic() - self._began_s
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)
        if output.chunk is not None:
            self._output_tokens += len(generated_tokens(output.chunk))
            reason = finish_reason(output.chunk)
            self._reasons[output.choice] = reason or self._reasons[output.choice]
        if output.done is not None:
            prompt = output.choice // self._choices_per_prompt
            self._prompt_tokens[prompt] = output.done.prompt_tokens

    def on_pooled(self, input_tokens: int) -> None:
        """Note the result of an embedding or a classification."""
        self.on_resident()
        self._span.set_attribute("gen_ai.usage.input_tokens", input_tokens)

    def on_error(self, error: BaseException) -> None:
        """Note why the request failed; a status below 500 is not an error of the server."""
        if isinstance(error, LoradockError):
            error = error_of(error)
        if isinstance(error, HttpError):
            kind = error.error_code or str(error.status)
            failed = error.status >= 500
        else:
            # A cancellation means that the client left; other exceptions are mistakes of ours.
            kind, failed = type(error).__name__, isinstance(error, Exception)
        self._span.set_attribute("error.type", kind)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, kind))

    def end(self, model: str) -> None:
        """End the span; `model` is the model's name in the answer."""
        self._span.set_attribute("gen_ai.response.model", model)
        if self._reasons:
            results: dict[str, Any] = {
                "gen_ai.response.finish_reasons": self._reasons,
                "gen_ai.usage.input_tokens": sum(self._prompt_tokens.values()),
                "gen_ai.usage.output_tokens": self._output_tokens,
            }
            self._span.set_attributes(results)
        self._span.end()


class Traces:
    """The spans of the requests in progress.

    Seconds of waiting for an adapter end with the event that it is in a slot.
    """

    def __init__(self, tracer: Tracer, table: AdapterTable) -> None:
        self._tracer = tracer
        self._table = table
        self._waiting: dict[str, set[RequestTrace]] = {}
        table.on_activated = self._on_activated

    def begin(self, operation: str, request: Request, body: Any) -> RequestTrace:
        """Begin the span of a request, below the span that its headers name."""
        model = getattr(body, "model", None) or ""
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": operation,
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": model,
        }
        for field, attribute in REQUEST_ATTRIBUTES.items():
            value = getattr(body, field, None)
            if value is not None:
                attributes[attribute] = value
        span = self._tracer.start_span(
            f"{operation} {model}".rstrip(),
            _PROPAGATOR.extract(request.headers),
            SpanKind.SERVER,
            attributes,
        )
        return RequestTrace(span, getattr(body, "n", None) or 1)

    def wait_for(self, trace: RequestTrace, adapter: str) -> None:
        """Note that a request needs an adapter, once per request."""
        if trace.adapter is not None:
            return
        view = self._table.views.get(adapter)
        trace.on_adapter(adapter, UNREGISTERED if view is None else view.state)
        if view is not None and view.state == GPU_SLOT:
            trace.on_resident()
        else:
            self._waiting.setdefault(adapter, set()).add(trace)

    def end(self, trace: RequestTrace, model: str) -> None:
        """End the span of a request."""
        waiting = self._waiting.get(trace.adapter or "")
        if waiting is not None:
            waiting.discard(trace)
            if not waiting:
                del self._waiting[trace.adapter or ""]
        trace.end(model)

    def _on_activated(self, adapter: str) -> None:
        for trace in self._waiting.pop(adapter, ()):
            trace.on_resident()


class TracedService(Service):
    """A service whose requests have spans; `handler` begins them."""

    def __init__(self, service: Service, traces: Traces) -> None:
        super().__init__(
            service.client,
            service.models,
            service.recorder,
            service.adapter_files,
            service.timeout_s,
        )
        self._traces = traces

    def handler(self, operation: str, handler: Handler) -> Handler:
        """Return a handler whose requests have spans."""

        async def traced(request: Request, body: Any) -> Answer:
            trace = self._traces.begin(operation, request, body)
            token = _current.set(trace)
            try:
                answer = await handler(request, body)
            except BaseException as error:
                trace.on_error(error)
                self._end(trace)
                raise
            finally:
                _current.reset(token)
            if isinstance(answer, EventStream):
                answer.call_at_end(lambda: self._end(trace))
            else:
                self._end(trace)
            return answer

        return traced

    def new_id(self, prefix: str, separator: str = "-") -> str:
        """Return an id for the answer, which is noted in the span of the current request."""
        answer_id = super().new_id(prefix, separator)
        _current.get().on_id(answer_id)
        return answer_id

    def trace_of(self, adapter: str | None) -> str:
        """Return the `traceparent` of the current request, which needs this adapter."""
        trace = _current.get()
        if adapter is not None:
            self._traces.wait_for(trace, adapter)
        return trace.parent

    def run_of(self, generations: Sequence[AsyncGeneration], count: int) -> Run:
        """Return a run whose outputs are noted in the span of the current request."""
        return _TracedRun(generations, self.recorder, count, _current.get())

    async def _measured(self, pooling: Awaitable[Pooled]) -> Pooled:
        found = await super()._measured(pooling)
        _current.get().on_pooled(found.input_tokens)
        return found

    def _end(self, trace: RequestTrace) -> None:
        self._traces.end(trace, self.models.names.shown(trace.adapter))


class _TracedRun(Run):
    def __init__(
        self,
        generations: Sequence[AsyncGeneration],
        recorder: Recorder,
        count: int,
        trace: RequestTrace,
    ) -> None:
        super().__init__(generations, recorder, count)
        self._trace = trace
        trace.on_start(self.choices)

    def on_output(self, output: Output) -> None:
        """Note an output in the span."""
        self._trace.on_output(output)

    def on_error(self, error: LoradockError) -> None:
        """Note a failure in the span."""
        self._trace.on_error(error)
