"""The asyncio client: sockets and a clock around `Session`.

Everything that needs no waiting is in `loradock.client.session`. Every wait ends at
the latest with the deadline of a call. Frames are sent and received by callbacks of the event loop,
because tasks and futures for them would cost as much as the rest of a short request.
"""

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

import zmq
import zmq.asyncio

from loradock.client import methods
from loradock.client.async_generation import AsyncGeneration
from loradock.client.calls import TIMING, ClientCall, GenerationCall, Timing
from loradock.client.exclusive_use import ExclusiveUse
from loradock.client.prepared import (
    PreparedCall,
    PreparedEvents,
    PreparedGeneration,
    PreparedList,
    fetch,
    method,
)
from loradock.client.session import GENERATION_TIMEOUT_S, TIMEOUT_S, Session, answer_of
from loradock.client.sockets import (
    connection_to,
    open_events,
    open_requests,
    silence_reason,
)
from loradock.client.streams import SILENCE_S, EventCursor, EventItem
from loradock.messages.requests import (
    AdaptersListed,
    CancelDone,
    SnapshotFetched,
)
from loradock.messages.wire import TOKEN_BYTES

C = TypeVar("C", bound=ClientCall)
R = TypeVar("R")

_FRAMES_PER_TURN = 256
"""Frames that are read before other tasks of the event loop run."""

_POLL_MS_MAX = 60_000


class AsyncClient:
    """A client of one controller for any number of concurrent tasks of one event loop.

    Use it with `async with`. The arguments are those of `Client`.
    """

    def __init__(  # noqa: PLR0913 - named options
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        address: str = "",
        key: str | os.PathLike[str] = "",
        server_key: str | os.PathLike[str] = "",
        timeout_s: float = TIMEOUT_S,
        generation_timeout_s: float = GENERATION_TIMEOUT_S,
        timing: Timing = TIMING,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self._connection = connection_to(directory, address, key, server_key)
        context = context or zmq.Context.instance()
        self._context = zmq.asyncio.Context(context)
        self._session = Session(
            secrets.token_bytes(TOKEN_BYTES), timing, timeout_s, generation_timeout_s
        )
        self._session.silence = partial(silence_reason, self._connection)
        self._socket: zmq.Socket[bytes] = open_requests(context, self._connection)
        self._wakes_at = math.inf
        self._wakeup: asyncio.Handle | None = None
        self._use = ExclusiveUse()
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aenter__(self) -> Self:
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._socket, self._exchange)
        self._wake()
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client; calls in flight end with `EngineGone`."""
        self._session.close("the client was closed")
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._socket.close()

    async def _answer(self, prepared: PreparedCall[C, R]) -> R:
        self._check_use()
        call = prepared.begin(self._session, time.monotonic())
        await self._settle(call)
        return prepared.result(call)

    async def _list(self, prepared: PreparedList) -> AdaptersListed:
        while not prepared.is_complete:
            prepared.add(await self._answer(prepared.page()))
        return prepared.result()

    def _prepare_generation(self, prepared: PreparedGeneration) -> "AsyncGeneration":
        return AsyncGeneration(self, prepared)

    async def _begin_generation(self, prepared: PreparedGeneration) -> GenerationCall:
        self._check_use()
        if prepared.images:
            request = await asyncio.to_thread(prepared.request)
        else:
            request = prepared.request()
        call = self._session.begin_generation(
            request, time.monotonic(), prepared.timeout_s, prepared.attempts
        )
        self._wake()
        return call

    async def _open_events(self, prepared: PreparedEvents) -> "AsyncEventStream":
        socket = self._subscribe() if prepared.follow else None
        events_seq = (await self.status()).events_seq if prepared.since is None else 0
        return AsyncEventStream(self, socket, prepared.cursor(events_seq))

    load = method(methods.load, _answer)
    stage = method(methods.stage, _answer)
    activate = method(methods.activate, _answer)
    hold = method(methods.hold, _answer)
    prefetch = method(methods.prefetch, _answer)
    release = method(methods.release, _answer)
    deactivate = method(methods.deactivate, _answer)
    evict = method(methods.evict, _answer)
    remove = method(methods.remove, _answer)
    activate_batch = method(methods.activate_batch, _answer)
    list = method(methods.list, _list)
    show = method(methods.show, _answer)
    status = method(methods.status, _answer)
    metrics = method(methods.metrics, _answer)
    cancel = method(methods.cancel, _answer)
    list_requests = method(methods.list_requests, _answer)
    cancel_request = method(methods.cancel_request, _answer)
    list_slow = method(methods.list_slow, _answer)
    settings = method(methods.settings, _answer)
    change_settings = method(methods.change_settings, _answer)
    stop_server = method(methods.stop_server, _answer)
    embed = method(methods.embed, _answer)
    classify = method(methods.classify, _answer)
    generate = method(methods.generate, _prepare_generation)
    events = method(methods.events, _open_events)

    async def _settle(self, call: ClientCall) -> None:
        self._wake()
        try:
            await self._wait(call, lambda: call.settled)
        finally:
            self._session.forget(call)

    async def _cancel(self, generation: GenerationCall) -> bool:
        """Request a cancellation and return whether the generation was running."""
        call = self._begin_cancel(generation)
        if call is None:
            return False
        await self._settle(call)
        return answer_of(call, CancelDone).found

    def _begin_cancel(self, generation: GenerationCall) -> ClientCall | None:
        call = self._session.begin_cancel(generation, time.monotonic())
        self._wake()
        return call

    def _abandon(self, call: GenerationCall) -> None:
        self._session.abandon(call, time.monotonic())
        self._wake()

    def _drop(self, call: GenerationCall) -> None:
        """Cancel a generation that nothing refers to; any thread may call this."""
        # The loop may be closed, and with it the client.
        with suppress(RuntimeError):
            self._use.check_process()
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._abandon, call)

    def _check_use(self) -> None:
        """Raise `RuntimeError` in a forked process, or on another event loop."""
        self._use.check_process()
        if self._loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError(
                "this client is open on another event loop; make a client on each loop"
            )

    def _subscribe(self) -> zmq.asyncio.Socket:
        return open_events(self._context, self._connection)

    async def _wait(self, call: ClientCall, ready: Callable[[], bool]) -> None:
        if self._loop is None:
            raise ValueError("the client is not open; use `async with AsyncClient(...)`")
        while not ready():
            changed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            call.on_change = partial(_resolve, changed, ready)
            await changed

    def _wake(self) -> None:
        """Call `_exchange` when the next frame is due, if it would be called later."""
        self._wake_at(self._session.wake_at())

    def _wake_at(self, when: float) -> None:
        if when >= self._wakes_at or self._loop is None or self._socket.closed:
            return
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._wakes_at = when
        wait_s = when - time.monotonic()
        # Requests that tasks begin before it is called share a frame.
        if wait_s <= 0:
            self._wakeup = self._loop.call_soon(self._exchange)
        else:
            self._wakeup = self._loop.call_later(wait_s, self._exchange)

    def _exchange(self) -> None:
        """Send the frames that are due and process those that have arrived."""
        if self._wakeup is not None:
            self._wakeup.cancel()
            self._wakeup, self._wakes_at = None, math.inf
        try:
            self._send_due()
            is_empty = self._receive_arrived()
        except BaseException as error:
            # An event loop only logs it, and no answer may be received any more.
            self._session.close(f"the client failed: {error!r}")
            raise
        self._wake_at(self._session.wake_at() if is_empty else -math.inf)

    def _send_due(self) -> None:
        # The queue to an absent controller is full; unsent frames are sent again later.
        with suppress(zmq.Again):
            for frame in self._session.due(time.monotonic()):
                self._socket.send(frame, zmq.NOBLOCK)

    def _receive_arrived(self) -> bool:
        """Process frames, and return whether none is left: then the descriptor reports the next.

        It may not report frames that arrived during another operation on the socket.
        """
        now = time.monotonic()
        try:
            for _ in range(_FRAMES_PER_TURN):
                self._session.receive(self._socket.recv(zmq.NOBLOCK), now)
        except zmq.Again:
            return True
        return False


def _resolve(changed: "asyncio.Future[None]", ready: Callable[[], bool]) -> None:
    """Wake the task that waits, if it still does and `ready` returns true or raises."""
    if changed.done():
        return
    try:
        if ready():
            changed.set_result(None)
    except BaseException as error:
        # `ready` belongs to the task, and the caller to all tasks.
        changed.set_exception(error)


class AsyncEventStream:
    """The life-cycle events, each once and in order; `Gap` or `Snapshot` for those not kept.

    Events that a subscription missed, by being late, slow or restarted, are fetched automatically.
    An error of such a fetch ends one step; another step continues the stream at its position.
    """

    def __init__(
        self, client: AsyncClient, socket: zmq.asyncio.Socket | None, cursor: EventCursor
    ) -> None:
        self._client = client
        self._socket = socket
        self._cursor = cursor
        self._received_at = math.inf
        self._note_frame()

    def _note_frame(self) -> None:
        """Note that the subscription is not silent; a local one may be."""
        if self._client._connection.keys is not None:
            self._received_at = time.monotonic()

    @property
    def seq(self) -> int:
        """The number of the last event returned: `since` for a stream that continues from here."""
        return self._cursor.seq

    def __aiter__(self) -> AsyncIterator[EventItem]:
        return self

    async def __anext__(self) -> EventItem:
        while (item := await self.next_within(_POLL_MS_MAX / 1000)) is None:
            if self._socket is None or self._socket.closed:
                raise StopAsyncIteration
        return item

    async def next_within(self, timeout_s: float) -> EventItem | None:
        """Return the next event; None if none arrived in that time, or at the stream's end."""
        until = time.monotonic() + timeout_s
        while not self._cursor.ready:
            if self._cursor.needs_fetch:
                await self._fetch()
            elif not await self._read(until):
                return None
        return self._cursor.pop()

    async def _fetch(self) -> None:
        reply = await self._client._answer(fetch(self._cursor.fetch_request()))
        if isinstance(reply, SnapshotFetched):
            rest = PreparedList(None)
            rest.add(reply)
            self._cursor.on_fetched(await self._client._list(rest))
        else:
            self._cursor.on_fetched(reply)

    async def _read(self, until: float) -> bool:
        """Process a frame of the subscription; False if none arrived until then."""
        if self._socket is None or self._socket.closed:
            return False
        silent_at = self._received_at + SILENCE_S
        wait_s = min(until, silent_at) - time.monotonic()
        if not await self._socket.poll(max(0, math.ceil(wait_s * 1000))):
            if time.monotonic() < silent_at:
                return False
            self._cursor.expect_more()
            self._note_frame()
            return True
        self._note_frame()
        self._cursor.on_frame(await self._socket.recv())
        return True

    def close(self) -> None:
        """End the subscription."""
        if self._socket is not None:
            self._socket.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        self.close()
