"""Continuous batching: requests join and leave the running batch between two forward passes.

A step is one decode step of all running sequences and one chunk of waiting prompts, within a budget
of tokens. Waiting adapters take turns (`engine.inference.fair_queue`). A running sequence may be
preempted: it waits again, and its KV cache is computed again from its tokens.

Before every forward pass each sequence's (slot, generation) is checked against the arena; a stale
sequence fails alone (L007). Adapters are not scheduled here: a request names its slot.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Final

from engine.config import EngineConfig
from engine.errors import NotFinite, NotResident, RequestRefused, code_of
from engine.inference.admission import SlotTable, check_admission
from engine.inference.batch import ForwardError, KVUse, Waiting
from engine.inference.batch_choice import choose_batch
from engine.inference.fair_queue import FairQueue
from engine.inference.output_cache import OutputCache
from engine.inference.prompt_prefetch import PromptPrefetcher
from engine.inference.sampler import NOT_FINITE
from engine.inference.sequence import Sequence
from engine.jobs import Jobs
from engine.models.causal_model import CausalModel
from engine.models.image_processor import ProcessedPrompt
from engine.models.tokenization import check_text, prompt_tokens
from engine.punica.wrapper import PunicaWrapper
from messages.commands import StartGeneration
from messages.errors import ErrorCode
from messages.ids import OpId, RequestId
from messages.prompts import IllustratedPrompt
from messages.reports import GenerationEnded, OperationFailed, Report
from messages.requests import FinishReason, TokensStreamed

INLINE_TEXT_MAX: Final = 4096
"""Longer texts, in characters, are tokenized by a job, because the main loop would stand still."""

PREEMPT_AFTER_STEPS: Final = 32
"""A waiting adapter with fewer running sequences than another one waits at most this many steps."""

RECOVERY_STEPS: Final = 64
"""After a lack of memory, one more sequence runs together after each of these steps."""


class GenerationScheduler:
    """All generations of an engine: the queue, the running sequences, and their reports.

    Used by one thread, which calls `step` while not idle. `batch`: the sequences that are computed,
    which report to this class. Reports leave through `emit`; `jobs`
    processes images and long texts.
    """

    def __init__(
        self,
        model: CausalModel,
        punica: PunicaWrapper,
        slots: SlotTable,
        config: EngineConfig,
        emit: Callable[[Report], None],
        jobs: Jobs[OpId],
    ) -> None:
        self._model = model
        self._slots = slots
        self._config = config
        self._emit = emit
        self._prefetcher = PromptPrefetcher(jobs)
        self._waiting: FairQueue[Sequence] = FairQueue(weight_of=slots.weight_of)
        # The number of the next waiting sequences that are prefilled one at a time.
        self._prefill_singly = 0
        # Fewer than the configuration allows after a lack of memory.
        self._rows_max = config.max_num_seqs
        self._steps = 0
        # The number of steps in which sequences waited for a row or for memory.
        self._full_steps = 0
        self.batch = choose_batch(model, punica, slots, config, self)
        self._active: dict[RequestId, Sequence] = {}
        self._outputs = OutputCache()

    @property
    def is_idle(self) -> bool:
        """Whether `step` would do nothing."""
        return not self._waiting and not self._rows

    @property
    def is_reading(self) -> bool:
        """Whether prompts are being processed on any rank; only `collect` detects the end."""
        return self._prefetcher.is_busy

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return [sequence.command.op for sequence in self._active.values()]

    @property
    def running(self) -> list[OpId]:
        """The operations that take part in the next step."""
        batch = self.batch
        return [sequence.command.op for sequence in chain(batch.running, batch.prefilling)]

    @property
    def kv_use(self) -> KVUse:
        """The memory of keys and values."""
        return self.batch.kv_use

    def start(self, command: StartGeneration) -> None:
        """Queue a generation; raises `EngineError` where it can't be run."""
        waiting = len(self._waiting) + len(self._prefetcher)
        waiting_max = self._config.queue_requests_max
        check_admission(command, self._slots, waiting, waiting_max, self._active)
        sequence = Sequence(command, self._model)
        self._read_prompt(sequence)
        self._active[command.request_id] = sequence

    def stop(self, target: OpId) -> None:
        """End the generation that operation `target` started; do nothing where it has ended."""
        active = self._active.values()
        sequence = next((one for one in active if one.command.op == target), None)
        if sequence is None:
            return
        self._stream(sequence, [], sequence.flush())
        self._end(sequence, "cancelled")
        if not self._waiting.remove(sequence.command.adapter_id, sequence):
            self.batch.keep(lambda one: one is not sequence)
            self._prefetcher.cancel(sequence)

    def resend(self, request_id: RequestId) -> None:
        """Send a running or recent output again from its first token, if it is known."""
        sequence = self._active.get(request_id)
        output = self._outputs.get(request_id) if sequence is None else sequence.full_output()
        if output is not None:
            self._emit(output)

    def collect(self) -> None:
        """Move sequences whose prompts have been processed to the queue."""
        for sequence, future in self._prefetcher.collect(self._ready):
            error = future.exception()
            if error is not None:
                self._fail(sequence, error)
            else:
                sequence.set_prompt(future.result())
                self._enqueue(sequence)

    def close(self) -> None:
        """Start no more jobs."""
        self._prefetcher.close()

    def step(self) -> None:
        """Prefill one chunk of waiting prompts, then decode one token per running sequence."""
        self._steps += 1
        if self._steps % RECOVERY_STEPS == 0:
            self._rows_max = min(self._rows_max + 1, self._config.max_num_seqs)
        self.batch.keep(self._is_resident)
        self._preempt_for_others()
        single = self._prefill_singly > 0
        waiting = Waiting(self._waiting, self._rows_max, single, self._is_resident)
        if self.batch.admit(waiting):
            self._prefill_singly = max(0, self._prefill_singly - 1)
        self.batch.step()

    def on_tokens(self, sequences: list[Sequence], tokens: list[int]) -> list[int]:
        """Append a token to each sequence; return the indices of those that continue."""
        for sequence in sequences:
            if sequence.output.tokens:
                # The first one is part of the cost of the prompt.
                self._waiting.charge(sequence.command.adapter_id, 1)
        return [
            row
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
            if self._append(sequence, token)
        ]

    def on_preemption(self, sequences: list[Sequence]) -> None:
        """Let sequences wait again that had to give up their memory."""
        self._enqueue_first(sequences)

    @property
    def _ready(self) -> int:
        """The number of waiting sequences with processed images."""
        return sum(sequence.images is not None for sequence in self._waiting)

    def _read_prompt(self, sequence: Sequence) -> None:
        """Tokenize a short text now, or have a job process a long one or one with images."""
        prompt, sampling = sequence.command.prompt, sequence.command.sampling
        if self._model.tokenizer is None and sampling.stop:
            raise RequestRefused(
                "the model's directory has no tokenizer, so stop strings can't be found"
            )
        if isinstance(prompt, IllustratedPrompt):
            if self._model.prompt_reader is None:
                raise RequestRefused(
                    f"images in the prompt, but the model is served for text only: "
                    f"{self._model.no_images_reason}"
                )
            read = partial(self._model.prompt_reader.read, prompt, sampling.max_tokens or 1)
            self._prefetcher.add(sequence, read, self._ready)
            return

        def tokenize() -> ProcessedPrompt:
            return ProcessedPrompt(prompt_tokens(self._model, prompt, sampling.max_tokens or 1))

        if isinstance(prompt, str) and len(prompt) > INLINE_TEXT_MAX:
            check_text(self._model, prompt)
            self._prefetcher.add(sequence, tokenize, self._ready)
        else:
            sequence.set_prompt(tokenize())
            self._enqueue(sequence)

    def _enqueue(self, sequence: Sequence) -> None:
        self._waiting.append(sequence.command.adapter_id, sequence, len(sequence.tokens))

    def _enqueue_first(self, sequences: list[Sequence]) -> None:
        """Let sequences that were dequeued or preempted wait again, before others of their own."""
        for sequence in reversed(sequences):
            adapter_id = sequence.command.adapter_id
            self._waiting.append_first(adapter_id, sequence, len(sequence.tokens))

    @property
    def _rows(self) -> int:
        """The number of sequences that run or are prefilled."""
        return len(self.batch.running) + len(self.batch.prefilling)

    def _is_resident(self, sequence: Sequence) -> bool:
        """Return whether the adapter is still in its slot; fail the sequence where it is not."""
        try:
            self._slots.check(sequence.command)
        except NotResident as error:
            self._fail(sequence, error)
            return False
        return True

    def _preempt_for_others(self) -> None:
        """Preempt a sequence of the adapter with most of them, if another adapter waits long."""
        if not self._waiting or not (self._rows >= self._rows_max or self.batch.lacks_memory):
            self._full_steps = 0
            return
        self._full_steps += 1
        if self._full_steps < PREEMPT_AFTER_STEPS:
            return
        busy = chain(self.batch.running, self.batch.prefilling)
        rows = Counter(sequence.command.adapter_id for sequence in busy)
        waiting = min(self._waiting.adapters, key=lambda adapter: rows[adapter])
        candidates = [
            one
            for one in self.batch.running
            if one.can_resume and rows[one.command.adapter_id] > rows[waiting] + 1
        ]
        if candidates:
            # Of the adapter with most rows, the sequence with the fewest tokens to compute again.
            chosen = min(
                candidates, key=lambda one: (-rows[one.command.adapter_id], len(one.tokens))
            )
            self.batch.keep(lambda one: one is not chosen)
            self._enqueue_first([chosen])
            self._waiting.serve_next(waiting)
            self._full_steps = 0

    def on_failure(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Fail the sequences of a forward pass that failed, or prefill them again one at a time.

        One prompt's images may be the cause, which must not affect the other sequences. Where
        memory lacks, fewer sequences run together from then on, and only one alone fails.
        """
        lacks_memory = failure.error.code is ErrorCode.DEVICE_OUT_OF_MEMORY
        if len(sequences) == 1 or not (failure.has_images or lacks_memory):
            for sequence in sequences:
                self._fail(sequence, failure.error)
            return
        if lacks_memory:
            self._rows_max = max(1, len(sequences) // 2)
        for sequence in sequences:
            if not (sequence.can_resume or sequence.images is not None):
                self._fail(sequence, failure.error)
        again = [one for one in sequences if one.can_resume or one.images is not None]
        self._enqueue_first(again)
        self._prefill_singly = len(again)

    def _append(self, sequence: Sequence, token: int) -> bool:
        """Append a token to a sequence, report it, and return whether the sequence continues."""
        if token == NOT_FINITE:
            text = "the model's output is not finite; check the adapter's weights"
            self._fail(sequence, NotFinite(text))
            return False
        before = len(sequence.output.tokens)
        text, reason = sequence.append(token)
        self._stream(sequence, sequence.output.tokens[before:], text)
        if reason is not None:
            self._end(sequence, reason)
        return reason is None

    def _stream(self, sequence: Sequence, tokens: list[int], text: str) -> None:
        """Report the latest tokens of an output, and add `text` to it."""
        sequence.output.text.append(text)
        if tokens or text:
            offset = len(sequence.output.tokens) - len(tokens)
            request_id = sequence.command.request_id
            self._emit(TokensStreamed(request_id, offset, tuple(tokens), text))

    def _end(self, sequence: Sequence, reason: FinishReason) -> None:
        op, tokens = sequence.command.op, len(sequence.output.tokens)
        prompt_tokens, reused = len(sequence.prompt), sequence.prefix_tokens
        self._emit(GenerationEnded(op, reason, prompt_tokens, tokens, reused))
        self._release(sequence)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        self._emit(OperationFailed(sequence.command.op, code_of(error), str(error)))
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Drop an ended sequence, except for its output."""
        del self._active[sequence.command.request_id]
        self._outputs.put(sequence.full_output())
