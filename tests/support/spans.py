"""Spans that are kept in memory."""

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

TRACE_ID = "0af7651916cd43dd8448eb211c80319c"
CALLER_ID = "b7ad6b7169203331"
TRACEPARENT = f"00-{TRACE_ID}-{CALLER_ID}-01"


class KeptSpans:
    """A tracer whose ended spans are kept."""

    def __init__(self):
        self._exporter = InMemorySpanExporter()
        provider = TracerProvider()
        provider.add_span_processor(SimpleSpanProcessor(self._exporter))
        self.tracer = provider.get_tracer("tests")

    def ended(self):
        return self._exporter.get_finished_spans()

    def clear(self):
        self._exporter.clear()


def parent_of(span):
    """The ids of a span's trace and of the span above it."""
    return f"{span.context.trace_id:032x}", f"{span.parent.span_id:016x}"
