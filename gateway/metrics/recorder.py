"""What this gateway measures of its own requests."""

import time
from collections import Counter
from typing import Final

from gateway.histogram import Histogram
from messages.requests import GenerationDone

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
"""Bounds of the buckets in seconds, those of vLLM's histograms."""


class Recorder:
    """Totals of this gateway's requests since its start; durations in seconds."""

    def __init__(self) -> None:
        self.first_token = Histogram(FIRST_TOKEN_S)
        self.between_tokens = Histogram(BETWEEN_TOKENS_S)
        self.request = Histogram(REQUEST_S)
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


class Measurement:
    """The times of one generation of a request, from its arrival to its end."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._began = self._last = time.monotonic()
        self._tokens = 0
        self._ended = False

    def on_tokens(self, count: int) -> None:
        """Record that tokens arrived; those of one message share the time since the last one."""
        now = time.monotonic()
        if self._tokens == 0:
            self._recorder.first_token.observe(now - self._began)
        elif count:
            each_s = (now - self._last) / count
            for _ in range(count):
                self._recorder.between_tokens.observe(each_s)
        self._tokens += count
        self._last = now

    def on_done(self, result: GenerationDone) -> None:
        """Record the end of a request that was served."""
        if self._end():
            recorder = self._recorder
            recorder.request.observe(time.monotonic() - self._began)
            recorder.prompt_tokens += result.prompt_tokens
            recorder.output_tokens += self._tokens
            recorder.finished[result.finish_reason] += 1

    def on_failed(self) -> None:
        """Record the end of a request that failed."""
        if self._end():
            self._recorder.failed += 1

    def on_closed(self) -> None:
        """Record that the client left before the end, if the end was not recorded yet."""
        if self._end():
            self._recorder.aborted += 1

    def _end(self) -> bool:
        """Return whether this is the first end."""
        is_first, self._ended = not self._ended, True
        self._recorder.active -= is_first
        return is_first
