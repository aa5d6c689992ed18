"""The page at `/`, one document without references to other hosts, and the events that it follows.

A reader of `/events` first receives a `snapshot`, then every event once and in order, and between
them `status` and the `adapters` that changed, with the fields that events lack, and `rates`: the
samples of the last minutes, then each new sample. A reader that continues from a number
(`Last-Event-ID`) receives the events after it, or a snapshot if they are not kept any more.
`/events/history` has past events of the log, in pages.
"""

import asyncio
import base64
import hashlib
import re
from collections.abc import AsyncGenerator
from typing import Final

from msgspec import Struct, convert, structs
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response

from loradock.client import AsyncClient
from loradock.gateway import web
from loradock.gateway.adapters.follower import AdapterTable, Follower
from loradock.gateway.adapters.models import AdapterCard, adapter_card
from loradock.gateway.http.endpoint import get
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import ServerSentEvents, named_event
from loradock.gateway.rates import Rates
from loradock.messages.events import Published
from loradock.messages.requests import StatusShown

KEEP_ALIVE_S: Final = 10.0
"""A comment is sent after this time without an event, so that a lost connection is noticed."""

READERS_MAX: Final = 256

PAGE_EVENTS_MAX: Final = 2000
SCANNED_MAX: Final = 20_000
"""Bound on the events that one request reads, also if few of them concern the adapter."""

_KEEP_ALIVE: Final = b": \n\n"
_INLINE: Final = re.compile(r"<(script|style)>(.*?)</\1>", re.S)


class History(Struct, frozen=True):
    """Events in order; a next page begins after `next_seq`, which is null at the end."""

    events: list[web.LiveEvent]
    next_seq: int | None


class Page:
    """The endpoints of the page and of past events.

    The browser runs only the script of the file itself.
    """

    def __init__(self, client: AsyncClient) -> None:
        self._client = client
        self._text = web.page()
        self._headers = {
            "Content-Security-Policy": content_security_policy(self._text),
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-cache",
        }

    @get("/", media_type="text/html", access="public")
    async def page(self) -> Response:
        """The page."""
        return HTMLResponse(self._text, headers=self._headers)

    @get("/events/history", errors=(400, 503))
    async def history(self, request: Request) -> History:
        """Past life-cycle events.

        They follow `since`: all, or the events of `adapter`.
        """
        since = _number(request, "since", 0, 2**62)
        limit = _number(request, "limit", PAGE_EVENTS_MAX, PAGE_EVENTS_MAX)
        adapter = request.query_params.get("adapter")
        found: list[web.LiveEvent] = []
        seq, scanned = since, 0
        async with await self._client.events(since=since, follow=False) as stream:
            async for item in stream:
                scanned += 1
                # What is not kept any more is left out.
                if not isinstance(item, Published):
                    continue
                seq = item.seq
                if adapter is None or getattr(item.event, "adapter", "") == adapter:
                    found.append(web.live_event(item))
                if len(found) >= limit or scanned >= SCANNED_MAX:
                    return History(found, seq)
        return History(found, None)


def content_security_policy(page: str) -> str:
    """Return the policy that allows exactly the script and the style of the page."""
    hashes: dict[str, list[str]] = {"script": [], "style": []}
    for kind, text in _INLINE.findall(page):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        hashes[kind].append(f"'sha256-{digest}'")
    return (
        f"default-src 'none'; script-src {' '.join(hashes['script'])}; "
        f"style-src {' '.join(hashes['style'])}; connect-src 'self'; img-src 'self' data:; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


class TierCard(Struct, frozen=True):
    """Use and bounds of a tier."""

    name: str
    count: int
    count_max: int
    bytes: int
    bytes_max: int


class MeanTimes(Struct, frozen=True):
    """Mean durations in seconds, 0 before the first one: an adapter's steps towards a slot.

    `request_s`: the time of the engine's steps per request that ended, which shared them.
    """

    request_s: float
    load_s: float
    stage_s: float
    write_s: float


class StatusCard(Struct, frozen=True):
    """The totals of the controller; `unready`: why it takes no new work, empty if it does.

    `running`, `queued` and `waiting` requests are in the next step, wait in the engine, and wait
    for a slot.
    """

    model: str
    engine_id: str
    epoch: int
    seq: int
    requests: int
    operations: int
    answered: int
    refused: int
    policy: str
    tiers: list[TierCard]
    unready: str
    log_error: str
    disk_free_bytes: int
    running: int
    queued: int
    waiting: int
    times: MeanTimes


class TableSnapshot(Struct, frozen=True):
    """The state of all adapters after event `seq`; `may_change`: clients can change adapters."""

    seq: int
    synced: bool
    may_change: bool
    status: StatusCard | None
    adapters: list[AdapterCard]


class Live:
    """The endpoint; any number of readers share the table of one follower."""

    def __init__(self, follower: Follower, rates: Rates, *, may_change: bool) -> None:
        self._follower = follower
        self._rates = rates
        self._may_change = may_change
        self._readers = 0
        self._is_closed = False
        self._encoded_of: tuple[object, ...] = ()
        self._encoded = b""

    async def close(self) -> None:
        """End all streams: they would delay the end of the gateway, which lets requests end."""
        self._is_closed = True
        await self._follower.notify()

    @get("/events", media_type="text/event-stream", errors=(429,))
    async def events(self, request: Request) -> ServerSentEvents:
        """The life-cycle events as they happen."""
        if self._readers >= READERS_MAX:
            raise HttpError(429, f"at most {READERS_MAX} readers can follow the events")
        since = _integer(request.headers.get("last-event-id", ""))
        answer = ServerSentEvents(self._stream(since), self._on_closed)
        # Nothing may fail between this and the answer, whose end always lowers it.
        self._readers += 1
        return answer

    async def _on_closed(self) -> None:
        self._readers -= 1

    async def _stream(self, since: int | None) -> AsyncGenerator[bytes, None]:
        table, seq, updates, sampled = self._follower.table, since, 0, 0
        while not self._is_closed:
            if table.seq is None:
                # Nothing is known before the first list.
                yield _KEEP_ALIVE
                await self._wait_for_change()
                continue
            missed = None if seq is None else table.events_after(seq)
            if missed is None:
                seq, updates, sampled = table.seq, table.update_count, 0
                yield self._snapshot_event(seq)
                continue
            samples, sampled = self._rates.after(sampled), self._rates.count
            if samples:
                yield named_event("rates", seq or 0, samples)
            for published in missed:
                yield named_event("event", published.seq, web.live_event(published))
                seq = published.seq
            if not missed and not await self._wait_for_change():
                yield _KEEP_ALIVE
            elif not missed:
                yield named_event("status", seq or 0, status_card(table.status))
                changed, updates = table.updated_after(updates), table.update_count
                if changed is None:
                    seq = None
                elif changed:
                    yield named_event("adapters", seq or 0, [*map(adapter_card, changed)])

    def _snapshot_event(self, seq: int) -> bytes:
        """Return the event of the table as it is, which is encoded once for all readers."""
        table = self._follower.table
        # Views that change without an event are updates, and those that leave are fewer.
        content = (seq, table.update_count, len(table.views), table.status, table.synced)
        if content != self._encoded_of:
            snapshot = snapshot_of(table, may_change=self._may_change)
            self._encoded_of, self._encoded = content, named_event("snapshot", seq, snapshot)
        return self._encoded

    async def _wait_for_change(self) -> bool:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S), self._follower.changed:
                await self._follower.changed.wait()
        except TimeoutError:
            return False
        return True


def snapshot_of(table: AdapterTable, *, may_change: bool) -> TableSnapshot:
    """Return the table as readers see it."""
    cards = [adapter_card(view) for _, view in sorted(table.views.items())]
    status = status_card(table.status)
    return TableSnapshot(table.seq or 0, table.synced, may_change, status, cards)


def status_card(status: StatusShown | None) -> StatusCard | None:
    """Return the controller's totals as readers see them."""
    if status is None:
        return None
    tiers = [
        TierCard(tier.name, tier.count, tier.count_max, tier.size_bytes, tier.size_bytes_max)
        for tier in status.tiers
    ]
    own = {"tiers": tiers, "times": _mean_times(status)}
    return convert(structs.asdict(status) | own, StatusCard)


def _mean_times(status: StatusShown) -> MeanTimes:
    engine, counters = status.engine, status.counters
    return MeanTimes(
        _mean_s(engine.step_ns, sum(engine.inference.counts)),
        _mean_s(counters.load_ns, counters.loads),
        _mean_s(counters.stage_ns, counters.stagings),
        _mean_s(counters.write_ns, counters.activations),
    )


def _mean_s(total_ns: int, count: int) -> float:
    return total_ns / 1e9 / count if count else 0.0


def _number(request: Request, name: str, default: int, value_max: int) -> int:
    text = request.query_params.get(name)
    if text is None:
        return default
    number = _integer(text)
    if number is None or number > value_max:
        raise HttpError(400, f"{name} must be an integer from 0 to {value_max}, got {text!r}", name)
    return number


def _integer(text: str) -> int | None:
    """Return the integer that a client wrote; None for any other text.

    Python refuses to convert thousands of digits.
    """
    return int(text) if text.isascii() and text.isdigit() and len(text) < 20 else None
