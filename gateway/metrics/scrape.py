"""`GET /metrics`: all families in the text format of Prometheus."""

from collections.abc import Callable, Iterable, Iterator, Sequence

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

Families = Callable[[], Iterable[Metric]]


class _Families(Collector):
    """A collector over functions that return families; nothing is kept between scrapes."""

    def __init__(self, sources: Sequence[Families]) -> None:
        self._sources = sources

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all sources."""
        for source in self._sources:
            yield from source()

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not collect."""
        return ()


class Scrape:
    """The endpoint."""

    def __init__(self, sources: Sequence[Families]) -> None:
        self._registry = CollectorRegistry()
        self._registry.register(_Families(sources))
        ProcessCollector(registry=self._registry)
        PlatformCollector(registry=self._registry)

    async def metrics(self, _: Request) -> Response:
        """Answer with the current values."""
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)
