"""Metric families with one line of code each."""

from collections.abc import Mapping

from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
)

from loradock.gateway.histogram import Histogram


def gauge(name: str, text: str, value: float) -> GaugeMetricFamily:
    """Return a gauge without labels."""
    return GaugeMetricFamily(name, text, value=value)


def counter(name: str, text: str, value: float) -> CounterMetricFamily:
    """Return a counter without labels."""
    return CounterMetricFamily(name, text, value=value)


def histogram(name: str, text: str, found: Histogram) -> HistogramMetricFamily:
    """Return a histogram without labels."""
    return HistogramMetricFamily(name, text, buckets=found.buckets(), sum_value=found.sum)


def labelled_counter(
    name: str, text: str, label: str, counts: Mapping[str, int]
) -> CounterMetricFamily:
    """Return a counter with one label."""
    family = CounterMetricFamily(name, text, labels=[label])
    for value in sorted(counts):
        family.add_metric([value], counts[value])
    return family
