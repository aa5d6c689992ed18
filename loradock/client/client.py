"""The blocking client: the coroutines of `loradock.client.methods`, run by the calling thread.

Its port blocks where the asyncio client's suspends, so a coroutine runs from its first step to its
end without an event loop or another thread.
"""

import functools
import inspect
import math
import os
import threading
import time
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import AbstractContextManager, suppress
from typing import Any, Concatenate, Generic, ParamSpec, Self, TypeVar, cast

import zmq

from loradock.client.calls import TIMING, ClientCall, GenerationCall, Timing
from loradock.client.methods import AsyncGeneration, Methods
from loradock.client.session import GENERATION_TIMEOUT_S, TIMEOUT_S
from loradock.client.sockets import (
    Connection,
    Port,
    Timeouts,
    check_place,
    connection_to,
    forked_error,
    open_events,
)
from loradock.client.streams import AsyncEventStream, EventItem, Subscription
from loradock.messages.requests import GenerationDone, TokensStreamed

InnerT = TypeVar("InnerT")
HandleT = TypeVar("HandleT")
P = ParamSpec("P")
R = TypeVar("R")

_POLL_S_MAX = 60.0
_FIRST_ANSWER_S_MAX = 2.0


class Blocking(Generic[InnerT]):
    """An object whose methods run the coroutines of another one to their end."""

    def __init__(self, inner: InnerT) -> None:
        self._inner = inner


def run(awaitable: Awaitable[R]) -> R:
    """Return the result of an awaitable that never suspends, because its waits block."""
    try:
        next(iter(awaitable.__await__()))
    except StopIteration as ended:
        return cast(R, ended.value)
    raise RuntimeError("a coroutine of the blocking client was suspended")


def blocking(
    method: Callable[Concatenate[InnerT, P], Awaitable[R]],
) -> Callable[Concatenate[Blocking[InnerT], P], R]:
    """Return the blocking method with the arguments and the docstring of a coroutine function."""

    @functools.wraps(method)
    def call(outer: Blocking[InnerT], /, *args: P.args, **kwargs: P.kwargs) -> R:
        return run(method(outer._inner, *args, **kwargs))

    return call


def opening(
    method: Callable[Concatenate[InnerT, P], Awaitable[R]], handle: Callable[[R], HandleT]
) -> Callable[Concatenate[Blocking[InnerT], P], HandleT]:
    """Return a blocking method whose result is the blocking `handle` of the coroutine's result."""

    @functools.wraps(method)
    def call(outer: Blocking[InnerT], /, *args: P.args, **kwargs: P.kwargs) -> HandleT:
        return handle(run(method(outer._inner, *args, **kwargs)))

    signature = inspect.signature(method).replace(return_annotation=handle)
    cast(Any, call).__signature__ = signature
    return call


class Generation(Blocking[AsyncGeneration]):
    """A generation in flight: iterate over its chunks as they arrive, or wait for its `text()`.

    A chunk is a `TokensStreamed`: `tokens[i]` is token `offset + i` of output `index`, each once.
    Leaving the `with` block, `close()`, and dropping the last reference to it, as by leaving a
    `for` loop over it, cancel a generation that was not read to its end.
    """

    read = blocking(AsyncGeneration.read)
    text = blocking(AsyncGeneration.text)
    texts = blocking(AsyncGeneration.texts)
    cancel = blocking(AsyncGeneration.cancel)
    close = blocking(AsyncGeneration.close)

    @property
    def request_id(self) -> str:
        """The id under which the controller knows it; a further attempt has another one."""
        return self._inner.request_id

    @property
    def result(self) -> GenerationDone | None:
        """The reason of its end and its numbers of tokens; None before the end, or if it failed."""
        return self._inner.result

    def __iter__(self) -> Iterator[TokensStreamed]:
        return self

    def __next__(self) -> TokensStreamed:
        try:
            return run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class EventStream(Blocking[AsyncEventStream]):
    """The life-cycle events, each once and in order; `Gap` or `Snapshot` for those not kept.

    Events that a subscription missed, by being late, slow or restarted, are fetched automatically.
    An error of such a fetch ends one `next`; another `next` continues the stream at its position.
    """

    next_within = blocking(AsyncEventStream.next_within)

    @property
    def seq(self) -> int:
        """The number of the last event returned: `since` for a stream that continues from here."""
        return self._inner.seq

    def __iter__(self) -> Iterator[EventItem]:
        return self

    def __next__(self) -> EventItem:
        try:
            return run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def close(self) -> None:
        """End the subscription."""
        self._inner.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class Client(Blocking[Methods]):
    """A blocking client of one controller.

    `directory` is the controller's (default: `$LORADOCK_DIR`, else `./.loradock`). A controller on
    another machine is reached by its `address` (`tcp://HOST:PORT`) instead, with the file of this
    client's key pair, `key`, and that of the controller's public key, `server_key`. `timeout_s` is
    the default time limit of a request, `generation_timeout_s` that of inference. Nothing is sent
    before the first call. A controller that starts again is waited for. `EngineGone` is raised for
    a directory of other files, and after two seconds for one in which no server ever was or an
    address at which none answers; `NotAllowed` if a remote server refuses the keys. A call raises
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
    ) -> None:
        connection = connection_to(directory, address, key, server_key)
        check_place(connection)
        limits = Timeouts(timeout_s, generation_timeout_s, timing)
        self._port = BlockingPort(connection, limits)
        super().__init__(Methods(self._port))

    load = blocking(Methods.load)
    stage = blocking(Methods.stage)
    activate = blocking(Methods.activate)
    hold = blocking(Methods.hold)
    prefetch = blocking(Methods.prefetch)
    release = blocking(Methods.release)
    deactivate = blocking(Methods.deactivate)
    evict = blocking(Methods.evict)
    remove = blocking(Methods.remove)
    activate_batch = blocking(Methods.activate_batch)
    list = blocking(Methods.list)
    show = blocking(Methods.show)
    status = blocking(Methods.status)
    metrics = blocking(Methods.metrics)
    cancel = blocking(Methods.cancel)
    list_requests = blocking(Methods.list_requests)
    cancel_request = blocking(Methods.cancel_request)
    list_slow = blocking(Methods.list_slow)
    settings = blocking(Methods.settings)
    change_settings = blocking(Methods.change_settings)
    stop_server = blocking(Methods.stop_server)
    embed = blocking(Methods.embed)
    classify = blocking(Methods.classify)
    generate = opening(Methods.generate, Generation)
    events = opening(Methods.events, EventStream)

    def close(self) -> None:
        """Close the socket; calls in flight end with `EngineGone`."""
        self._port.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class ExclusiveUse:
    """A context that one thread at a time can enter; it raises instead of waiting.

    The sockets of ZeroMQ must not be used by two threads, and do not work after a fork.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def __enter__(self) -> None:
        if os.getpid() != self._pid:
            raise forked_error(self._pid)
        if not self._lock.acquire(blocking=False):
            raise RuntimeError(
                "this client is in use by another thread; make a client in each thread"
            )

    def __exit__(self, *exception: object) -> None:
        self._lock.release()


class BlockingPort(Port):
    """The port whose waits block the calling thread."""

    def __init__(self, connection: Connection, limits: Timeouts) -> None:
        super().__init__(connection, limits)
        self._use = ExclusiveUse()
        # Generations whose last reference was dropped, maybe by another thread.
        self._dropped: deque[GenerationCall] = deque()

    def use(self) -> AbstractContextManager[None]:
        """Return the context of one thread at a time."""
        return self._use

    def flush(self) -> None:
        """Send the frames that are due; before the first answer, wait for it for two seconds.

        A controller executes nothing of a client that does not know its epoch. Its answer has the
        epoch, with which a generation that nothing reads yet is sent again.
        """
        self._exchange()
        end = time.monotonic() + _FIRST_ANSWER_S_MAX
        while len(self.session) and not self.session.knows_epoch and time.monotonic() < end:
            self._poll(end - time.monotonic())
            self._exchange()

    def _poll(self, wait_s: float) -> None:
        """Wait for a frame, at most until a frame is due."""
        wait_s = min(wait_s, self.session.wake_at() - time.monotonic())
        self._socket.poll(max(0, math.ceil(1000 * wait_s)))

    def _exchange(self) -> None:
        """Receive the frames that have arrived and send those that are due, without waiting."""
        session, now = self.session, time.monotonic()
        while self._dropped:
            session.abandon(self._dropped.popleft(), now)
        # `Again`: nothing more has arrived, or the queue to an absent controller is full; unsent
        # frames are sent again later.
        with suppress(zmq.Again):
            while True:
                session.receive(self._socket.recv(zmq.NOBLOCK), time.monotonic())
        with suppress(zmq.Again):
            for frame in session.due(time.monotonic()):
                self._socket.send(frame, zmq.NOBLOCK)

    async def wait(self, call: ClientCall, ready: Callable[[], bool]) -> None:  # noqa: ARG002
        """Exchange frames until `ready`, at the latest at the call's deadline."""
        with self._use:
            while not ready():
                self._poll(_POLL_S_MAX)
                self._exchange()

    async def in_background(self, function: Callable[[], R]) -> R:
        """Return the function's result."""
        return function()

    def drop(self, call: GenerationCall) -> None:
        """Cancel a generation that nothing refers to, at the latest with the next exchange."""
        self._dropped.append(call)
        with suppress(RuntimeError), self._use:
            if not self._socket.closed:
                self._exchange()

    def subscribe(self) -> Subscription:
        """Return a new subscription to the events."""
        return _Subscription(open_events(zmq.Context.instance(), self.connection))

    def close(self) -> None:
        """Close the socket; calls in flight end with `EngineGone`."""
        self.session.close("the client was closed")
        self._socket.close()

    def _on_change(self, call: ClientCall) -> None:
        """Do nothing: `wait` looks after each exchange."""


class _Subscription(Subscription):
    async def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame; None if none arrives in that time."""
        if not self._socket.poll(max(0, math.ceil(timeout_s * 1000))):
            return None
        return bytes(self._socket.recv(zmq.NOBLOCK))
