"""The interface between the scheduler and the sequences that are computed together.

A batch decides what a forward pass consists of and owns its sequences' keys and values. There are
two: over a padded cache (`loradock.engine.inference.padded_batch`) and over blocks of tokens
(`engine/inference/paged_batch.py`). The scheduler decides which sequences run, and reports tokens.
"""

from collections.abc import Callable
from typing import NamedTuple, Protocol

from loradock.engine.errors import EngineError
from loradock.engine.inference.queues.priority_queue import PriorityQueue
from loradock.engine.inference.sequence import Sequence
from loradock.engine.inference.step_budget import StepBudget
from loradock.messages.views import KVLayout


class ForwardError(Exception):
    """A forward pass that failed for its own sequences, with the error to report; others continue.

    The cache of these sequences may be half written, so none of them can continue with it.
    """

    def __init__(self, error: EngineError, has_images: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.has_images = has_images


class BatchEvents(Protocol):
    """What a batch reports during a step."""

    def on_tokens(self, sequences: list[Sequence], tokens: list[int]) -> list[int]:
        """Accept a token per sequence; return the indices of the sequences that continue."""

    def on_failure(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Fail these sequences, which have left the batch, or let them wait again."""

    def on_preemption(self, sequences: list[Sequence]) -> None:
        """Let these sequences, which have left the batch, wait again."""


class Waiting(NamedTuple):
    """The sequences that may enter a batch.

    `rows_max`: the most sequences that the batch may have. `one_by_one`: whether sequences are
    prefilled one at a time, because one of them may have caused a failure. `is_resident`: whether
    a sequence's adapter is in its slot; a sequence for which it is not has failed.
    """

    queue: PriorityQueue[Sequence]
    rows_max: int
    one_by_one: bool
    is_resident: Callable[[Sequence], bool]


class KVUse(NamedTuple):
    """The bytes of keys and values, and their budget; 0 where they have none. How they are kept.

    Of a paged cache, there are `blocks` of `block_tokens` tokens each. `shares_prefixes`: whether
    prompts reuse those of earlier ones.
    """

    size_bytes: int
    size_bytes_max: int
    layout: KVLayout = ""
    blocks: int = 0
    block_tokens: int = 0
    shares_prefixes: bool = False


class SequenceBatch(Protocol):
    """Sequences whose prompts are prefilled or which are decoded."""

    @property
    def budget(self) -> StepBudget:
        """The tokens of a step."""

    @property
    def running(self) -> list[Sequence]:
        """The sequences whose prompts are in the cache."""

    @property
    def prefilling(self) -> list[Sequence]:
        """The other sequences of the batch."""

    @property
    def kv_use(self) -> KVUse:
        """The memory of keys and values."""

    @property
    def lacks_memory(self) -> bool:
        """Whether the last call of `admit` left a sequence waiting for memory."""

    def admit(self, waiting: Waiting) -> int:
        """Take sequences from the queue as far as they fit; return their number."""

    def keep(self, stays: Callable[[Sequence], bool]) -> None:
        """Drop all sequences but those for which `stays` returns True; called once for each."""

    def suspend(self, sequences: list[Sequence]) -> None:
        """Take sequences out, and keep what was computed of them as long as memory allows.

        Those that can't be computed again are kept in any case. The others continue when `admit`
        takes them from the queue, from what was kept or from their tokens.
        """

    def forget(self, sequences: list[Sequence]) -> None:
        """Free what was kept of suspended sequences that have ended."""

    def step(self) -> None:
        """Compute a chunk of the prompts, and a token of every running sequence."""
