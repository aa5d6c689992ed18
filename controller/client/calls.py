"""One request on its way to its answer.

What it is: `Call` (its frame, when it goes out again, when it gives up, its last word), and those
that have output beside it: `GenerationCall`, and by `client_pooling` embeddings and
classifications. What it is not: the table of all calls, which is
`client_session`'s, or I/O. One rule: a call is settled once, by an answer, a refusal or its
deadline.
"""

import math
from collections import deque
from collections.abc import Callable
from typing import Final, Generic, TypeVar

from msgspec import Struct

from controller.client.errors import EngineGone, LoradockError, error_of
from controller.client.streams import TokenOutput
from messages.errors import ErrorCode
from messages.requests import (
    FetchEvents,
    Generate,
    GenerationDone,
    PoolingDone,
    PrivateRequest,
    Refused,
    Reply,
    Request,
    TokensStreamed,
)
from messages.wire import FRAME_BYTES_MAX

NEW: Final = ""
"""The request id of a request that the session has not numbered yet."""

PAUSES_WAITED: Final = 4
"""A stream counts as lost after so many times its longest pause."""


class Timing(Struct, frozen=True):
    """When to send again and how long to wait, in seconds.

    A frame without an answer goes out again after `retry_s_min`, then after twice that, up to
    `retry_s_max`; a longer frame than most requests may have, as many times later as it is longer,
    so that images are not sent in a stream. A call ends `slack_s` after the time that the
    controller was given, so that the controller's own words on a timeout can still arrive. Output
    that a generation's account counts and that does not come for `lost_tokens_s` is lost: longer
    than a controller takes to be back.
    """

    retry_s_min: float = 0.5
    retry_s_max: float = 5.0
    slack_s: float = 1.0
    lost_tokens_s: float = 10.0


TIMING: Final = Timing()


def _nothing() -> None:
    """Nobody listens."""


class Call:
    """One request on its way to its answer; `changed` is called when there is news."""

    def __init__(self, request: Request, timeout_s: float, timing: Timing) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self.timing = timing
        self.frame = b""
        self.send_at = self.deadline = math.inf
        self.interval = timing.retry_s_min
        self.sent = False
        self.put_off: LoradockError | None = None
        self.outcome: Reply | LoradockError | None = None
        self.changed: Callable[[], None] = _nothing

    @property
    def request_id(self) -> str:
        """The id that the answer will carry."""
        return self.request.request_id

    @property
    def settled(self) -> bool:
        """Whether the last word is there."""
        return self.outcome is not None

    @property
    def wake_at(self) -> float:
        """When the call next wants to be looked at."""
        return min(self.send_at, self.deadline)

    @property
    def patience(self) -> float:
        """How many times longer than others the call waits before its frame goes out again."""
        return max(1.0, len(self.frame) / FRAME_BYTES_MAX)

    def start(self, at: float, slack_s: float) -> None:
        """Begin the call's time: the first sending is due at `at`."""
        self.send_at = at
        self.deadline = at + self.timeout_s + slack_s

    def begin_again(self, now: float) -> None:
        """A new life of the controller has forgotten the way to here: say so at once."""
        self.send_at = now
        self.interval = self.timing.retry_s_min

    def take(self, reply: Reply, now: float) -> None:
        """The controller's answer to this request.

        A subscriber that is told to fetch later does so by itself: its request changes nothing.
        """
        del now  # Only a generation, which has many answers, sends again relative to one.
        if not isinstance(reply, Refused):
            self.settle(reply)
        elif isinstance(self.request, FetchEvents) and reply.code is ErrorCode.OVERLOADED:
            self.put_off = error_of(reply)
        else:
            self.settle(error_of(reply))

    def settle(self, outcome: Reply | LoradockError) -> None:
        """Write down the last word."""
        self.outcome = outcome
        self.changed()

    def next_sending(self, now: float) -> bytes | None:
        """The frame to send now; None if the call gave up instead."""
        if now >= self.deadline:
            silent = EngineGone(f"no answer within {self.timeout_s:g} s", self.request_id)
            self.settle(self.put_off or silent)
            return None
        self.send_at = now + self.interval * self.patience
        self.interval = min(2 * self.interval, self.timing.retry_s_max)
        self.sent = True
        return self.frame


A = TypeVar("A", GenerationDone, PoolingDone)


class AccountedCall(Call, Generic[A]):
    """A call with output on the way and an account of it at the end, in whatever order they come.

    Output that the account counts is asked for again until it is overdue.
    """

    def __init__(
        self, request: PrivateRequest, timeout_s: float, timing: Timing, attempts: int = 1
    ) -> None:
        super().__init__(request, timeout_s, timing)
        self.attempts_left = attempts - 1
        self.handed_over = False
        self._restart()

    def _restart(self) -> None:
        """Forget what an attempt has brought."""
        self._account: A | None = None
        self._output_due = 0.0

    def _has_output_of(self, account: A) -> bool:
        """Whether all that the account counts has come."""
        raise NotImplementedError

    def _lost(self, account: A) -> str:
        """What to tell where it never came."""
        raise NotImplementedError

    def _take_account(self, account: A, now: float) -> None:
        if self._account is None:
            self._expect_output(now)
        self._account = account
        self.send_at = now + self.timing.retry_s_min

    def _expect_output(self, now: float) -> None:
        self._output_due = now + self.timing.lost_tokens_s

    def next_sending(self, now: float) -> bytes | None:
        """As every call's; output that the account counts is asked for until it is overdue."""
        account = self._account
        if account is not None and now >= self._output_due:
            lost = EngineGone(self._lost(account), self.request_id)
            self.settle(account if self._has_output_of(account) else lost)
            return None
        return super().next_sending(now)

    def try_again(self, error: LoradockError) -> bool:
        """Whether another attempt follows this failure; the call is then as new, without an id."""
        if not error.retryable or self.attempts_left <= 0 or self.handed_over:
            return False
        self.attempts_left -= 1
        self.outcome = None
        self.sent = False
        self._restart()
        return True


class GenerationCall(AccountedCall[GenerationDone]):
    """A generation: chunks on the way, each token once, and its account at the end."""

    request: Generate

    def __init__(
        self, request: Generate, timeout_s: float, timing: Timing, attempts: int = 1
    ) -> None:
        self.chunks: deque[TokensStreamed] = deque()
        self._parts: list[str] = []
        super().__init__(request, timeout_s, timing, attempts)

    def _restart(self) -> None:
        super()._restart()
        self.chunks.clear()
        self._output = TokenOutput()
        self._is_continuous = True
        self._last_tokens_at: float | None = None
        self._longest_pause_s = 0.0

    @property
    def result(self) -> GenerationDone | None:
        """Its account, if it came to its end."""
        return self.outcome if isinstance(self.outcome, GenerationDone) else None

    def pop(self) -> TokensStreamed:
        """The next chunk, which from now on is the caller's: no further attempt is made."""
        self.handed_over = True
        chunk = self.chunks.popleft()
        self._parts.append(chunk.text)
        return chunk

    def text(self) -> str:
        """The text of every chunk that came, handed out before or not."""
        while self.chunks:
            self.pop()
        return "".join(self._parts)

    def take(self, reply: Reply, now: float) -> None:
        """A chunk, the account, or a refusal."""
        if isinstance(reply, TokensStreamed):
            self._take_chunk(reply, now)
        elif isinstance(reply, GenerationDone):
            self._take_account(reply, now)
        else:
            super().take(reply, now)
            return
        account = self._account
        if account is not None and self._has_output_of(account) and self._is_continuous:
            self.settle(account)

    def begin_again(self, now: float) -> None:
        """As every call; what the old life lost on its way may be text after the last token.

        So the account is believed after the repeated output only, which begins with offset 0.
        """
        super().begin_again(now)
        self._is_continuous = False

    def _has_output_of(self, account: GenerationDone) -> bool:
        return self._output.tokens >= account.output_tokens

    def _take_chunk(self, chunk: TokensStreamed, now: float) -> None:
        self._is_continuous = self._is_continuous or chunk.offset == 0
        if self._output.misses(chunk):
            self.send_at = min(self.send_at, now + self.timing.retry_s_min)
            return
        fresh = self._output.add(chunk)
        if fresh is not None:
            self.chunks.append(fresh)
            self._expect_output(now)
            self._be_patient(now)
            self.changed()

    def _be_patient(self, now: float) -> None:
        """After tokens, wait for more as long as this engine's pace makes sense of it.

        A repeated request has all output streamed again, so a slow engine must not be asked too
        often; silence from a fast one means that the way to here was lost.
        """
        if self._last_tokens_at is not None:
            self._longest_pause_s = max(self._longest_pause_s, now - self._last_tokens_at)
        self._last_tokens_at = now
        pause_s = max(self.timing.retry_s_min, PAUSES_WAITED * self._longest_pause_s)
        self.send_at = now + min(pause_s, self.timing.retry_s_max) * self.patience

    def _lost(self, account: GenerationDone) -> str:
        return (
            f"the generation ended with {account.output_tokens} tokens and only "
            f"{self._output.tokens} of them arrived: the engine that held the output is gone; "
            "generate again"
        )
