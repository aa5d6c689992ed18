"""The blocking client: sockets and a clock around `Session`.

Everything that needs no waiting is in `loradock.client.session`. Every wait ends at
the latest with the deadline of a call.
"""

import math
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

import zmq

from loradock.client import methods
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
    GenerationDone,
    SnapshotFetched,
    TokensStreamed,
)
from loradock.messages.wire import TOKEN_BYTES

C = TypeVar("C", bound=ClientCall)
R = TypeVar("R")

_POLL_MS_MAX = 60_000


class Client:
    """A blocking client of one controller.

    `directory` is the controller's (default: `$LORADOCK_DIR`, else `./.loradock`). A controller on
    another machine is reached by its `address` (`tcp://HOST:PORT`) instead, with the file of this
    client's key pair, `key`, and that of the controller's public key, `server_key`. `timeout_s` is
    the default time limit of a request, `generation_timeout_s` that of inference. Nothing is sent
    before the first call. A controller that is not running yet is waited for. A call raises
    `RuntimeError` while another thread is in one, and in a forked process.
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
        self._context = context or zmq.Context.instance()
        self._session = Session(
            secrets.token_bytes(TOKEN_BYTES), timing, timeout_s, generation_timeout_s
        )
        self._session.silence = partial(silence_reason, self._connection)
        self._socket = open_requests(self._context, self._connection)
        self._use = ExclusiveUse()
        # Generations whose last reference was dropped, maybe by another thread.
        self._dropped: deque[GenerationCall] = deque()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the socket; calls in flight end with `EngineGone`."""
        self._session.close("the client was closed")
        self._socket.close()

    def _answer(self, prepared: PreparedCall[C, R]) -> R:
        with self._use:
            call = prepared.begin(self._session, time.monotonic())
            try:
                self._wait(lambda: call.settled)
            finally:
                self._session.forget(call)
        return prepared.result(call)

    def _list(self, prepared: PreparedList) -> AdaptersListed:
        while not prepared.is_complete:
            prepared.add(self._answer(prepared.page()))
        return prepared.result()

    def _start_generation(self, prepared: PreparedGeneration) -> "Generation":
        request = prepared.request()
        with self._use:
            call = self._session.begin_generation(
                request, time.monotonic(), prepared.timeout_s, prepared.attempts
            )
            self._exchange()
        return Generation(self, call)

    def _open_events(self, prepared: PreparedEvents) -> "EventStream":
        socket = self._subscribe() if prepared.follow else None
        events_seq = self.status().events_seq if prepared.since is None else 0
        return EventStream(self, socket, prepared.cursor(events_seq))

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
    generate = method(methods.generate, _start_generation)
    events = method(methods.events, _open_events)

    def _cancel(self, generation: GenerationCall, wait: bool) -> bool:
        """Request a cancellation; with `wait`, return whether the generation was running."""
        with self._use:
            call = self._session.begin_cancel(generation, time.monotonic())
            if call is None or not wait:
                self._exchange()
                return False
            self._wait(lambda: call.settled)
        return answer_of(call, CancelDone).found

    def _drop(self, generation: GenerationCall) -> None:
        """Cancel a generation that nothing refers to, at the latest with the next exchange."""
        self._dropped.append(generation)
        with suppress(RuntimeError), self._use:
            if not self._socket.closed:
                self._exchange()

    def _forget(self, call: ClientCall) -> None:
        self._session.forget(call)

    def _subscribe(self) -> "zmq.Socket[bytes]":
        return open_events(self._context, self._connection)

    def _wait(self, ready: Callable[[], bool]) -> None:
        """Exchange frames until `ready`, at the latest at the call's deadline."""
        with self._use:
            while not ready():
                self._exchange()
                if ready():
                    return
                wait_s = self._session.wake_at() - time.monotonic()
                self._socket.poll(max(0, math.ceil(min(_POLL_MS_MAX, wait_s * 1000))))

    def _exchange(self) -> None:
        """Receive the frames that have arrived and send those that are due, without waiting."""
        while self._dropped:
            self._session.abandon(self._dropped.popleft(), time.monotonic())
        try:
            while True:
                self._session.receive(self._socket.recv(zmq.NOBLOCK), time.monotonic())
        except zmq.Again:
            pass
        try:
            for frame in self._session.due(time.monotonic()):
                self._socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            # The queue to an absent controller is full; unsent frames are sent again later.
            pass


class Generation:
    """A generation in flight: iterate over its chunks as they arrive, or wait for its `text()`.

    A chunk is a `TokensStreamed`: `tokens[i]` is token `offset + i` of output `index`, each once.
    Leaving the `with` block, `close()`, and dropping the last reference to it, as by leaving a
    `for` loop over it, cancel a generation that was not read to its end.
    """

    def __init__(self, client: Client, call: GenerationCall) -> None:
        self._client = client
        self._call = call
        self._closed = False

    def __del__(self) -> None:
        if not self._closed and not self._call.settled:
            self._client._drop(self._call)

    @property
    def request_id(self) -> str:
        """The id under which the controller knows it; a further attempt has another one."""
        return self._call.request_id

    @property
    def result(self) -> GenerationDone | None:
        """How it ended and its numbers of tokens; None before the end, or if it failed."""
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

    def read(self, on_chunk: Callable[[TokensStreamed], None]) -> GenerationDone:
        """Call a function with each further chunk as it arrives, and return how it ended."""
        for chunk in self:
            on_chunk(chunk)
        return answer_of(self._call, GenerationDone)

    def text(self) -> str:
        """Wait for the end and return the whole text, including chunks iterated over before.

        Of several outputs (`n`) it is the first one's.
        """
        return self.texts()[0]

    def texts(self) -> tuple[str, ...]:
        """Wait for the end and return the whole text of each output."""
        call = self._call
        if not self._closed:
            self._client._wait(lambda: call.settled)
            answer_of(call, GenerationDone)
        return call.texts()

    def cancel(self) -> bool:
        """End it early; its output can still be read. False if it was not running."""
        return self._client._cancel(self._call, wait=True)

    def close(self) -> None:
        """Stop reading; a running generation is cancelled without waiting for the answer."""
        if not self._closed and not self._call.settled:
            self._client._cancel(self._call, wait=False)
            self._client._forget(self._call)
        self._closed = True

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EventStream:
    """The life-cycle events, each once and in order; `Gap` or `Snapshot` for those not kept.

    Events that a subscription missed, by being late, slow or restarted, are fetched automatically.
    An error of such a fetch ends one `next`; another `next` continues the stream at its position.
    """

    def __init__(
        self, client: Client, socket: "zmq.Socket[bytes] | None", cursor: EventCursor
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

    def __iter__(self) -> Iterator[EventItem]:
        return self

    def __next__(self) -> EventItem:
        while (item := self.next_within(_POLL_MS_MAX / 1000)) is None:
            if self._socket is None or self._socket.closed:
                raise StopIteration
        return item

    def next_within(self, timeout_s: float) -> EventItem | None:
        """Return the next event; None if none arrived in that time, or at the stream's end."""
        until = time.monotonic() + timeout_s
        while not self._cursor.ready:
            if self._cursor.needs_fetch:
                self._fetch()
            elif not self._read(until):
                return None
        return self._cursor.pop()

    def _fetch(self) -> None:
        reply = self._client._answer(fetch(self._cursor.fetch_request()))
        if isinstance(reply, SnapshotFetched):
            rest = PreparedList(None)
            rest.add(reply)
            self._cursor.on_fetched(self._client._list(rest))
        else:
            self._cursor.on_fetched(reply)

    def _read(self, until: float) -> bool:
        """Process a frame of the subscription; False if none arrived until then."""
        if self._socket is None or self._socket.closed:
            return False
        silent_at = self._received_at + SILENCE_S
        wait_s = min(until, silent_at) - time.monotonic()
        if not self._socket.poll(max(0, math.ceil(wait_s * 1000))):
            if time.monotonic() < silent_at:
                return False
            self._cursor.expect_more()
            self._note_frame()
            return True
        self._note_frame()
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
