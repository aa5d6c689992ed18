"""A client's side of the conversation, with no socket and no clock.

What it is: request ids, the table of pending calls, and what both clients have in common. What it
is not: I/O; `client_blocking` and `client_async` move frames in and out and tell the time. One
rule: a request has one id for ever, so that sending its frame again can't do it twice.
"""

import heapq
import math
from typing import Final, TypedDict, TypeVar

import msgspec

from controller.client.calls import NEW, AccountedCall, Call, GenerationCall, Timing
from controller.client.errors import EngineGone, LoradockError, Malformed
from controller.client.pooling import PoolingCall
from messages.requests import (
    CancelGeneration,
    Classify,
    Embed,
    FetchEvents,
    Generate,
    GenerationDone,
    ListAdapters,
    Prompt,
    Refused,
    ReleaseAdapter,
    Request,
    Sampling,
    ShowAdapter,
    ShowStatus,
)
from messages.wire import REPLIES, REQUESTS, WireError

TIMEOUT_S: Final = 30.0
GENERATION_TIMEOUT_S: Final = 600.0
TIMEOUT_S_MAX: Final = 3600.0

R = TypeVar("R")


class SamplingOptions(TypedDict, total=False):
    """The fields of `messages.requests.Sampling`, as keywords."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: tuple[str, ...]


def generate_request(prompt: Prompt, adapter: str | None, sampling: SamplingOptions) -> Generate:
    """A request that the session has not numbered yet."""
    return Generate(NEW, adapter, prompt, Sampling(**sampling))


def answer_of(call: Call, reply_type: type[R]) -> R:
    """A settled call's answer; raises its error, or `Malformed` for another kind of answer."""
    outcome = call.outcome
    if isinstance(outcome, LoradockError):
        raise outcome
    if not isinstance(outcome, reply_type):
        raise Malformed(
            f"{type(call.request).__name__} was answered by {type(outcome).__name__}; only "
            f"{reply_type.__name__} answers it: client and controller differ in version",
            call.request_id,
        )
    return outcome


class Session:
    """All calls of one client.

    `receive` takes frames from the controller, `due` gives those to send, `wake_at` says when to
    ask for them next. Times are seconds of any clock that only goes forward.
    """

    def __init__(
        self,
        client_id: str,
        timing: Timing,
        timeout_s: float = TIMEOUT_S,
        generation_timeout_s: float = GENERATION_TIMEOUT_S,
    ) -> None:
        self.timing = timing
        self._timeout_s = _checked_timeout(timeout_s)
        self._generation_timeout_s = _checked_timeout(generation_timeout_s)
        self._client_id = client_id
        self._count = 0
        self._epoch = 0
        self._calls: dict[str, Call] = {}
        # (when, tie, call). A call that moved to a later time leaves its entry as it is; the
        # entry is put right when its time has come.
        self._alarms: list[tuple[float, int, Call]] = []
        self._alarm_count = 0
        self._complaint = ""
        self._closed = False

    def __len__(self) -> int:
        """How many calls are under way."""
        return len(self._calls)

    def begin(self, request: Request, now: float, timeout_s: float | None = None) -> Call:
        """Take up a request; raises `Malformed` where it can't be said on the wire."""
        limit_s = self._timeout_s if timeout_s is None else _checked_timeout(timeout_s)
        return self._begin(Call(request, limit_s, self.timing), now)

    def begin_generation(
        self, request: Generate, now: float, timeout_s: float | None = None, attempts: int = 1
    ) -> GenerationCall:
        """Take up a generation, tried up to `attempts` times while the caller has no token."""
        limit_s = self._inference_limit_s(timeout_s, attempts)
        call = GenerationCall(request, limit_s, self.timing, attempts)
        self._begin(call, now)
        return call

    def begin_pooling(
        self,
        request: Embed | Classify,
        now: float,
        timeout_s: float | None = None,
        attempts: int = 1,
    ) -> PoolingCall:
        """Take up an embedding or a classification, tried up to `attempts` times."""
        limit_s = self._inference_limit_s(timeout_s, attempts)
        call = PoolingCall(request, limit_s, self.timing, attempts)
        self._begin(call, now)
        return call

    def begin_cancel(self, call: GenerationCall, now: float) -> Call | None:
        """Ask for a generation's end; None where it has ended, or was not sent and ends here."""
        call.attempts_left = 0
        if call.result is not None:
            return None
        if call.sent:
            return self.begin(CancelGeneration(NEW, call.request_id), now)
        self.forget(call)
        adapter = call.request.adapter
        call.settle(GenerationDone(call.request_id, adapter, "cancelled", 0, 0))
        return None

    def forget(self, call: Call) -> None:
        """Stop waiting for a call; its answer will be ignored."""
        self._calls.pop(call.request_id, None)

    def close(self, message: str) -> None:
        """Settle every call and take no more: nobody will move frames."""
        self._closed = True
        for call in list(self._calls.values()):
            self._calls.pop(call.request_id)
            call.settle(EngineGone(message, call.request_id))

    def wake_at(self) -> float:
        """When `due` has something to do; infinity while nothing is under way."""
        return self._alarms[0][0] if self._alarms else math.inf

    def due(self, now: float) -> list[bytes]:
        """The frames to send now; calls whose time is up are settled on the way."""
        frames = []
        while self._alarms and self._alarms[0][0] <= now:
            _, _, call = heapq.heappop(self._alarms)
            if self._calls.get(call.request_id) is not call:
                continue
            if call.wake_at <= now:
                frame = call.next_sending(now)
                if frame is None:
                    self._ended(call, now)
                    continue
                frames.append(frame)
            self._set_alarm(call)
        return frames

    def receive(self, data: bytes, now: float) -> None:
        """Take a frame from the controller; what is nobody's answer is ignored."""
        try:
            frame = REPLIES.decode(data)
        except WireError as error:
            self._complaint = str(error)
            return
        self._note_epoch(frame.epoch, now)
        reply = frame.message
        call = self._calls.get(reply.request_id)
        if call is None:
            if isinstance(reply, Refused) and not reply.request_id:
                self._complaint = reply.message
            return
        before = call.wake_at
        call.take(reply, now)
        if call.settled:
            self._ended(call, now)
        elif call.wake_at < before:
            self._set_alarm(call)

    def _inference_limit_s(self, timeout_s: float | None, attempts: int) -> float:
        if attempts < 1:
            raise ValueError(f"attempts is {attempts}; at least 1 is needed")
        return self._generation_timeout_s if timeout_s is None else _checked_timeout(timeout_s)

    def _begin(self, call: Call, now: float) -> Call:
        """Number a call and start its time at `now`."""
        if self._closed:
            raise ValueError("the client is closed")
        self._number(call)
        call.start(now, self.timing.slack_s)
        self._calls[call.request_id] = call
        self._set_alarm(call)
        return call

    def _number(self, call: Call) -> None:
        """Give a call its id and its frame, read back once so that no mistake leaves here."""
        self._count += 1
        fields = {"request_id": f"{self._client_id}-{self._count}"}
        request = msgspec.structs.replace(call.request, **fields)
        if not isinstance(request, _WITHOUT_TIMEOUT):
            milliseconds = max(1, math.ceil(call.timeout_s * 1000))
            request = msgspec.structs.replace(request, timeout_ms=milliseconds)
        call.request = request
        try:
            call.frame = REQUESTS.encode(request, self._epoch, self._count)
            REQUESTS.decode(call.frame)
        except (WireError, msgspec.MsgspecError, ValueError, TypeError, OverflowError) as error:
            raise Malformed(str(error), call.request_id) from error

    def _set_alarm(self, call: Call) -> None:
        self._alarm_count += 1
        heapq.heappush(self._alarms, (call.wake_at, self._alarm_count, call))

    def _ended(self, call: Call, now: float) -> None:
        """A settled call leaves the table, or begins again under a new id."""
        self._calls.pop(call.request_id)
        error = call.outcome
        if not isinstance(error, LoradockError):
            return
        if self._complaint and isinstance(error, EngineGone):
            error.message += f" (an answer could not be used: {self._complaint})"
        if isinstance(call, AccountedCall) and call.try_again(error):
            self._begin(call, now + call.interval)
            call.interval = min(2 * call.interval, self.timing.retry_s_max)

    def _note_epoch(self, epoch: int, now: float) -> None:
        """A new life of the controller has forgotten the way to us: remind it of every call."""
        if epoch <= self._epoch:
            return
        restarted = self._epoch > 0
        self._epoch = epoch
        if restarted:
            for call in self._calls.values():
                call.begin_again(now)
                self._set_alarm(call)


_WITHOUT_TIMEOUT: Final = (
    ReleaseAdapter,
    CancelGeneration,
    ListAdapters,
    ShowAdapter,
    ShowStatus,
    FetchEvents,
)


def _checked_timeout(timeout_s: float) -> float:
    if not 0 < timeout_s <= TIMEOUT_S_MAX:
        raise ValueError(f"timeout_s is {timeout_s}; it must lie above 0 and up to {TIMEOUT_S_MAX}")
    return timeout_s
