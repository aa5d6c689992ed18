"""The task that keeps an `AdapterTable` up to date from the life-cycle stream.

Events change states at once. The fields that events do not contain are read for the changed names
together, once per `REFRESH_S`, so that a burst of events costs a bounded number of queries. The
status, with the requests of all adapters, is read then too and whenever a reader needs it now.
"""

import asyncio
from typing import Final

import structlog

from loradock.client import AsyncClient, AsyncEventStream, LoradockError, UnknownAdapter
from loradock.gateway.adapters.table import AdapterTable
from loradock.messages.events import Published
from loradock.messages.requests import StatusShown

REFRESH_S: Final = 0.25
SHOWN_MAX: Final = 128
"""More changed names than this are read as one list."""

STATUS_TIMEOUT_S: Final = 10.0

_RETRY_S: Final = 0.5
_EVENTS_PER_YIELD: Final = 256

log = structlog.get_logger("gateway")


class Follower:
    """Keeps `table` up to date; `changed` is notified after each change."""

    def __init__(self, client: AsyncClient, table: AdapterTable) -> None:
        self._client = client
        self.table = table
        self.changed = asyncio.Condition()
        self._reading = asyncio.Lock()
        # The numbers of the last query for a status that began, and of the last that was answered.
        self._begun = self._answered = 0

    async def run(self) -> None:
        """Follow until cancelled; an absent controller is awaited."""
        while True:
            try:
                await self._follow()
            except (LoradockError, TimeoutError) as error:
                self.table.synced = False
                log.warning("the controller's events can't be followed", error=str(error))
            await asyncio.sleep(_RETRY_S)

    async def _follow(self) -> None:
        await self._relist()
        async with await self._client.events(since=self.table.seq) as stream:
            while True:
                await self._read(stream)
                if self.table.needs_list:
                    await self._relist()
                else:
                    await self._refresh()

    async def status_now(self, timeout_s: float) -> StatusShown | None:
        """Return what `read_status` returns; None if the controller does not answer in time."""
        try:
            return await self.read_status(timeout_s)
        except (LoradockError, TimeoutError):
            return None

    async def read_status(self, timeout_s: float) -> StatusShown:
        """Return the controller's status as of a moment after this call.

        One query is in flight at a time, and all callers that wait for its end share the next one.
        Raises `LoradockError` or `TimeoutError` if the controller does not answer in time.
        """
        before = self._begun
        async with asyncio.timeout(timeout_s), self._reading:
            if self._answered > before and self.table.status is not None:
                return self.table.status
            self._begun = number = self._begun + 1
            status = await self._client.status(timeout_s, uses=True)
            self.table.set_status(status)
            self._answered = number
        await self.notify()
        return status

    async def _relist(self) -> None:
        self.table.reset(await self._client.list())
        await self.read_status(STATUS_TIMEOUT_S)

    async def _read(self, stream: AsyncEventStream) -> None:
        """Process the events that arrive within `REFRESH_S`."""
        count, item = 0, await stream.next_within(REFRESH_S)
        while item is not None:
            if isinstance(item, Published):
                self.table.apply(item)
            else:
                self.table.on_gap(stream.seq)
            count += 1
            if count % _EVENTS_PER_YIELD == 0:
                await self.notify()
                await asyncio.sleep(0)
                return
            item = await stream.next_within(0.0)
        if count:
            await self.notify()

    async def _refresh(self) -> None:
        """Read the views of changed adapters, and then the status, which has their requests."""
        table = self.table
        if len(table.stale) > SHOWN_MAX:
            await self._relist()
            return
        names = sorted(table.stale)
        for name in names:
            try:
                table.update(name, (await self._client.show(name)).adapter)
            except UnknownAdapter:
                table.update(name, None)
        await self.read_status(STATUS_TIMEOUT_S)

    async def notify(self) -> None:
        """Wake all readers of the table."""
        async with self.changed:
            self.changed.notify_all()
