"""Continuous batching: requests join and leave the running batch between two forward passes.

A step is one decode step of all running sequences and one chunk of waiting prompts, within a budget
of tokens. Waiting adapters of one priority take turns (`engine/inference/queues/`). A running
sequence may be preempted: it waits again, and its KV cache is computed again from its tokens.

Before every forward pass each sequence's (slot, generation) is checked against the arena; a stale
sequence fails alone (L007). Adapters are not scheduled here: a request names its slot.
"""

from collections import Counter
from collections.abc import Callable
from itertools import chain
from typing import Final

from loradock.engine.config import EngineConfig
from loradock.engine.errors import NotResident
from loradock.engine.inference.admission import SlotTable, check_admission
from loradock.engine.inference.batch import ForwardError, KVUse, Waiting
from loradock.engine.inference.batch_choice import choose_batch
from loradock.engine.inference.generations import Generations, SuspendedGenerations
from loradock.engine.inference.prompt_prefetch import PromptPrefetcher
from loradock.engine.inference.prompt_reader import PromptReader
from loradock.engine.inference.queues.priority_queue import PriorityQueue
from loradock.engine.inference.sequence import Sequence
from loradock.engine.jobs import Jobs
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.messages.commands import ResumeGeneration, StartGeneration
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import OpId, RequestId, Slot
from loradock.messages.reports import Report

PREEMPT_AFTER_STEPS: Final = 32
"""A waiting adapter with fewer running sequences than another one waits at most this many steps."""

RECOVERY_STEPS: Final = 64
"""After a lack of memory, one more sequence runs together after each of these steps."""


class GenerationScheduler:
    """The sequences of all generations of an engine: those that wait, and those that run.

    Used by one thread, which calls `step` while not idle. `batch`: the sequences that are computed,
    which report to this class. Reports leave through `emit`; `jobs` processes images and long
    texts, and compiles structures.
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
        self._slots = slots
        self._config = config
        self._prompts = PromptReader(model)
        self._prefetcher = PromptPrefetcher(jobs)
        self._waiting: PriorityQueue[Sequence] = PriorityQueue(slots.weight_of)
        # The number of the next waiting sequences that are prefilled one at a time.
        self._prefill_singly = 0
        # Fewer than the configuration allows after a lack of memory.
        self._rows_max = config.max_num_seqs
        self._steps = 0
        # The number of steps in which sequences waited for a row or for memory.
        self._full_steps = 0
        self.batch = choose_batch(model, punica, slots, config, self)
        self._generations = Generations(model, emit)
        self._suspended = SuspendedGenerations(
            self._generations, self._waiting, self.batch, self._enqueue
        )

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
        return self._generations.operations

    @property
    def suspended(self) -> list[OpId]:
        """The operations whose generations wait for a slot."""
        return self._suspended.operations

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
        check_admission(command, self._slots, waiting, waiting_max, self._generations)
        prepare, is_long = self._prompts.preparation_of(command.prompt, command.sampling)
        if is_long:
            self._prefetcher.add(self._generations.add(command), prepare, self._ready)
        else:
            prepared = prepare()
            sequence = self._generations.add(command)
            self._generations.set_prompt(sequence, prepared)
            self._enqueue(sequence)

    def stop(self, target: OpId) -> None:
        """End the generation that operation `target` started; do nothing where it has ended."""
        ended = self._generations.cancel(target)
        self._suspended.end(target, ended)
        waiting = [one for one in ended if self._waiting.remove(one.command.adapter_id, one)]
        for sequence in ended:
            if sequence not in waiting:
                self._prefetcher.cancel(sequence)
        if len(waiting) < len(ended):
            self.batch.keep(lambda one: one not in ended)

    def has_progressed(self, slot: Slot, generation: int) -> bool:
        """Whether a slot may be taken from its generations: the oldest one has a new token."""
        return self._suspended.has_progressed(slot, generation)

    def suspend(self, slot: Slot, generation: int) -> None:
        """Take all generations of a slot out of the batch, until `resume`."""
        self._suspended.suspend(slot, generation)

    def resume(self, command: ResumeGeneration) -> None:
        """Continue a suspended generation; do nothing for another one."""
        self._suspended.resume(command)

    def resend(self, request_id: RequestId) -> None:
        """Send running or recent outputs again from their first tokens, if they are known."""
        self._generations.resend(request_id)

    def collect(self) -> None:
        """Move sequences whose prompts have been processed to the queue."""
        for sequence, future in self._prefetcher.collect(self._ready):
            error = future.exception()
            if error is not None:
                self._fail(sequence, error)
            else:
                self._generations.set_prompt(sequence, future.result())
                if sequence.command.op not in self._suspended:
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

    def _enqueue(self, sequence: Sequence) -> None:
        command = sequence.command
        self._waiting.append(command.adapter_id, sequence, len(sequence.tokens), command.priority)

    def _enqueue_first(self, sequences: list[Sequence]) -> None:
        """Let sequences that were dequeued or preempted wait again, before others of their own."""
        for sequence in reversed(sequences):
            command, cost = sequence.command, len(sequence.tokens)
            self._waiting.append_first(command.adapter_id, sequence, cost, command.priority)

    @property
    def _rows(self) -> int:
        """The number of sequences that run or are prefilled."""
        return len(self.batch.running) + len(self.batch.prefilling)

    def _is_resident(self, sequence: Sequence) -> bool:
        """Return whether the adapter is still in its slot; fail the generation where it is not.

        A sequence of a generation that has failed is not.
        """
        if self._generations.of(sequence) is None:
            return False
        try:
            self._slots.check(sequence.command)
        except NotResident as error:
            self._fail(sequence, error)
            return False
        return True

    def _preempt_for_others(self) -> None:
        """Preempt a sequence of the adapter with most of them, if another adapter waits long.

        None of a more urgent priority is: it would be the next one again.
        """
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
            if one.can_resume
            and one.command.priority >= self._waiting.priority
            and rows[one.command.adapter_id] > rows[waiting] + 1
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
        continues = self._generations.append(sequence, token)
        self._enqueue_first(self._generations.start_others(sequence))
        return continues

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        generation = self._generations.of(sequence)
        self._generations.fail(sequence, error)
        self._suspended.end(sequence.command.op, generation.sequences if generation else ())
