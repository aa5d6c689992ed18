"""The asyncio client: a port on the event loop.

Frames are sent and received by callbacks of the event loop, because tasks and futures for them
would cost as much as the rest of a short request.
"""

import asyncio
import math
import os
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import NamedTuple, Self, TypeVar

import zmq
import zmq.asyncio

from loradock.client.calls import TIMING, ClientCall, GenerationCall, Timing
from loradock.client.methods import Methods
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
from loradock.client.streams import Subscription

R = TypeVar("R")

_FRAMES_PER_TURN = 256
"""Frames that are read before other tasks of the event loop run."""


class AsyncClient(Methods):
    """A client of one controller for any number of concurrent tasks of one event loop.

    Use it with `async with`, which raises what `Client` raises. It has the arguments of `Client`.
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
        limits = Timeouts(timeout_s, generation_timeout_s, timing)
        self._loop_port = AsyncPort(connection, limits)
        super().__init__(self._loop_port)

    async def __aenter__(self) -> Self:
        await asyncio.to_thread(check_place, self._loop_port.connection)
        self._loop_port.open(asyncio.get_running_loop())
        return self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the client; calls in flight end with `EngineGone`."""
        self._loop_port.close()


class _Waiter(NamedTuple):
    changed: "asyncio.Future[None]"
    ready: Callable[[], bool]


class AsyncPort(Port):
    """The port whose waits suspend a task; it belongs to the loop on which it was opened."""

    def __init__(self, connection: Connection, limits: Timeouts) -> None:
        super().__init__(connection, limits)
        self._context = zmq.asyncio.Context(zmq.Context.instance())
        self._wakes_at = math.inf
        self._wakeup: asyncio.Handle | None = None
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiters: dict[ClientCall, _Waiter] = {}

    def open(self, loop: asyncio.AbstractEventLoop) -> None:
        """Begin to exchange frames on a loop."""
        self._loop = loop
        loop.add_reader(self._socket, self._exchange)
        self.flush()

    def close(self) -> None:
        """Close the socket; calls in flight end with `EngineGone`."""
        self.session.close("the client was closed")
        if self._socket.closed:
            return
        if self._loop is not None:
            self._loop.remove_reader(self._socket)
        if self._wakeup is not None:
            self._wakeup.cancel()
        self._socket.close()

    def use(self) -> AbstractContextManager[None]:
        """Return a context for any number of tasks of the loop."""
        if os.getpid() != self._pid:
            raise forked_error(self._pid)
        if self._loop not in (None, asyncio.get_running_loop()):
            raise RuntimeError(
                "this client is open on another event loop; make a client on each loop"
            )
        return _UNLIMITED

    def flush(self) -> None:
        """Exchange frames when the next one is due, if that would happen later."""
        self._wake_at(self.session.wake_at())

    def silence_reason(self) -> str:
        """Return why no local server answers; to ask a remote server would block the loop."""
        return "" if self.connection.keys else super().silence_reason()

    async def wait(self, call: ClientCall, ready: Callable[[], bool]) -> None:
        """Suspend the task until `ready`."""
        if self._loop is None:
            raise ValueError("the client is not open; use `async with AsyncClient(...)`")
        while not ready():
            waiter = self._waiters[call] = _Waiter(self._loop.create_future(), ready)
            try:
                await waiter.changed
            finally:
                if self._waiters.get(call) is waiter:
                    del self._waiters[call]

    async def in_background(self, function: Callable[[], R]) -> R:
        """Run the function in a thread."""
        return await asyncio.to_thread(function)

    def drop(self, call: GenerationCall) -> None:
        """Cancel a generation that nothing refers to; any thread can call this."""
        if self._loop is None or os.getpid() != self._pid:
            return
        # The loop may be closed, and with it the client.
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._abandon, call)

    def subscribe(self) -> Subscription:
        """Return a new subscription to the events."""
        return _Subscription(open_events(self._context, self.connection))

    def _abandon(self, call: GenerationCall) -> None:
        self.session.abandon(call, time.monotonic())
        self.flush()

    def _on_change(self, call: ClientCall) -> None:
        """Wake the task that waits for a call, if `ready` returns true or raises."""
        waiter = self._waiters.get(call)
        if waiter is None or waiter.changed.done():
            return
        try:
            if waiter.ready():
                waiter.changed.set_result(None)
        except BaseException as error:
            # `ready` belongs to the task, and the caller to all tasks.
            waiter.changed.set_exception(error)

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
            self.session.close(f"the client failed: {error!r}")
            raise
        self._wake_at(self.session.wake_at() if is_empty else -math.inf)

    def _send_due(self) -> None:
        # The queue to an absent controller is full; unsent frames are sent again later.
        with suppress(zmq.Again):
            for frame in self.session.due(time.monotonic()):
                self._socket.send(frame, zmq.NOBLOCK)

    def _receive_arrived(self) -> bool:
        """Process frames, and return whether none is left: then the descriptor reports the next.

        It may not report frames that arrived during another operation on the socket.
        """
        now = time.monotonic()
        try:
            for _ in range(_FRAMES_PER_TURN):
                self.session.receive(self._socket.recv(zmq.NOBLOCK), now)
        except zmq.Again:
            return True
        return False


_UNLIMITED: "AbstractContextManager[None]" = nullcontext()


class _Subscription(Subscription):
    async def receive(self, timeout_s: float) -> bytes | None:
        """Return the next frame; None if none arrives in that time."""
        if not await self._socket.poll(max(0, math.ceil(timeout_s * 1000))):
            return None
        return bytes(await self._socket.recv())
