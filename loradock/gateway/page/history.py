"""`GET /events/history`: past events of the log, in pages, for the past of an adapter or of all."""

from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loradock.client import AsyncClient
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import json_response
from loradock.gateway.page.live import LiveEvent, live_event
from loradock.messages.events import Published

PAGE_EVENTS_MAX: Final = 2000
SCANNED_MAX: Final = 20_000
"""Bound on the events that one request reads, also if few of them concern the adapter."""


class History(Struct, frozen=True):
    """Events in order; a next page begins after `next_seq`, which is null at the end."""

    events: list[LiveEvent]
    next_seq: int | None


class Past:
    """The endpoint."""

    def __init__(self, client: AsyncClient) -> None:
        self._client = client

    async def events(self, request: Request) -> Response:
        """Answer with the events after `since`, all or those of `adapter`."""
        since = _number(request, "since", 0, 2**62)
        limit = _number(request, "limit", PAGE_EVENTS_MAX, PAGE_EVENTS_MAX)
        adapter = request.query_params.get("adapter")
        found: list[LiveEvent] = []
        seq, scanned = since, 0
        async with await self._client.events(since=since, follow=False) as stream:
            async for item in stream:
                scanned += 1
                # What is not kept any more is left out.
                if not isinstance(item, Published):
                    continue
                seq = item.seq
                if adapter is None or getattr(item.event, "adapter", "") == adapter:
                    found.append(live_event(item))
                if len(found) >= limit or scanned >= SCANNED_MAX:
                    return json_response(History(found, seq))
        return json_response(History(found, None))


def _number(request: Request, name: str, default: int, value_max: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    if not (text.isascii() and text.isdigit() and len(text) < 20 and int(text) <= value_max):
        raise HttpError(400, f"{name} is {text!r}; a number up to {value_max} is needed", name)
    return int(text)
