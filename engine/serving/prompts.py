"""Preparation of a generation before it is queued: its prompt's tokens and its grammar matcher.

Prompts with images, long texts and structures are processed by jobs while others generate.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, Final, NamedTuple

import torch

from loradock.engine.errors import Malformed
from loradock.engine.jobs import InlineJobs, Jobs
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_processor import ProcessedPrompt
from loradock.engine.models.tokenization import check_text, prompt_tokens
from loradock.engine.serving.queue import QUANTUM_TOKENS, WaitingQueue
from loradock.engine.serving.sampling import WHOLE_LOGITS_BYTES_MAX
from loradock.engine.serving.sequence import PreparedPrompt, Sequence
from loradock.engine.serving.structured import GrammarCompiler, GrammarMatcher
from loradock.messages.ids import OpId
from loradock.messages.prompts import MultimodalPrompt, Prompt, Sampling

INLINE_TEXT_MAX: Final = 4096
"""Longer texts, in characters, are tokenized by a job, because the main loop would stand still."""

PREFETCHED_MAX: Final = 8
"""The most prompts that are processed, or being processed, and not yet in the batch.

Pixels take far more memory than the files that they come from.
"""

COMPILING_MAX: Final = 1
"""The most structures that are compiled at the same time. The threads of jobs are one more than
those for prompts, so that a slow structure delays other structures alone.
"""


class Preparation(NamedTuple):
    """Preparation of a prompt: `to_compile` is called for its structure, if any, and then `read`.

    `is_long`: whether a job has to read it. A job always compiles.
    """

    read: Callable[[], ProcessedPrompt]
    is_long: bool
    to_compile: Callable[[], GrammarMatcher] | None = None
    grammar: GrammarMatcher | None = None

    @property
    def needs_job(self) -> bool:
        """True if it takes too long for the main loop."""
        return self.is_long or self.to_compile is not None

    def prepare(self) -> PreparedPrompt:
        """Return the prompt, whose structure has been compiled."""
        return PreparedPrompt(self.read(), self.grammar)


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
            return Preparation(read, is_long)
        # Several ranks compile the same ones, because what each has compiled can be different.
        known = self._grammars.known(structure) if self._model.group.is_trivial else None
        if known is not None:
            return Preparation(read, is_long, grammar=known)
        return Preparation(read, is_long, partial(self._grammars.compile, structure))

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


class _Job:
    """A sequence whose prompt is prepared; a cancelled one counts until its job has ended."""

    def __init__(self, sequence: Sequence, preparation: Preparation) -> None:
        self.sequence: Final = sequence
        self.preparation: Final = preparation
        self.is_cancelled = False

    @property
    def is_compiled(self) -> bool:
        """True if its next job reads the prompt."""
        return self.preparation.to_compile is None

    def run(self) -> Any:
        """Return the compiled structure, or the prepared prompt."""
        compiler = self.preparation.to_compile
        return self.preparation.prepare() if compiler is None else compiler()


class PromptPrefetcher:
    """Sequences whose prompts wait for a job; used by one thread, which calls `collect` often.

    Structures and prompts have separate queues, in turns of their adapters and clients, so that no
    prompt waits for another's structure. `ready`, in its methods: the number of processed sequences
    that are not yet in the batch.
    """

    def __init__(self, jobs: Jobs[OpId]) -> None:
        self._jobs = jobs
        self._structures: WaitingQueue[_Job] = WaitingQueue()
        self._prompts: WaitingQueue[_Job] = WaitingQueue()
        self._queued: dict[OpId, _Job] = {}
        self._running: dict[OpId, _Job] = {}

    def __len__(self) -> int:
        return len(self._queued) + len(self._running)

    @property
    def clients(self) -> Counter[str]:
        """The number of sequences of each client that has any."""
        running = (one for one in self._running.values() if not one.is_cancelled)
        return Counter(one.sequence.owner[1] for one in (*running, *self._queued.values()))

    @property
    def is_busy(self) -> bool:
        """True if a job is running, the end of which only `collect` reports."""
        return bool(self._running)

    def add(self, sequence: Sequence, preparation: Preparation, ready: int) -> None:
        """Queue a sequence."""
        self._enqueue(_Job(sequence, preparation))
        self._start_jobs(ready)

    def cancel(self, sequence: Sequence) -> None:
        """Drop a sequence; a running job continues and its result is ignored."""
        op = sequence.command.op
        if op in self._running:
            self._running[op].is_cancelled = True
        elif op in self._queued:
            job = self._queued.pop(op)
            self._queue_of(job).remove(sequence.owner, job)

    def collect(self, ready: int) -> list[tuple[Sequence, "Future[PreparedPrompt]"]]:
        """Return the sequences that were prepared since the last call, and start more jobs."""
        prepared = []
        for op, future in self._jobs.take_finished():
            job = self._running.pop(op)
            if job.is_cancelled:
                continue
            if job.is_compiled or future.exception() is not None:
                prepared.append((job.sequence, future))
                continue
            rest = job.preparation._replace(to_compile=None, grammar=future.result())
            if rest.is_long:
                self._enqueue(_Job(job.sequence, rest))
            else:
                prepared.append((job.sequence, _result_of(rest.prepare)))
        self._start_jobs(ready + len(prepared))
        return prepared

    def close(self) -> None:
        """Start no more jobs."""
        self._jobs.close()

    def _queue_of(self, job: _Job) -> "WaitingQueue[_Job]":
        return self._prompts if job.is_compiled else self._structures

    def _enqueue(self, job: _Job) -> None:
        command = job.sequence.command
        self._queued[command.op] = job
        # A structure costs a turn.
        cost = _cost_of(command.prompt) if job.is_compiled else QUANTUM_TOKENS
        self._queue_of(job).append(job.sequence.owner, job, cost, command.priority)

    def _start_jobs(self, ready: int) -> None:
        compiling = sum(not one.is_compiled for one in self._running.values())
        reading = len(self._running) - compiling
        if self._structures and compiling < COMPILING_MAX:
            self._start(self._structures.pop())
        while self._prompts and ready + reading < PREFETCHED_MAX:
            self._start(self._prompts.pop())
            reading += 1

    def _start(self, job: _Job) -> None:
        op = job.sequence.command.op
        self._running[op] = self._queued.pop(op)
        self._jobs.start(op, job.run)


def _cost_of(prompt: Prompt) -> int:
    """Return the cost of reading a prompt: a token has about four characters."""
    if isinstance(prompt, MultimodalPrompt):
        return QUANTUM_TOKENS * len(prompt.images)
    return len(prompt) // (4 if isinstance(prompt, str) else 1)


def _result_of(prepare: Callable[[], PreparedPrompt]) -> "Future[PreparedPrompt]":
    """Call a function, and return its result or error as a job's."""
    jobs = InlineJobs[None]()
    jobs.start(None, prepare)
    [(_, future)] = jobs.take_finished()
    return future
