"""Spans that are kept in memory."""

from collections.abc import Sequence
from typing import Any

from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_ID}-01"


class KeptSpans:
    """A tracer whose ended spans are kept."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    def ended(self) -> Sequence[ReadableSpan]:
        return self._exporter.get_finished_spans()

    def clear(self) -> None:
        self._exporter.clear()


def parent_of(span: Any) -> tuple[str, str]:
    """The ids of a span's trace and of the span above it."""
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}"
