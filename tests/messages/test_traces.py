"""When tracing is on, and what is reported where it can't be."""

import sys

import pytest

from loradock.messages import traces

URL = "http://collector:4318"


@pytest.mark.parametrize(
    ("environment", "on"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": URL}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_EXPORTER": "otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_TRACES_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": URL, "OTEL_SDK_DISABLED": "true"}, False),
    ],
)
def test_variables_turn_tracing_on(environment, on):
    assert traces.is_configured(environment) == on


def test_without_variables_nothing_is_imported(monkeypatch):
    for name in traces.ENDPOINTS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    assert traces.configured_tracer("gateway") is None


def test_a_missing_extra_is_reported(monkeypatch):
    monkeypatch.setenv(traces.ENDPOINTS[0], URL)
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(traces.TracesError, match=r"loradock\[otel\]"):
        traces.configured_tracer("gateway")
