"""Tracing of a process with OpenTelemetry, which is off unless its variables name a collector.

`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT` or `OTEL_EXPORTER_OTLP_ENDPOINT` turns it on, and the other
variables of the SDK have their meaning. Spans are sent over HTTP by a thread, and dropped while no
collector answers.
"""

# The libraries are an extra, and take long to import.
# ruff: noqa: PLC0415

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from opentelemetry.trace import Tracer

ENDPOINTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")
"""Variables with the address of a collector; the first is that for traces alone."""

_TIMEOUTS: Final = ("OTEL_EXPORTER_OTLP_TRACES_TIMEOUT", "OTEL_EXPORTER_OTLP_TIMEOUT")
_TIMEOUT_S: Final = 2.0
"""Default time limit of one export; the end of a process waits for the last one."""


class TracesError(ValueError):
    """Tracing is configured and not installed."""


def is_configured(environment: Mapping[str, str]) -> bool:
    """Return whether the variables of OpenTelemetry turn tracing on."""
    if environment.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return False
    if environment.get("OTEL_TRACES_EXPORTER", "otlp").strip() not in ("", "otlp"):
        return False
    return any(environment.get(name) for name in ENDPOINTS)


def configured_tracer(process: str) -> "Tracer | None":
    """Return what makes the spans of a process; None while tracing is off.

    Raises `TracesError` if tracing is on and the extra `otel` is not installed.
    """
    if not is_configured(os.environ):
        return None
    try:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
    except ImportError as error:
        raise TracesError(
            f"{ENDPOINTS[0]} is set and OpenTelemetry is not installed; "
            "`pip install 'loradock[otel]'` installs it"
        ) from error
    service = os.environ.get("OTEL_SERVICE_NAME", "loradock")
    provider = TracerProvider(resource=Resource.create({"service.name": f"{service}-{process}"}))
    timeout_s = None if any(os.environ.get(name) for name in _TIMEOUTS) else _TIMEOUT_S
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(timeout=timeout_s)))
    return provider.get_tracer("loradock")
