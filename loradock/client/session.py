"""The client's protocol, without sockets and without a clock.

`Session` numbers requests and keeps the table of calls in flight. The ports of
`loradock.client.client` and `loradock.client.async_client` transfer its frames and pass it the
time. A request keeps its id when its frame is sent again, so that a repeated frame can't cause a
second execution.
"""

import heapq
import math
from collections.abc import Callable
from typing import Final, TypeVar, get_args, overload

import msgspec

from loradock.client.arguments import check_arguments
from loradock.client.calls import (
    NO_ID,
    ClientCall,
    GenerationCall,
    PoolingCall,
    StreamingCall,
    Timing,
)
from loradock.messages.control import ServerCommand, ServerQuery
from loradock.messages.errors import EngineGone, LoradockError, Malformed
from loradock.messages.requests import (
    CancelGeneration,
    Classify,
    Embed,
    FetchEvents,
    Generate,
    GenerationDone,
    ListAdapters,
    PrefetchAdapter,
    Refused,
    ReleaseAdapter,
    Reply,
    Request,
    ShowAdapter,
    ShowStatus,
)
from loradock.messages.wire import FRAME_BYTES_MAX, REPLIES, REQUESTS, WireError, batches

TIMEOUT_S: Final = 30.0
GENERATION_TIMEOUT_S: Final = 600.0
TIMEOUT_S_MAX: Final = 3600.0

_BATCH_BYTES_MAX: Final = FRAME_BYTES_MAX - 64
"""Bound on the requests that share a frame, in bytes, which leaves space for the frame's header."""

_UNKNOWN_EPOCH: Final = 1
"""An epoch before every real one (they are at least the wall clock's seconds) and after 0, which
means that the sender does not follow epochs. A controller executes nothing of a frame with it, and
answers with its own epoch."""

C = TypeVar("C", bound=ClientCall)
R = TypeVar("R")


def answer_of(call: ClientCall, *reply_types: type[R]) -> R:
    """Return the answer of a settled call.

    Raises the call's error, or `Malformed` for an answer of a type that is not in `reply_types`.
    """
    outcome = call.outcome
    if isinstance(outcome, LoradockError):
        raise outcome
    if not isinstance(outcome, reply_types):
        names = " or ".join([kind.__name__ for kind in reply_types])
        raise Malformed(
            f"{type(call.request).__name__} must be answered by {names}, got "
            f"{type(outcome).__name__}: client and controller differ in version",
            call.request_id,
        )
    return outcome


def _ignore(_: ClientCall) -> None:
    """Ignore a change."""


class Session:
    """All calls of one client.

    `receive` processes frames from the controller, `due` returns the frames to send, `wake_at`
    returns when to call `due` next. Times are seconds of any monotonic clock. `token` is secret and
    of this session alone: it proves that its frames, from any connection, are of one client.
    `silence` returns why no server answers, empty if one can: the error of a call that no server
    has answered in time contains it. `on_change` is called with a call that has received output or
    is settled.
    """

    def __init__(
        self,
        token: bytes,
        timing: Timing,
        timeout_s: float = TIMEOUT_S,
        generation_timeout_s: float = GENERATION_TIMEOUT_S,
        *,
        silence: Callable[[], str] = str,
        on_change: Callable[[ClientCall], None] = _ignore,
    ) -> None:
        self.timing = timing
        self._silence = silence
        self._on_change = on_change
        self._timeout_s = _checked_timeout(timeout_s)
        self._generation_timeout_s = _checked_timeout(generation_timeout_s)
        self._token = token
        self._count = 0
        self._epoch = _UNKNOWN_EPOCH
        self._calls: dict[str, ClientCall] = {}
        # A heap of (when, tie breaker, call). A call that moved to a later time leaves its entry
        # unchanged; `due` replaces the entry at the old time.
        self._timers: list[tuple[float, int, ClientCall]] = []
        self._timer_count = 0
        self._unmatched_error = ""
        self._closed = False

    def __len__(self) -> int:
        """Return the number of calls in flight."""
        return len(self._calls)

    @property
    def knows_epoch(self) -> bool:
        """Whether a controller has answered."""
        return self._epoch != _UNKNOWN_EPOCH

    @overload
    def begin(
        self, request: Generate, now: float, timeout_s: float | None = None, attempts: int = 1
    ) -> GenerationCall: ...

    @overload
    def begin(
        self,
        request: Embed | Classify,
        now: float,
        timeout_s: float | None = None,
        attempts: int = 1,
    ) -> PoolingCall: ...

    @overload
    def begin(
        self, request: Request, now: float, timeout_s: float | None = None, attempts: int = 1
    ) -> ClientCall: ...

    def begin(
        self, request: Request, now: float, timeout_s: float | None = None, attempts: int = 1
    ) -> ClientCall:
        """Start a call; raises `Malformed` for a request that can't be encoded.

        An inference is started up to `attempts` times while no token of it was delivered.
        """
        if attempts < 1:
            raise ValueError(f"attempts must be at least 1, got {attempts}")
        is_inference = isinstance(request, Generate | Embed | Classify)
        default_s = self._generation_timeout_s if is_inference else self._timeout_s
        limit_s = default_s if timeout_s is None else _checked_timeout(timeout_s)
        if isinstance(request, Generate):
            return self._start(GenerationCall(request, limit_s, self.timing, attempts), now)
        if isinstance(request, Embed | Classify):
            return self._start(PoolingCall(request, limit_s, self.timing, attempts), now)
        return self._start(ClientCall(request, limit_s, self.timing), now)

    def begin_cancel(self, call: GenerationCall, now: float) -> ClientCall | None:
        """Start the cancellation of a generation; None if that needs no request.

        A generation that has ended needs none. One that was not sent yet is settled as cancelled.
        """
        call.attempts_left = 0
        if call.result is not None:
            return None
        if call.sent:
            return self.begin(CancelGeneration(NO_ID, call.request_id), now)
        self.forget(call)
        adapter = call.request.adapter
        call.settle(GenerationDone(call.request_id, adapter, "cancelled", 0, 0))
        self._on_change(call)
        return None

    def abandon(self, call: GenerationCall, now: float) -> None:
        """Cancel a generation whose output and end nothing waits for."""
        if not self._closed and not call.settled:
            self.begin_cancel(call, now)
            self.forget(call)

    def forget(self, call: ClientCall) -> None:
        """Remove a call; its answer will be ignored."""
        self._calls.pop(call.request_id, None)

    def close(self, message: str) -> None:
        """Settle every call as `EngineGone` and refuse new calls."""
        self._closed = True
        for call in list(self._calls.values()):
            self._calls.pop(call.request_id)
            call.settle(EngineGone(message, call.request_id))
            self._on_change(call)

    def wake_at(self) -> float:
        """Return when `due` has something to do; infinity while no call is in flight."""
        return self._timers[0][0] if self._timers else math.inf

    def due(self, now: float) -> list[bytes]:
        """Return the frames to send now, and settle the calls whose deadline has passed.

        Requests that are due at the same moment share frames.
        """
        bodies = []
        while self._timers and self._timers[0][0] <= now:
            _, _, call = heapq.heappop(self._timers)
            if self._calls.get(call.request_id) is not call:
                continue
            if call.wake_at <= now:
                body = call.next_body(now)
                if body is None:
                    self._on_settled(call, now)
                    self._on_change(call)
                    continue
                bodies.append(body)
            self._set_timer(call)
        frames = batches(bodies, _BATCH_BYTES_MAX)
        return [REQUESTS.join_for(self._token, batch, self._epoch) for batch in frames]

    def receive(self, data: bytes, now: float) -> None:
        """Process a frame from the controller; replies that answer no call are ignored."""
        try:
            frame = REPLIES.decode(data)
        except WireError as error:
            self._unmatched_error = str(error)
            return
        is_new = self._on_epoch(frame.epoch, now)
        for reply in frame.message:
            # All calls were sent again to the new process, whose answers count, unless an earlier
            # one's are in the log: refusals may not be.
            is_void = frame.epoch < self._epoch or (is_new and not reply.request_id)
            if not (is_void and isinstance(reply, Refused)):
                self._on_reply(reply, now)

    def _on_reply(self, reply: Reply, now: float) -> None:
        call = self._calls.get(reply.request_id)
        if call is None:
            if isinstance(reply, Refused) and not reply.request_id:
                self._unmatched_error = reply.message
            return
        before = call.wake_at
        call.on_reply(reply, now)
        if call.settled:
            self._on_settled(call, now)
        elif call.wake_at < before:
            self._set_timer(call)
        self._on_change(call)

    def _start(self, call: C, now: float) -> C:
        """Number a call, add it to the table and schedule its first sending at `now`."""
        if self._closed:
            raise ValueError("the client is closed")
        self._number(call)
        call.start(now, self.timing.slack_s)
        self._calls[call.request_id] = call
        self._set_timer(call)
        return call

    def _number(self, call: ClientCall) -> None:
        """Set a call's id, time limit and body.

        It is decoded again, so that a request which the controller would refuse to read raises
        `Malformed` here.
        """
        self._count += 1
        numbered: dict[str, str | int] = {"request_id": str(self._count)}
        if not isinstance(call.request, _WITHOUT_TIMEOUT):
            numbered["timeout_ms"] = max(1, math.ceil(call.timeout_s * 1000))
        request = call.request = msgspec.structs.replace(call.request, **numbered)
        try:
            call.body = REQUESTS.encode_body(request)
            REQUESTS.check_body(call.body)
        except (WireError, msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            check_arguments(request)
            raise Malformed(str(error), call.request_id) from error

    def _set_timer(self, call: ClientCall) -> None:
        self._timer_count += 1
        heapq.heappush(self._timers, (call.wake_at, self._timer_count, call))

    def _on_settled(self, call: ClientCall, now: float) -> None:
        """Remove a settled call from the table, or start its next attempt under a new id."""
        self._calls.pop(call.request_id)
        error = call.outcome
        if not isinstance(error, LoradockError):
            return
        if self._unmatched_error and isinstance(error, EngineGone):
            error.message += f" (an answer could not be used: {self._unmatched_error})"
        if isinstance(error, EngineGone) and now >= call.deadline and (why := self._silence()):
            error.message += f": {why}"
        if isinstance(call, StreamingCall) and call.retry_after(error):
            self._start(call, now + max(call.retry_interval_s, error.retry_after_s))
            call.retry_interval_s = min(2 * call.retry_interval_s, self.timing.retry_s_max)
        elif isinstance(call, GenerationCall) and call.sent and now >= call.deadline:
            # Its output is of no use any more; the answer to this is not awaited.
            self.begin(CancelGeneration(NO_ID, call.request_id), now)

    def _on_epoch(self, epoch: int, now: float) -> bool:
        """Send all requests again if the controller was started again; return whether it was.

        The new process has lost the route to here, and executes nothing of the frames before.
        """
        if epoch <= self._epoch:
            return False
        self._epoch = epoch
        for call in self._calls.values():
            call.on_restart(now)
            self._set_timer(call)
        return True


_WITHOUT_TIMEOUT: Final = (
    ReleaseAdapter,
    PrefetchAdapter,
    CancelGeneration,
    ListAdapters,
    ShowAdapter,
    ShowStatus,
    FetchEvents,
    *get_args(ServerQuery),
    *get_args(ServerCommand),
)


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(
            f"timeout_s must be above 0 and at most {TIMEOUT_S_MAX:g}, got {timeout_s}"
        )
    return timeout_s
