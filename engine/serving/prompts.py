"""Preparation of a generation before it is queued: its prompt's tokens and its grammar matcher.

Prompts with images, long texts and structures are processed by jobs while others generate.
"""

from collections import Counter, deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from loradock.engine.errors import Malformed
from loradock.engine.jobs import Jobs
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.models.tokenization import check_text, prompt_tokens
from loradock.engine.serving.sampling import WHOLE_LOGITS_BYTES_MAX
from loradock.engine.serving.sequence import PreparedPrompt, Sequence
from loradock.engine.serving.structured import GrammarCompiler
from loradock.messages.ids import OpId
from loradock.messages.prompts import MultimodalPrompt, Prompt, Sampling

INLINE_TEXT_MAX: Final = 4096
"""Longer texts, in characters, are tokenized by a job, because the main loop would stand still."""

PREFETCHED_MAX: Final = 8
"""The most prompts that are processed, or being processed, and not yet in the batch.

Pixels take far more memory than the files that they come from.
"""


class Preparation(NamedTuple):
    """The function that prepares a prompt, and whether a job has to call it."""

    prepare: Callable[[], PreparedPrompt]
    is_long: bool


class PromptReader:
    """Checks what can be checked at once, and returns the preparation of the rest."""

    def __init__(self, model: CausalModel) -> None:
        self._model = model
        self._grammars = GrammarCompiler(model.tokenizer, model.vocab_size, model.eos_ids)

    def preparation_of(self, prompt: Prompt, sampling: Sampling) -> Preparation:
        """Return the preparation of a request; raises `EngineError` if it can't be run."""
        self._check(sampling)
        read, is_long = self._read(prompt, sampling)
        structure = sampling.structure
        if structure is None:
            return Preparation(lambda: PreparedPrompt(read()), is_long)

        def prepare() -> PreparedPrompt:
            # Before the prompt, which may contain images and takes longer.
            grammar = self._grammars.compile(structure)
            return PreparedPrompt(read(), grammar)

        return Preparation(prepare, is_long=True)

    def _check(self, sampling: Sampling) -> None:
        if self._model.tokenizer is None and (sampling.stop or sampling.structure is not None):
            wanted = (
                "stop strings can't be found" if sampling.stop else "outputs can't have a structure"
            )
            raise Malformed(f"the model's directory has no tokenizer, so {wanted}")
        if sampling.structure is not None and sampling.min_tokens:
            raise Malformed("min_tokens and a structure exclude each other")
        self._check_known("logit_bias", (token for token, _ in sampling.logit_bias))
        self._check_known("stop_token_ids", sampling.stop_token_ids)

    def _check_known(self, option: str, tokens: Iterable[int]) -> None:
        largest, count = max(tokens, default=0), self._model.vocab_size
        if largest >= count:
            raise Malformed(
                f"{option} must have tokens of this model, 0 to {count - 1}, got {largest}"
            )

    def _check_scored(self, prompt: ProcessedPrompt) -> ProcessedPrompt:
        """Refuse more tokens than may have logits at once: images are read in one pass."""
        tokens_max = WHOLE_LOGITS_BYTES_MAX // (torch.float32.itemsize * self._model.vocab_size)
        if len(prompt.tokens) > tokens_max:
            raise Malformed(
                f"prompt_logprobs of a prompt with images need the logits of all its "
                f"{len(prompt.tokens)} tokens at once; with this model's vocabulary at most "
                f"{tokens_max} tokens are served"
            )
        return prompt

    def _read(
        self, prompt: Prompt, sampling: Sampling
    ) -> tuple[Callable[[], ProcessedPrompt], bool]:
        """Return the function that reads a prompt, and whether a job has to call it."""
        model, wanted = self._model, sampling.max_tokens or 1
        if isinstance(prompt, MultimodalPrompt):
            if model.prompt_reader is None:
                raise Malformed(
                    f"images in the prompt, but the model is served for text only: "
                    f"{model.no_images_reason}"
                )
            read = partial(model.prompt_reader.read, prompt, wanted)
            if sampling.prompt_logprobs is None:
                return read, True
            return lambda: self._check_scored(read()), True
        is_long = isinstance(prompt, str) and len(prompt) > INLINE_TEXT_MAX
        if isinstance(prompt, str) and is_long:
            check_text(model, prompt)
        return lambda: ProcessedPrompt(prompt_tokens(model, prompt, wanted)), is_long


class PromptPrefetcher:
    """Sequences whose prompts wait for a job; used by one thread, which calls `collect` often.

    Prompts start in the order of their requests. `ready`, in its methods: the number of processed
    sequences that are not yet in the batch.
    """

    def __init__(self, jobs: Jobs[OpId]) -> None:
        self._jobs = jobs
        self._queue: deque[tuple[Sequence, Callable[[], PreparedPrompt]]] = deque()
        # The job of a cancelled sequence counts until it has ended; its value is None.
        self._running: dict[OpId, Sequence | None] = {}

    def __len__(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def clients(self) -> Counter[str]:
        """The number of sequences of each client that has any."""
        running = (one for one in self._running.values() if one is not None)
        return Counter(one.owner[1] for one in (*running, *(one for one, _ in self._queue)))

    @property
    def is_busy(self) -> bool:
        """True if a job is running, the end of which only `collect` reports."""
        return bool(self._running)

    def add(self, sequence: Sequence, read: Callable[[], PreparedPrompt], ready: int) -> None:
        """Queue a sequence, whose prompt is the result of `read`."""
        self._queue.append((sequence, read))
        self._start_jobs(ready)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; a running job continues and its result is ignored."""
        if sequence.command.op in self._running:
            self._running[sequence.command.op] = None
        else:
            self._queue = deque(entry for entry in self._queue if entry[0] is not sequence)

    def collect(self, ready: int) -> list[tuple[Sequence, "Future[Any]"]]:
        """Return the sequences whose jobs have ended since the last call, and start more jobs."""
        ended = [(self._running.pop(op), future) for op, future in self._jobs.take_finished()]
        wanted = [(sequence, future) for sequence, future in ended if sequence is not None]
        self._start_jobs(ready + len(wanted))
        return wanted

    def close(self) -> None:
        """Start no more jobs."""
        self._jobs.close()

    def _start_jobs(self, ready: int) -> None:
        while self._queue and ready + len(self._running) < PREFETCHED_MAX:
            sequence, read = self._queue.popleft()
            self._running[sequence.command.op] = sequence
            self._jobs.start(sequence.command.op, read)
