"""The blocking client.

What it is: sockets and a clock around `client_session`. What it is not: logic; what can be decided
without waiting is decided there. One rule: every wait ends with a call's deadline.
"""

import math
import os
import secrets
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Self, TypeVar, Unpack

import zmq

from controller.client.calls import TIMING, Call, GenerationCall, Timing
from controller.client.images import ImageSource, with_images
from controller.client.methods import Asking
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
    Request,
    TextPrompt,
    TokensStreamed,
)

R = TypeVar("R")

_POLL_MS_MAX = 60_000


class Client(Asking):
    """A blocking client of one controller.

    `directory` is the controller's (else `$LORADOCK_DIR`, else `./.loradock`). `timeout_s` is how
    long a request may take unless a call says otherwise, `generation_timeout_s` inference.
    Nothing is sent before the first call, and a controller that is not there yet is waited for.
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
        self._context = context or zmq.Context.instance()
        self._session = Session(secrets.token_hex(6), timing, timeout_s, generation_timeout_s)
        self._socket = self._context.socket(zmq.DEALER)
        connect_requests(self._socket, self._directory)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; what was under way ends with `EngineGone`."""
        self._session.close("the client was closed")
        self._socket.close()

    def generate(
        self,
        prompt: TextPrompt,
        adapter: str | None = None,
        *,
        images: ImageSource | Iterable[ImageSource] = (),
        timeout_s: float | None = None,
        attempts: int = 1,
        **sampling: Unpack[SamplingOptions],
    ) -> "Generation":
        """Continue a prompt (text or token ids) with an adapter, or the base model for None.

        `images` are image files, as bytes or as paths on this machine; the text has the model's own
        placeholder once for each, in their order. Raises `Malformed` where a request can't carry
        them.

        `sampling` is `max_tokens`, `temperature`, `top_k`, `top_p`, `seed` and `stop`. With
        `attempts` over 1 a retryable failure begins a new generation under a new id, as long as
        no token was handed out; reading with `text()` hands out nothing before the end.
        """
        request = generate_request(with_images(prompt, images), adapter, sampling)
        call = self._session.begin_generation(request, time.monotonic(), timeout_s, attempts)
        self._exchange()
        return Generation(self, call)

    def events(self, since: int | None = None, follow: bool = True) -> "EventStream":
        """The life-cycle events after number `since`, in order, each once.

        `since=0` begins with the first that the log tells, None with the next to come. With
        `follow` False the stream ends with the newest event there is now. What can't be told any
        more is marked by a `Gap`.
        """
        socket = self._subscribe() if follow else None
        next_seq = (self.status().events_seq if since is None else since) + 1
        return EventStream(self, socket, EventCursor(next_seq, behind=since is not None))

    def _ask(self, request: Request, reply_type: type[R], timeout_s: float | None) -> R:
        call = self._session.begin(request, time.monotonic(), timeout_s)
        self._settle(call)
        return answer_of(call, reply_type)

    def _pool(
        self, request: Embed | Classify, timeout_s: float | None, attempts: int
    ) -> PoolingCall:
        call = self._session.begin_pooling(request, time.monotonic(), timeout_s, attempts)
        self._settle(call)
        return call

    def _settle(self, call: Call) -> None:
        try:
            self._wait(lambda: call.settled)
        finally:
            self._session.forget(call)

    def _cancel(self, generation: GenerationCall, wait: bool) -> bool:
        """Pass on a cancellation; whether something was running, if that is waited for."""
        call = self._session.begin_cancel(generation, time.monotonic())
        if call is None or not wait:
            self._exchange()
            return False
        self._wait(lambda: call.settled)
        return answer_of(call, CancelDone).found

    def _forget(self, call: Call) -> None:
        self._session.forget(call)

    def _subscribe(self) -> "zmq.Socket[bytes]":
        socket = self._context.socket(zmq.SUB)
        connect_events(socket, self._directory)
        return socket

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Move frames in and out until `ready`; every call has a deadline, so that comes."""
        while not ready():
            self._exchange()
            if ready():
                return
            wait_s = self._session.wake_at() - time.monotonic()
            self._socket.poll(max(0, math.ceil(min(_POLL_MS_MAX, wait_s * 1000))))

    def _exchange(self) -> None:
        """Take what has come, send what is due, without waiting."""
        try:
            while True:
                self._session.receive(self._socket.recv(zmq.NOBLOCK), time.monotonic())
        except zmq.Again:
            pass
        try:
            for frame in self._session.due(time.monotonic()):
                self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # The queue to a controller that is away is full; what stays unsent is sent again.
            pass


class Generation:
    """A generation under way: iterate over its chunks as they come, or take `text()` at the end.

    A chunk is a `TokensStreamed`: `tokens[i]` is output number `offset + i`, each comes once.
    Leaving the `with` block, or `close()`, ends a generation that nobody reads to its end.
    """

    def __init__(self, client: Client, call: GenerationCall) -> None:
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

    def __iter__(self) -> Iterator[TokensStreamed]:
        return self

    def __next__(self) -> TokensStreamed:
        call = self._call
        if not self._closed:
            self._client._wait(lambda: bool(call.chunks) or call.settled)
        if call.chunks:
            return call.pop()
        if not self._closed:
            answer_of(call, GenerationDone)
        raise StopIteration

    def text(self) -> str:
        """The whole text, chunks that were iterated over included; waits for the end."""
        call = self._call
        if not self._closed:
            self._client._wait(lambda: call.settled)
            answer_of(call, GenerationDone)
        return call.text()

    def cancel(self) -> bool:
        """End it early: what it has is still read as usual; False where nothing was running."""
        return self._client._cancel(self._call, wait=True)

    def close(self) -> None:
        """Read no more; if it still runs it is cancelled, without waiting for that."""
        if not self._closed and not self._call.settled:
            self._client._cancel(self._call, wait=False)
            self._client._forget(self._call)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EventStream:
    """The life-cycle events in order, each once: `Published`, or a `Gap` for what is lost.

    A subscriber that was away, slow or restarted gets what it missed by request, unasked. An
    error of such a request ends one `next`; the stream goes on where it was with another.
    """

    def __init__(
        self, client: Client, socket: "zmq.Socket[bytes] | None", cursor: EventCursor
    ) -> None:
        self._client = client
        self._socket = socket
        self._cursor = cursor

    @property
    def seq(self) -> int:
        """The number of the last event handed out: `since` for a stream that goes on from here."""
        return self._cursor.seq

    def __iter__(self) -> Iterator[Published | Gap]:
        return self

    def __next__(self) -> Published | Gap:
        while (item := self.next_within(_POLL_MS_MAX / 1000)) is None:
            if self._socket is None or self._socket.closed:
                raise StopIteration
        return item

    def next_within(self, timeout_s: float) -> Published | Gap | None:
        """The next event; None where none came in that time, or the stream is at its end."""
        until = time.monotonic() + timeout_s
        while not self._cursor.ready:
            if self._cursor.behind:
                self._fetch()
            elif not self._read(until):
                return None
        return self._cursor.pop()

    def _fetch(self) -> None:
        self._cursor.on_fetched(self._client._ask(self._cursor.fetch(), EventsFetched, None))

    def _read(self, until: float) -> bool:
        """Take a frame of the subscription; False if there is none until then."""
        if self._socket is None or self._socket.closed:
            return False
        wait_s = until - time.monotonic()
        if not self._socket.poll(max(0, math.ceil(wait_s * 1000))):
            return False
        self._cursor.on_frame(self._socket.recv(zmq.NOBLOCK))
        return True

    def close(self) -> None:
        """End the subscription."""
        if self._socket is not None:
            self._socket.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()
