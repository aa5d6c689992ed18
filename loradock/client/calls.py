"""Requests in flight, without I/O and without a clock.

`ClientCall` holds one request until it is settled: its encoding, when that is sent next, the
deadline and the outcome. `GenerationCall` and `PoolingCall` add output that is streamed before a
final reply, in chunks that can repeat, overlap or have gaps. The table of all calls is
`loradock.client.session.Session`.

An attempt is settled exactly once: by an answer, a refusal or the deadline.
"""

import math
import sys
from array import array
from collections import deque
from typing import Final, Generic, TypeVar

import msgspec
from msgspec import Struct

from loradock.messages.errors import EngineGone, ErrorCode, LoradockError
from loradock.messages.requests import (
    Classify,
    Embed,
    Generate,
    GenerationDone,
    PoolingDone,
    PrivateRequest,
    Query,
    Refused,
    Reply,
    Request,
    TokensStreamed,
    VectorsStreamed,
)
from loradock.messages.wire import FRAME_BYTES_MAX

NO_ID: Final = ""
"""The request id of a message that the session has not numbered yet."""

LOST_AFTER_PAUSES: Final = 4
"""A stream is considered lost after this multiple of its longest pause."""


class Timing(Struct, frozen=True):
    """When frames are sent again and how long answers are awaited, in seconds.

    An unanswered frame is sent again after `retry_s_min`, then at intervals that double up to
    `retry_s_max`. Intervals of a frame with images are longer in proportion to its length, so that
    repeating it takes no more bytes per second than repeating a string. A call ends `slack_s` after
    the time limit that the controller received, so that the controller's own answer to a timeout
    can still arrive. Output that the final reply counts is considered lost if it has not arrived
    after `lost_tokens_s`, which is longer than a controller takes to restart.
    """

    retry_s_min: float = 0.5
    retry_s_max: float = 5.0
    slack_s: float = 1.0
    lost_tokens_s: float = 10.0


TIMING: Final = Timing()


class ClientCall:
    """A request in flight."""

    def __init__(self, request: Request, timeout_s: float, timing: Timing) -> None:
        self.request = request
        self.timeout_s = timeout_s
        self.timing = timing
        self.body = b""
        self.send_at = self.deadline = math.inf
        self.retry_interval_s = timing.retry_s_min
        self.sent = False
        self.overload: LoradockError | None = None
        self.outcome: Reply | LoradockError | None = None

    @property
    def request_id(self) -> str:
        """The id that the answer will have."""
        return self.request.request_id

    @property
    def settled(self) -> bool:
        """Return whether the outcome is known."""
        return self.outcome is not None

    @property
    def wake_at(self) -> float:
        """When the call next has a request to send or reaches its deadline."""
        return min(self.send_at, self.deadline)

    @property
    def retry_scale(self) -> float:
        """The factor by which retry intervals are longer because the frame is long."""
        return max(1.0, len(self.body) / FRAME_BYTES_MAX)

    def start(self, at: float, slack_s: float) -> None:
        """Schedule the first sending at `at` and set the deadline."""
        self.send_at = at
        self.deadline = at + self.timeout_s + slack_s

    def on_restart(self, now: float) -> None:
        """Send the frame again at once: a restarted controller has lost the route to the client."""
        self.send_at = now
        self.retry_interval_s = self.timing.retry_s_min

    def on_reply(self, reply: Reply, now: float) -> None:
        """Settle the call with the controller's answer.

        A query that is refused as overloaded is sent again instead, not before the controller
        suggests: it is read-only.
        """
        if not isinstance(reply, Refused):
            self.settle(reply)
        elif isinstance(self.request, Query) and reply.code is ErrorCode.OVERLOADED:
            self.overload = reply.error()
            self.send_at = max(self.send_at, now + self.overload.retry_after_s)
        else:
            self.settle(reply.error())

    def settle(self, outcome: Reply | LoradockError) -> None:
        """Record the outcome."""
        self.outcome = outcome

    def next_body(self, now: float) -> bytes | None:
        """Return the encoded request to send now; None if the call was settled instead."""
        if now >= self.deadline:
            no_answer = EngineGone(f"no answer within {self.timeout_s:g} s", self.request_id)
            self.settle(self.overload or no_answer)
            return None
        self.send_at = now + self.retry_interval_s * self.retry_scale
        self.retry_interval_s = min(2 * self.retry_interval_s, self.timing.retry_s_max)
        self.sent = True
        return self.body


F = TypeVar("F", GenerationDone, PoolingDone)


class StreamingCall(ClientCall, Generic[F]):
    """A call with streamed output and a final reply that counts it, which arrive in any order.

    Output that the final reply counts is requested again until `lost_tokens_s` have passed.
    """

    def __init__(
        self, request: PrivateRequest, timeout_s: float, timing: Timing, attempts: int = 1
    ) -> None:
        super().__init__(request, timeout_s, timing)
        self.attempts_left = attempts - 1
        self.delivered = False
        self._reset_attempt()

    def _reset_attempt(self) -> None:
        """Discard the output of an attempt."""
        self._final: F | None = None
        self._output_deadline = 0.0

    def _has_all_output(self, final: F) -> bool:
        """Return whether all output that the final reply counts has arrived."""
        raise NotImplementedError

    def _lost_output(self, final: F) -> str:
        """Return the error message for output that never arrived."""
        raise NotImplementedError

    def _on_final(self, final: F, now: float) -> None:
        if self._final is None:
            self._extend_output_deadline(now)
        self._final = final
        self.send_at = now + self.timing.retry_s_min

    def _extend_output_deadline(self, now: float) -> None:
        self._output_deadline = now + self.timing.lost_tokens_s

    def next_body(self, now: float) -> bytes | None:
        """Return the encoded request to send now; None if the call was settled instead.

        After the final reply, output that is overdue settles the call.
        """
        final = self._final
        if final is not None and now >= self._output_deadline:
            lost = EngineGone(self._lost_output(final), self.request_id)
            self.settle(final if self._has_all_output(final) else lost)
            return None
        return super().next_body(now)

    def retry_after(self, error: LoradockError) -> bool:
        """Return whether another attempt follows this failure.

        If so the call is reset and needs a new id: no output was delivered to the caller.
        """
        if not error.retryable or self.attempts_left <= 0 or self.delivered:
            return False
        self.attempts_left -= 1
        self.outcome = None
        self.sent = False
        self._reset_attempt()
        return True


class TokenOutput:
    """One output of a generation, assembled from chunks.

    After a request was sent again the engine streams everything again from offset 0, perhaps in
    other chunks. The text of n tokens is a function of those tokens alone, so a chunk is usable
    exactly if the text's length at its first token is known. It is known for every offset at which
    a usable chunk began or ended.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.has_ended = False
        self._has_prompt = False
        self._characters = 0
        self._characters_at = {0: 0}

    def add(self, chunk: TokensStreamed) -> TokensStreamed | None:
        """Return the new part of `chunk`; None if nothing is new or output before it is missing."""
        before = self._characters_at.get(chunk.offset)
        if before is None:
            return None
        end = chunk.offset + len(chunk.tokens)
        characters = before + len(chunk.text)
        # The smaller length is kept: text that arrived without a token (the end of a held-back
        # piece) must not count as known before a repeated chunk that contains it alone.
        self._characters_at[end] = min(characters, self._characters_at.get(end, characters))
        has_text = end > self.tokens or (end == self.tokens and characters > self._characters)
        is_end = chunk.finish_reason is not None and not self.has_ended
        if not has_text and not is_end:
            return None
        new = chunk
        # Most chunks are new as a whole.
        if chunk.offset < self.tokens or before < self._characters or self._has_prompt:
            known = self.tokens - chunk.offset
            new = msgspec.structs.replace(
                chunk,
                offset=self.tokens,
                tokens=chunk.tokens[known:],
                text=chunk.text[max(0, self._characters - before) :],
                logprobs=chunk.logprobs[known:],
                prompt_logprobs=() if self._has_prompt else chunk.prompt_logprobs,
            )
        self.tokens = max(self.tokens, end)
        self.has_ended = self.has_ended or is_end
        self._has_prompt = self._has_prompt or bool(chunk.prompt_logprobs)
        self._characters = max(self._characters, characters)
        return new

    def has_gap_before(self, chunk: TokensStreamed) -> bool:
        """Return whether tokens before `chunk` have not arrived."""
        return chunk.offset not in self._characters_at


class GenerationCall(StreamingCall[GenerationDone]):
    """A generation in flight: chunks in which each token occurs once, and its final reply."""

    request: Generate

    def __init__(
        self, request: Generate, timeout_s: float, timing: Timing, attempts: int = 1
    ) -> None:
        self.chunks: deque[TokensStreamed] = deque()
        self._delivered_texts: list[list[str]] = [[] for _ in range(request.sampling.n)]
        super().__init__(request, timeout_s, timing, attempts)

    def _reset_attempt(self) -> None:
        super()._reset_attempt()
        self.chunks.clear()
        self._outputs = [TokenOutput() for _ in range(self.request.sampling.n)]
        self._is_continuous = True
        self._last_tokens_at: float | None = None
        self._longest_pause_s = 0.0

    @property
    def result(self) -> GenerationDone | None:
        """The final reply; None before it, or if the generation failed."""
        return self.outcome if isinstance(self.outcome, GenerationDone) else None

    def pop(self) -> TokensStreamed:
        """Deliver the next chunk to the caller, after which no further attempt is made."""
        self.delivered = True
        chunk = self.chunks.popleft()
        self._delivered_texts[chunk.index].append(chunk.text)
        return chunk

    def texts(self) -> tuple[str, ...]:
        """Deliver all remaining chunks and return the whole text of each output."""
        while self.chunks:
            self.pop()
        return tuple("".join(pieces) for pieces in self._delivered_texts)

    def text(self) -> str:
        """Return the first of `texts`."""
        return self.texts()[0]

    def on_reply(self, reply: Reply, now: float) -> None:
        """Process a chunk, the final reply or a refusal."""
        if isinstance(reply, TokensStreamed):
            self._on_chunk(reply, now)
        elif isinstance(reply, GenerationDone):
            self._on_final(reply, now)
        else:
            super().on_reply(reply, now)
            return
        final = self._final
        if final is not None and self._has_all_output(final) and self._is_continuous:
            self.settle(final)

    def on_restart(self, now: float) -> None:
        """Send the frame again at once, and require the stream to be repeated from its start.

        Frames that were lost with the old controller may have contained text after the last token,
        which the final reply does not count. So the final reply settles the call only after the
        repeated output, which begins with offset 0.
        """
        super().on_restart(now)
        self._is_continuous = False

    @property
    def _tokens(self) -> int:
        """The number of tokens that have arrived."""
        return sum(output.tokens for output in self._outputs)

    def _has_all_output(self, final: GenerationDone) -> bool:
        """Return whether everything that the final reply counts has arrived.

        Of several outputs the end of each has to arrive too, unless they were cancelled.
        """
        if self._tokens < final.output_tokens:
            return False
        if len(self._outputs) == 1 or final.finish_reason == "cancelled":
            return True
        return all(output.has_ended for output in self._outputs)

    def _on_chunk(self, chunk: TokensStreamed, now: float) -> None:
        self._is_continuous = self._is_continuous or chunk.offset == 0
        if not 0 <= chunk.index < len(self._outputs):
            return
        output = self._outputs[chunk.index]
        if output.has_gap_before(chunk):
            self.send_at = min(self.send_at, now + self.timing.retry_s_min)
            return
        new = output.add(chunk)
        if new is not None:
            self.chunks.append(new)
            self._extend_output_deadline(now)
            self._postpone_sending(now)

    def _postpone_sending(self, now: float) -> None:
        """Schedule the next sending by the pace at which tokens arrive.

        A repeated request makes the engine stream all output again, so a slow engine must not
        receive one too often. Silence from a fast engine means that the stream was lost.
        """
        if self._last_tokens_at is not None:
            self._longest_pause_s = max(self._longest_pause_s, now - self._last_tokens_at)
        self._last_tokens_at = now
        pause_s = max(self.timing.retry_s_min, LOST_AFTER_PAUSES * self._longest_pause_s)
        self.send_at = now + min(pause_s, self.timing.retry_s_max) * self.retry_scale

    def _lost_output(self, final: GenerationDone) -> str:
        return (
            f"the generation ended with {final.output_tokens} tokens and only "
            f"{self._tokens} of them arrived: the engine that held the output is gone; "
            "generate again"
        )


class Embedding(Struct, frozen=True):
    """One vector per input and the total of input tokens; `adapter` None is the base model."""

    adapter: str | None
    vectors: tuple[tuple[float, ...], ...]
    input_tokens: int


class Classification(Struct, frozen=True):
    """One score per input and label: `scores[i][j]` is the score of input i for `labels[j]`."""

    adapter: str | None
    labels: tuple[str, ...]
    scores: tuple[tuple[float, ...], ...]
    input_tokens: int

    @property
    def best(self) -> tuple[str, ...]:
        """The label with the highest score, per input."""
        indices = (max(range(len(row)), key=row.__getitem__) for row in self.scores)
        return tuple(self.labels[index] for index in indices)


class PoolingCall(StreamingCall[PoolingDone]):
    """An `Embed` or `Classify` in flight: vectors in any order, and the final reply."""

    request: Embed | Classify

    def _reset_attempt(self) -> None:
        super()._reset_attempt()
        self._vectors: dict[int, bytes] = {}
        self._labels: tuple[str, ...] = ()

    def on_reply(self, reply: Reply, now: float) -> None:
        """Process vectors, the final reply or a refusal."""
        if isinstance(reply, VectorsStreamed):
            self._vectors |= enumerate(reply.vectors, reply.offset)
            self._labels = reply.labels
            self._extend_output_deadline(now)
            # A repeated request makes the engine send all vectors again, so a working engine
            # receives one late.
            self.send_at = now + self.timing.retry_s_max
        elif isinstance(reply, PoolingDone):
            self._on_final(reply, now)
        else:
            super().on_reply(reply, now)
            return
        if self._final is not None and self._has_all_output(self._final):
            self.settle(self._final)

    def _has_all_output(self, final: PoolingDone) -> bool:
        return len(self._vectors) >= final.inputs

    def _lost_output(self, final: PoolingDone) -> str:
        return (
            f"{final.inputs} inputs were done and only {len(self._vectors)} of their vectors "
            "arrived: the engine that held them is gone; send the request again"
        )

    def embedding(self, final: PoolingDone) -> Embedding:
        """Return the result of a settled `Embed`."""
        return Embedding(final.adapter, self._rows(final), final.input_tokens)

    def classification(self, final: PoolingDone) -> Classification:
        """Return the result of a settled `Classify`."""
        rows = self._rows(final)
        return Classification(final.adapter, self._labels, rows, final.input_tokens)

    def _rows(self, final: PoolingDone) -> tuple[tuple[float, ...], ...]:
        return tuple(_floats(self._vectors[index]) for index in range(final.inputs))


def _floats(vector: bytes) -> tuple[float, ...]:
    """Return the numbers of a vector of little-endian float32."""
    numbers = array("f", vector)
    if sys.byteorder == "big":
        numbers.byteswap()
    return tuple(numbers)
