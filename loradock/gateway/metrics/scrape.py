"""`GET /metrics`: all families in the text format of Prometheus, as of the scrape.

Each scrape shows what the controller reports after the scrape arrived; those that arrive during one
query for it share the next. Where the controller does not answer within `STATUS_WAIT_S`, its
families are absent: an old value would be taken for a current one.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final

from prometheus_client import CollectorRegistry, PlatformCollector, ProcessCollector
from prometheus_client.core import Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.registry import Collector
from starlette.requests import Request
from starlette.responses import Response

from loradock.gateway.adapters.follower import Follower
from loradock.messages.requests import StatusShown

STATUS_WAIT_S: Final = 1.0
"""The longest wait of a scrape for the controller: routers scrape several times a second."""

Families = Callable[[StatusShown | None], Iterable[Metric]]
"""Returns families; without a status, those that do not depend on it."""


class _Families(Collector):
    """A collector over functions that return families, for one scrape."""

    def __init__(self, sources: Sequence[Families], status: StatusShown | None) -> None:
        self._sources = sources
        self._status = status

    def collect(self) -> Iterator[Metric]:
        """Yield the families of all sources."""
        for source in self._sources:
            yield from source(self._status)

    def describe(self) -> Iterable[Metric]:
        """Return nothing, so that registering does not collect."""
        return ()


class Scrape:
    """The endpoint."""

    def __init__(self, follower: Follower, sources: Sequence[Families]) -> None:
        self._follower = follower
        self._sources = sources
        self._process = (ProcessCollector(registry=None), PlatformCollector(registry=None))

    async def metrics(self, _: Request) -> Response:
        """Answer with the current values."""
        registry = CollectorRegistry()
        status = await self._follower.status_now(STATUS_WAIT_S)
        for collector in (_Families(self._sources, status), *self._process):
            registry.register(collector)
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_LATEST)
