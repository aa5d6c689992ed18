"""Measurements of this gateway's requests: totals, histograms, and hooks for spans."""

import time
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Final

from loradock.messages.requests import GenerationDone, TokensStreamed
from loradock.messages.views import TOKEN_BOUNDS, FinishReason

FIRST_TOKEN_S: Final = (
    *(0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0),
)
BETWEEN_TOKENS_S: Final = (
    *(0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5),
    *(0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0),
)
REQUEST_S: Final = (
    *(0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0),
    *(120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0),
)
"""Bounds of the buckets in seconds, as in vLLM's histograms."""

OUTPUTS: Final = (1, 2, 5, 10, 20)


class Histogram:
    """Counts of observations per bucket; `bounds` are inclusive upper bounds, ascending.

    An observation costs one search and two additions.
    """

    def __init__(
        self, bounds: Sequence[float], counts: Sequence[int] = (), total: float = 0.0
    ) -> None:
        """`counts` are observations made elsewhere, one per bucket, of the sum `total`."""
        self.bounds: Final = tuple(bounds)
        self._counts = list(counts) or [0] * (len(self.bounds) + 1)
        self.sum = total

    def observe(self, value: float) -> None:
        """Count one observation."""
        self._counts[bisect_left(self.bounds, value)] += 1
        self.sum += value

    def buckets(self) -> list[tuple[str, float]]:
        """Return (upper bound, observations up to it) as the text format needs them."""
        total, found = 0, []
        for bound, count in zip((*self.bounds, float("inf")), self._counts, strict=True):
            total += count
            found.append(("+Inf" if bound == float("inf") else repr(float(bound)), float(total)))
        return found


class Recorder:
    """Totals of this gateway's requests since its start; durations in seconds."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.per_output_token = Histogram(BETWEEN_TOKENS_S)
        self.request = Histogram(REQUEST_S)
        self.prompt_lengths = Histogram(TOKEN_BOUNDS)
        self.output_lengths = Histogram(TOKEN_BOUNDS)
        self.longest_outputs = Histogram(TOKEN_BOUNDS)
        self.outputs = Histogram(OUTPUTS)
        self.max_tokens = Histogram(TOKEN_BOUNDS)
        self.prompt_tokens = 0
        self.output_tokens = 0
        self.finished: Counter[str] = Counter()
        self.aborted = 0
        self.failed = 0
        self.active = 0

    def begin(self) -> "Measurement":
        """Begin to measure a request."""
        self.active += 1
        return Measurement(self)

    def on_generation(self, outputs: int, max_tokens: int | None) -> None:
        """Record the parameters of a generation; None for a limit that the engine chooses."""
        self.outputs.observe(outputs)
        if max_tokens is not None:
            self.max_tokens.observe(max_tokens)


class _Output:
    """The tokens of one output, and the times of the first and of the last one."""

    def __init__(self, first_s: float, tokens: int) -> None:
        self.first_s = self.last_s = first_s
        self.tokens = tokens


class Measurement:
    """The times of one generation or pooling, from its arrival to its end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began = time.monotonic()
        self._outputs: dict[int, _Output] = {}
        self._ended = False

    def on_tokens(self, index: int, count: int) -> None:
        """Record tokens of an output; tokens of one message share the time since the last one."""
        now = time.monotonic()
        self._recorder.output_tokens += count
        output = self._outputs.get(index)
        if output is None:
            self._recorder.first_token.observe(now - self._began)
            self._outputs[index] = _Output(now, count)
            return
        each_s = (now - output.last_s) / count
        for _ in range(count):
            self._recorder.between_tokens.observe(each_s)
        output.tokens += count
        output.last_s = now

    def on_done(self, result: GenerationDone) -> None:
        """Record the end of a generation that was served."""
        if not self._end():
            return
        recorder, outputs = self._recorder, self._outputs.values()
        self._on_served(result.finish_reason, result.prompt_tokens)
        recorder.longest_outputs.observe(max((one.tokens for one in outputs), default=0))
        for one in outputs:
            recorder.output_lengths.observe(one.tokens)
            if one.tokens > 1:
                each_s = (one.last_s - one.first_s) / (one.tokens - 1)
                recorder.per_output_token.observe(each_s)

    def on_pooled(self, prompt_tokens: int) -> None:
        """Record the end of a pooling that was served."""
        if self._end():
            self._on_served("stop", prompt_tokens)

    def on_failed(self) -> None:
        """Record the end of a request that failed."""
        if self._end():
            self._recorder.failed += 1

    def on_closed(self) -> None:
        """Record that the client left before the end, if the end was not recorded yet."""
        if self._end():
            self._recorder.aborted += 1

    def _on_served(self, reason: FinishReason, prompt_tokens: int) -> None:
        recorder = self._recorder
        recorder.request.observe(time.monotonic() - self._began)
        recorder.prompt_tokens += prompt_tokens
        recorder.prompt_lengths.observe(prompt_tokens)
        recorder.finished[reason] += 1

    def _end(self) -> bool:
        """Return whether this is the first end."""
        is_first, self._ended = not self._ended, True
        self._recorder.active -= is_first
        return is_first


class RequestSpan:
    """The span of a request. This one records nothing: tracing is off."""

    parent: str = ""
    """The `traceparent` for spans below it."""

    def on_adapter(self, name: str) -> None:
        """Record the adapter of the request, and its state before the request."""

    def on_id(self, answer_id: str) -> None:
        """Record the id of the answer."""

    def on_start(self, choices: int) -> None:
        """Record the number of choices; one without an end was cancelled by the client."""

    def on_chunk(self, choice: int, chunk: TokensStreamed) -> None:
        """Record a chunk of a choice."""

    def on_done(self, choice: int, done: GenerationDone) -> None:
        """Record the end of the generation whose first choice is given."""

    def on_pooled(self, input_tokens: int) -> None:
        """Record the result of an embedding or a classification."""

    def on_error(self, error: BaseException) -> None:
        """Record why the request failed; a status below 500 is not an error of the server."""

    def end(self) -> None:
        """End the span."""


SPAN: Final[ContextVar[RequestSpan]] = ContextVar("span", default=RequestSpan())  # noqa: B039
"""The span of the request that the current task serves."""


def unix_seconds() -> int:
    """Return the current Unix time in whole seconds, for labels in answers; nothing waits on it."""
    return int(time.time())
