"""Spans of inference requests, named as OpenTelemetry's conventions for generative AI define.

A span lasts from the head of a request to the end of its answer. It has no text of prompts or
outputs. The caller's context is read from the headers, and the span's own is sent to the engine.
"""

import time
from collections.abc import Mapping
from typing import Any, Final

from opentelemetry.trace import Span, SpanKind, Status, StatusCode, Tracer, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from loradock.client import LoradockError
from loradock.gateway.adapters.follower import AdapterTable
from loradock.gateway.adapters.models import ModelNames
from loradock.gateway.http.errors import HttpError, error_of
from loradock.gateway.inference.service import finish_reason, generated_tokens
from loradock.gateway.recorder import RequestSpan
from loradock.messages.ids import UNREGISTERED
from loradock.messages.requests import GenerationDone, TokensStreamed

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


class TracedSpan(RequestSpan):
    """The span of one request, sent to OpenTelemetry.

    Seconds of waiting for an adapter end with the event that it is in a slot.
    """

    def __init__(
        self, span: Span, table: AdapterTable, names: ModelNames, choices_per_prompt: int
    ) -> None:
        self._span = span
        self._table = table
        self._names = names
        self._choices_per_prompt = choices_per_prompt
        self._began_s = time.monotonic()
        self._reasons: list[str] = []
        self._prompt_tokens: dict[int, int] = {}
        self._output_tokens = 0
        self._has_output = False
        self._awaited_since_s: float | None = None
        self._adapter: str | None = None
        carrier: dict[str, str] = {}
        _PROPAGATOR.inject(carrier, set_span_in_context(span))
        self.parent = carrier.get("traceparent", "")

    def on_adapter(self, name: str) -> None:
        """Record the adapter of the request, and its state before the request."""
        if self._adapter is not None:
            return
        self._adapter = name
        self._awaited_since_s = time.monotonic()
        view = self._table.views.get(name)
        state = UNREGISTERED if view is None else view.state
        self._span.set_attributes({"loradock.adapter.name": name, "loradock.adapter.state": state})
        self._table.wait_for(name, self)

    def on_resident(self) -> None:
        """Record that the adapter is in a slot, at the latest with the first output."""
        if self._awaited_since_s is not None:
            waited_s = time.monotonic() - self._awaited_since_s
            self._span.set_attribute("loradock.adapter.wait_s", waited_s)
            self._awaited_since_s = None

    def on_id(self, answer_id: str) -> None:
        """Record the id of the answer."""
        self._span.set_attribute("gen_ai.response.id", answer_id)

    def on_start(self, choices: int) -> None:
        """Record the number of choices; one without an end was cancelled by the client."""
        self._reasons = ["cancelled"] * choices

    def on_chunk(self, choice: int, chunk: TokensStreamed) -> None:
        """Record a chunk of a choice."""
        self._on_output()
        self._output_tokens += len(generated_tokens(chunk))
        self._reasons[choice] = finish_reason(chunk) or self._reasons[choice]

    def on_done(self, choice: int, done: GenerationDone) -> None:
        """Record the end of the generation whose first choice is given."""
        self._on_output()
        self._prompt_tokens[choice // self._choices_per_prompt] = done.prompt_tokens

    def _on_output(self) -> None:
        if not self._has_output:
            self._has_output = True
            self.on_resident()
            seconds = time.monotonic() - self._began_s
            self._span.set_attribute("gen_ai.response.time_to_first_chunk", seconds)

    def on_pooled(self, input_tokens: int) -> None:
        """Record the result of an embedding or a classification."""
        self.on_resident()
        self._span.set_attribute("gen_ai.usage.input_tokens", input_tokens)

    def on_error(self, error: BaseException) -> None:
        """Record why the request failed; a status below 500 is not an error of the server."""
        if isinstance(error, LoradockError):
            error = error_of(error)
        if isinstance(error, HttpError):
            kind = error.error_code or str(error.status)
            failed = error.status >= 500
        else:
            # A cancellation means that the client left; other exceptions are internal errors.
            kind, failed = type(error).__name__, isinstance(error, Exception)
        self._span.set_attribute("error.type", kind)
        if failed:
            self._span.set_status(Status(StatusCode.ERROR, kind))

    def end(self) -> None:
        """End the span."""
        if self._adapter is not None:
            self._table.stop_waiting(self._adapter, self)
        model = self._names.shown(self._adapter)
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
    """Begins the spans of requests."""

    def __init__(self, tracer: Tracer, table: AdapterTable, names: ModelNames) -> None:
        self._tracer = tracer
        self._table = table
        self._names = names

    def begin(self, operation: str, headers: Mapping[str, str], body: Any) -> TracedSpan:
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
            _PROPAGATOR.extract(headers),
            SpanKind.SERVER,
            attributes,
        )
        return TracedSpan(span, self._table, self._names, getattr(body, "n", None) or 1)
