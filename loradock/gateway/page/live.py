"""`GET /events`: the life-cycle stream as server-sent events.

A reader first receives a `snapshot`, then every event once and in order, and between them `status`
and the `adapters` that changed, with the fields that events lack. One that continues from a
number (`Last-Event-ID`) receives the events after it, or a snapshot if they are not kept any more.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Any, Final

import msgspec
from msgspec import Struct
from starlette.requests import Request

from loradock.gateway.adapters.follower import Follower
from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.adapters.views import AdapterCard, adapter_card
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import EventStream, named_event
from loradock.messages.events import Published
from loradock.messages.requests import StatusShown

KEEP_ALIVE_S: Final = 10.0
"""A comment is sent after this time without an event, so that a lost connection is noticed."""

READERS_MAX: Final = 256

_KEEP_ALIVE: Final = b": \n\n"


class Tier(Struct, frozen=True):
    """Use and bounds of a tier."""

    name: str
    count: int
    count_max: int
    bytes: int
    bytes_max: int


class StatusCard(Struct, frozen=True):
    """The totals of the controller."""

    model: str
    engine_id: str
    epoch: int
    seq: int
    requests: int
    operations: int
    answered: int
    refused: int
    policy: str
    tiers: list[Tier]


class Snapshot(Struct, frozen=True):
    """The state of all adapters after event `seq`."""

    seq: int
    synced: bool
    status: StatusCard | None
    adapters: list[AdapterCard]


class LiveEvent(Struct, frozen=True):
    """One event; `event` has its type in the field `type`."""

    seq: int
    time_ms: int
    event: dict[str, Any]


class Live:
    """The endpoint; any number of readers share the table of one follower."""

    def __init__(self, follower: Follower) -> None:
        self._follower = follower
        self._readers = 0
        self._is_closed = False

    async def close(self) -> None:
        """End all streams: they would delay the end of the gateway, which lets requests end."""
        self._is_closed = True
        await self._follower.notify()

    async def events(self, request: Request) -> EventStream:
        """Answer with the stream."""
        if self._readers >= READERS_MAX:
            raise HttpError(429, f"{self._readers} readers follow the events, the most that may")
        since = request.headers.get("last-event-id", "")
        self._readers += 1
        is_number = since.isascii() and since.isdigit()
        return EventStream(self._stream(int(since) if is_number else None), self._on_closed)

    async def _on_closed(self) -> None:
        self._readers -= 1

    async def _stream(self, since: int | None) -> AsyncGenerator[bytes, None]:
        table, seq, updates = self._follower.table, since, 0
        while not self._is_closed:
            if table.seq is None:
                # Nothing is known before the first list.
                yield _KEEP_ALIVE
                await self._wait_for_change()
                continue
            missed = None if seq is None else table.events_after(seq)
            if missed is None:
                yield named_event("snapshot", table.seq, snapshot_of(table))
                seq, updates = table.seq, table.update_count
            for published in missed or ():
                yield named_event("event", published.seq, live_event(published))
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

    async def _wait_for_change(self) -> bool:
        try:
            async with asyncio.timeout(KEEP_ALIVE_S), self._follower.changed:
                await self._follower.changed.wait()
        except TimeoutError:
            return False
        return True


def snapshot_of(table: AdapterTable) -> Snapshot:
    """Return the table as readers see it."""
    cards = [adapter_card(view) for _, view in sorted(table.views.items())]
    return Snapshot(table.seq or 0, table.synced, status_card(table.status), cards)


def live_event(published: Published) -> LiveEvent:
    """Return one event as readers see it."""
    event = published.event
    fields = {"type": type(event).__name__, **msgspec.structs.asdict(event)}
    return LiveEvent(published.seq, published.time_ns // 1_000_000, fields)


def status_card(status: StatusShown | None) -> StatusCard | None:
    """Return the controller's totals as readers see them."""
    if status is None:
        return None
    tiers = [
        Tier(tier.name, tier.count, tier.count_max, tier.size_bytes, tier.size_bytes_max)
        for tier in status.tiers
    ]
    return StatusCard(
        model=status.model,
        engine_id=status.engine_id,
        epoch=status.epoch,
        seq=status.seq,
        requests=status.requests,
        operations=status.operations,
        answered=status.answered,
        refused=status.refused,
        policy=status.policy,
        tiers=tiers,
    )
