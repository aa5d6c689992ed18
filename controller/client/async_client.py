"""The client for asyncio.

What it is: sockets and a clock around `client_session`. What it is not: logic; what can be decided
without waiting is decided there. One rule: every wait ends with a call's deadline.
"""

import asyncio
import math
import os
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import suppress
from typing import Self, TypeVar, Unpack

import zmq
import zmq.asyncio

from controller.client.calls import TIMING, Call, GenerationCall, Timing
from controller.client.images import ImageSource, with_images
from controller.client.methods import AsyncAsking
from controller.client.pooling import PoolingCall
from controller.client.session import (
    GENERATION_TIMEOUT_S,
    TIMEOUT_S,
    SamplingOptions,
    Session,
    answer_of,
    generate_request,
)
from controller.client.sockets import connect_events, connect_requests, runtime_directory
from controller.client.streams import EventCursor, Gap
from messages.events import Published
from messages.requests import (
    CancelDone,
    Classify,
    Embed,
    EventsFetched,
    GenerationDone,
    Prompt,
    Request,
    TextPrompt,
    TokensStreamed,
)

R = TypeVar("R")

# So many frames are read before the event loop gets a turn.
_FRAMES_PER_TURN = 256
_POLL_MS_MAX = 60_000


class AsyncClient(AsyncAsking):
    """A client of one controller for any number of concurrent tasks of one event loop.

    Use it with `async with`. The arguments are those of `Client`.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str] | None = None,
        *,
        timeout_s: float = TIMEOUT_S,
        generation_timeout_s: float = GENERATION_TIMEOUT_S,
        timing: Timing = TIMING,
        context: "zmq.Context[zmq.Socket[bytes]] | None" = None,
    ) -> None:
        self._directory = runtime_directory(directory)
        self._context = zmq.asyncio.Context(context or zmq.Context.instance())
        self._session = Session(secrets.token_hex(6), timing, timeout_s, generation_timeout_s)
        self._socket = self._context.socket(zmq.DEALER)
        connect_requests(self._socket, self._directory)
        self._news = asyncio.Event()
        self._sleeps_until = math.inf
        self._tasks: list[asyncio.Task[None]] = []

    async def __aenter__(self) -> Self:
        for work in (self._read_frames(), self._send_frames()):
            task = asyncio.create_task(work)
            task.add_done_callback(self._task_ended)
            self._tasks.append(task)
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the tasks; what was under way ends with `EngineGone`."""
        self._session.close("the client was closed")
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._socket.close()

    async def generate(
        self,
        prompt: TextPrompt,
        adapter: str | None = None,
        *,
        images: ImageSource | Iterable[ImageSource] = (),
        timeout_s: float | None = None,
        attempts: int = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> "AsyncGeneration":
        """Continue a prompt (text or token ids) with an adapter, or the base model for None.

        `images` are image files, as bytes or as paths on this machine; the text has the model's own
        placeholder once for each, in their order. Raises `Malformed` where a request can't carry
        them.

        `sampling` is `max_tokens`, `temperature`, `top_k`, `top_p`, `seed` and `stop`. With
        `attempts` over 1 a retryable failure begins a new generation under a new id, as long as
        no token was handed out; reading with `text()` hands out nothing before the end.
        """
        whole: Prompt = prompt
        if images:
            whole = await asyncio.to_thread(with_images, prompt, images)
        request = generate_request(whole, adapter, sampling)
        call = self._session.begin_generation(request, time.monotonic(), timeout_s, attempts)
        self._wake()
        return AsyncGeneration(self, call)

    async def events(self, since: int | None = None, follow: bool = True) -> "AsyncEventStream":
        """The life-cycle events after number `since`, in order, each once.

        `since=0` begins with the first that the log tells, None with the next to come. With
        `follow` False the stream ends with the newest event there is now. What can't be told any
        more is marked by a `Gap`.
        """
        socket = self._subscribe() if follow else None
        next_seq = ((await self.status()).events_seq if since is None else since) + 1
        return AsyncEventStream(self, socket, EventCursor(next_seq, behind=since is not None))

    async def _ask(self, request: Request, reply_type: type[R], timeout_s: float | None) -> R:
        call = self._session.begin(request, time.monotonic(), timeout_s)
        return await self._answer(call, reply_type)

    async def _pool(
        self, request: Embed | Classify, timeout_s: float | None, attempts: int
    ) -> PoolingCall:
        call = self._session.begin_pooling(request, time.monotonic(), timeout_s, attempts)
        await self._settle(call)
        return call

    async def _answer(self, call: Call, reply_type: type[R]) -> R:
        await self._settle(call)
        return answer_of(call, reply_type)

    async def _settle(self, call: Call) -> None:
        self._wake()
        try:
            await self._wait(call, lambda: call.settled)
        finally:
            self._session.forget(call)

    async def _cancel(self, generation: GenerationCall) -> bool:
        call = self._begin_cancel(generation)
        return False if call is None else (await self._answer(call, CancelDone)).found

    def _begin_cancel(self, generation: GenerationCall) -> Call | None:
        call = self._session.begin_cancel(generation, time.monotonic())
        self._wake()
        return call

    def _forget(self, call: Call) -> None:
        self._session.forget(call)

    def _subscribe(self) -> zmq.asyncio.Socket:
        socket = self._context.socket(zmq.SUB)
        connect_events(socket, self._directory)
        return socket

    async def _wait(self, call: Call, ready: Callable[[], bool]) -> None:
        if not self._tasks:
            raise ValueError("the client is not open; use `async with AsyncClient(...)`")
        news = asyncio.Event()
        call.changed = news.set
        while not ready():
            news.clear()
            await news.wait()

    def _wake(self) -> None:
        """Tell the sending task that something is due before it wants to wake."""
        if self._session.wake_at() < self._sleeps_until:
            self._news.set()

    async def _read_frames(self) -> None:
        while True:
            for _ in range(_FRAMES_PER_TURN):
                self._session.receive(await self._socket.recv(), time.monotonic())
                self._wake()
            await asyncio.sleep(0)

    async def _send_frames(self) -> None:
        while True:
            self._news.clear()
            # A full queue to a controller that is away: what stays unsent is sent again.
            with suppress(zmq.Again):
                for frame in self._session.due(time.monotonic()):
                    await self._socket.send(frame, zmq.NOBLOCK)
            self._sleeps_until = self._session.wake_at()
            with suppress(TimeoutError):
                async with asyncio.timeout(_seconds_until(self._sleeps_until)):
                    await self._news.wait()

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        """Without its tasks the client can't hear an answer: nobody may wait for one."""
        if not task.cancelled() and task.exception() is not None:
            self._session.close(f"the client's task ended: {task.exception()!r}")


def _seconds_until(when: float) -> float | None:
    return None if when == math.inf else max(0.0, when - time.monotonic())


class AsyncGeneration:
    """A generation under way: `async for` its chunks as they come, or `await text()` at the end.

    A chunk is a `TokensStreamed`: `tokens[i]` is output number `offset + i`, each comes once.
    One task reads it. Leaving the `async with` block, or `close()`, ends a generation that nobody
    reads to its end.
    """

    def __init__(self, client: AsyncClient, call: GenerationCall) -> None:
        self._client = client
        self._call = call
        self._closed = False

    @property
    def request_id(self) -> str:
        """What the controller knows it by; another one after a further attempt."""
        return self._call.request_id

    @property
    def result(self) -> GenerationDone | None:
        """How it ended and how many tokens it took; None before, or where it failed."""
        return self._call.result

    def __aiter__(self) -> AsyncIterator[TokensStreamed]:
        return self

    async def __anext__(self) -> TokensStreamed:
        call = self._call
        if not self._closed:
            await self._client._wait(call, lambda: bool(call.chunks) or call.settled)
        if call.chunks:
            return call.pop()
        if not self._closed:
            answer_of(call, GenerationDone)
        raise StopAsyncIteration

    async def text(self) -> str:
        """The whole text, chunks that were iterated over included; waits for the end."""
        call = self._call
        if not self._closed:
            await self._client._wait(call, lambda: call.settled)
            answer_of(call, GenerationDone)
        return call.text()

    async def cancel(self) -> bool:
        """End it early: what it has is still read as usual; False where nothing was running."""
        return await self._client._cancel(self._call)

    async def close(self) -> None:
        """Read no more; if it still runs it is cancelled, without waiting for that."""
        if not self._closed and not self._call.settled:
            self._client._begin_cancel(self._call)
            self._client._forget(self._call)
        self._closed = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


class AsyncEventStream:
    """The life-cycle events in order, each once: `Published`, or a `Gap` for what is lost.

    A subscriber that was away, slow or restarted gets what it missed by request, unasked. An
    error of such a request ends one step; the stream goes on where it was with another.
    """

    def __init__(
        self, client: AsyncClient, socket: zmq.asyncio.Socket | None, cursor: EventCursor
    ) -> None:
        self._client = client
        self._socket = socket
        self._cursor = cursor

    @property
    def seq(self) -> int:
        """The number of the last event handed out: `since` for a stream that goes on from here."""
        return self._cursor.seq

    def __aiter__(self) -> AsyncIterator[Published | Gap]:
        return self

    async def __anext__(self) -> Published | Gap:
        while (item := await self.next_within(_POLL_MS_MAX / 1000)) is None:
            if self._socket is None or self._socket.closed:
                raise StopAsyncIteration
        return item

    async def next_within(self, timeout_s: float) -> Published | Gap | None:
        """The next event; None where none came in that time, or the stream is at its end."""
        until = time.monotonic() + timeout_s
        while not self._cursor.ready:
            if self._cursor.behind:
                await self._fetch()
            elif not await self._read(until):
                return None
        return self._cursor.pop()

    async def _fetch(self) -> None:
        reply = await self._client._ask(self._cursor.fetch(), EventsFetched, None)
        self._cursor.on_fetched(reply)

    async def _read(self, until: float) -> bool:
        """Take a frame of the subscription; False if there is none until then."""
        if self._socket is None or self._socket.closed:
            return False
        wait_s = until - time.monotonic()
        if not await self._socket.poll(max(0, math.ceil(wait_s * 1000))):
            return False
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
