"""The tokens of a step, from what steps cost: `a + b * tokens` seconds.

Two sizes are measured at start, and every step afterwards, with older ones counting less. On a CPU
a measurement is the processor time of the thread that runs the steps, which other programs don't
make longer; on any other device it is the time until the results are read.
"""

import time
from collections.abc import Callable, Sequence
from typing import Final

import torch

from loradock.engine.parallel import ParallelGroup

STEP_TOKENS_MIN: Final = 64
STEP_TOKENS_MAX: Final = 8192
"""Bounds on the tokens that are chosen."""

UNDISTURBED: Final = 4
"""While nothing is decoded and nobody else waits, a step takes up to this many times as long: what
arrives then waits for it."""

UPDATE_STEPS: Final = 16
"""The tokens are chosen again after this many steps."""

_MEMORY: Final = 0.98
"""The weight of a step relative to the next one."""

_SECONDS_MIN: Final = 1e-9


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return the clock of steps on a device, in seconds."""
    return time.thread_time if device.type == "cpu" else time.perf_counter


class StepBudget:
    """The most tokens of a step.

    `chunks`: whether prompts are divided to keep it. With `target_s`, the longest duration that a
    step should have while sequences are decoded, the tokens are chosen from `measured`, pairs of
    tokens and seconds, and from the steps that follow; without it they are `tokens_max`. Equal on
    all ranks of `group`, which do the same steps.
    """

    def __init__(
        self,
        tokens_max: int,
        group: ParallelGroup,
        *,
        chunks: bool = True,
        target_s: float = 0.0,
        measured: Sequence[tuple[int, float]] = (),
        clock: Callable[[], float] = time.thread_time,
    ) -> None:
        self.chunks: Final = chunks
        self.tokens_max = tokens_max
        self._group = group
        self._target_s = target_s
        self._clock = clock
        self._started_s = 0.0
        self._step_tokens = self._steps = 0
        self._is_disturbed = False
        # Weighted sums of 1, tokens, seconds, tokens squared, and tokens times seconds.
        self._sums = [0.0] * 5
        self._tokens = self._undisturbed = tokens_max
        for tokens, seconds in measured:
            self._add(tokens, seconds)
        if target_s:
            self._choose()

    @property
    def tokens(self) -> int:
        """The most tokens of a step that others wait for."""
        return min(self._tokens, self.tokens_max)

    def prompt_tokens(self, decoded: int) -> int:
        """Return the most tokens of prompts in a step that decodes a token of each of `decoded`."""
        if decoded or self._is_disturbed:
            return self.tokens - decoded
        return min(self._undisturbed, self.tokens_max)

    def limit(self) -> None:
        """Never choose more tokens than now: the memory of a sequence is reserved for these."""
        self.tokens_max = self.tokens

    def begin_step(self, *, is_disturbed: bool = False) -> None:
        """Begin to measure a step; `is_disturbed`: others wait for it, decoded or not."""
        self._is_disturbed = is_disturbed
        self._step_tokens, self._started_s = 0, self._clock()

    def count(self, tokens: int) -> None:
        """Count the tokens of a pass of this step."""
        self._step_tokens += tokens

    def end_step(self) -> None:
        """Measure the step; from time to time, choose the tokens again."""
        if not self._target_s or not self._step_tokens:
            return
        self._add(self._step_tokens, self._clock() - self._started_s)
        self._steps += 1
        if self._steps % UPDATE_STEPS == 0:
            self._choose()

    def _add(self, tokens: int, seconds: float) -> None:
        entry = (1.0, tokens, seconds, tokens * tokens, tokens * seconds)
        pairs = zip(self._sums, entry, strict=True)
        self._sums = [_MEMORY * total + new for total, new in pairs]

    def _choose(self) -> None:
        """Choose the tokens from the line through the measurements with the least squares."""
        count, tokens, seconds, squares, products = self._sums
        spread = count * squares - tokens * tokens
        # Steps of one size alone say nothing about another size: then all of it is by the token.
        slope = (count * products - tokens * seconds) / spread if spread > tokens else 0.0
        each_s = slope if slope > 0 else seconds / tokens
        step_s = max(0.0, (seconds - each_s * tokens) / count)
        targets = (self._target_s, UNDISTURBED * self._target_s)
        chosen = [int((target - step_s) / max(each_s, _SECONDS_MIN)) for target in targets]
        bounded = [min(max(one, STEP_TOKENS_MIN), STEP_TOKENS_MAX) for one in chosen]
        self._tokens, self._undisturbed = self._group.broadcast_numbers(bounded)
