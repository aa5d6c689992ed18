"""Generations in progress: their outputs, and the reports of what they produce and how they end.

A generation has one sequence per requested output. It ends with one report, after all of them have
ended or when one of them fails. Suspended ones have no slot: they keep their outputs, samplers and,
while memory allows, their keys and values, until their adapter is in a slot again.
"""

from collections.abc import Callable, Iterable
from typing import Final

from loradock.engine.errors import NotFinite, RequestRefused, code_of, text_of
from loradock.engine.inference.batch import SequenceBatch
from loradock.engine.inference.output_cache import OutputCache
from loradock.engine.inference.queues.priority_queue import PriorityQueue
from loradock.engine.inference.sequence import PreparedPrompt, Sequence
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.sampling.sampler import NOT_FINITE, NOT_STRUCTURED
from loradock.messages.commands import ResumeGeneration, StartGeneration
from loradock.messages.ids import OpId, RequestId, Slot
from loradock.messages.reports import GenerationEnded, OperationFailed, Report
from loradock.messages.views import FinishReason


class Generation:
    """The sequences of one request, of which the first one starts alone.

    The others start with its first token: most of their prompt can then be reused.
    """

    def __init__(self, command: StartGeneration, model: CausalModel) -> None:
        self.sequences = [Sequence(command, model)]
        self._model = model
        self._prepared: PreparedPrompt | None = None

    def set_prompt(self, prepared: PreparedPrompt) -> None:
        """Store the prompt."""
        [first] = self.sequences
        self._prepared = prepared if first.command.sampling.n > 1 else None
        first.set_prompt(_with_own_guide(prepared))

    def others(self) -> list[Sequence]:
        """Return the sequences after the first one, at the first call; then none."""
        if self._prepared is None:
            return []
        command = self.sequences[0].command
        others = [Sequence(command, self._model, index) for index in range(1, command.sampling.n)]
        for sequence in others:
            sequence.set_prompt(_with_own_guide(self._prepared))
        self.sequences += others
        self._prepared = None
        return others

    @property
    def op(self) -> OpId:
        """The operation that started it."""
        return self.sequences[0].command.op

    def uses(self, slot: Slot, generation: int) -> bool:
        """Whether its adapter is in this slot."""
        command = self.sequences[0].command
        return (command.slot, command.generation) == (slot, generation)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [one for one in self.sequences if one.output.finish_reason is None]

    @property
    def has_ended(self) -> bool:
        """Whether all sequences have ended."""
        return self._prepared is None and not self.unfinished


def _with_own_guide(prepared: PreparedPrompt) -> PreparedPrompt:
    guide = prepared.guide
    return prepared._replace(guide=None if guide is None else guide.fork())


class Generations:
    """All generations in progress, by request; their reports leave through `emit`."""

    def __init__(self, model: CausalModel, emit: Callable[[Report], None]) -> None:
        self._model = model
        self._emit: Final = emit
        self._active: dict[RequestId, Generation] = {}
        self._outputs = OutputCache()

    def __contains__(self, request_id: object) -> bool:
        """Whether a generation with this id is in progress."""
        return request_id in self._active

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return [one.op for one in self._active.values()]

    def add(self, command: StartGeneration) -> Sequence:
        """Add a generation and return its first sequence."""
        generation = Generation(command, self._model)
        self._active[command.request_id] = generation
        return generation.sequences[0]

    def of(self, sequence: Sequence) -> Generation | None:
        """Return the generation of a sequence; None where it has ended or failed."""
        generation = self._active.get(sequence.command.request_id)
        if generation is None or len(generation.sequences) <= sequence.index:
            return None
        # A later request may have the same id.
        return generation if generation.sequences[sequence.index] is sequence else None

    def find(self, op: OpId) -> Generation | None:
        """Return the generation that an operation started; None where it has ended."""
        return next((one for one in self._active.values() if one.op == op), None)

    def using(self, slot: Slot, generation: int) -> list[Generation]:
        """Return the generations whose adapter is in this slot, the oldest first."""
        return [one for one in self._active.values() if one.uses(slot, generation)]

    def set_prompt(self, sequence: Sequence, prepared: PreparedPrompt) -> None:
        """Store the prompt of a generation in progress, whose first sequence is `sequence`."""
        self._active[sequence.command.request_id].set_prompt(prepared)

    def append(self, sequence: Sequence, token: int) -> bool:
        """Append a token to a sequence, report it, and return whether the sequence continues."""
        if self.of(sequence) is None:
            return False
        if token == NOT_FINITE:
            text = "the model's output is not finite; check the adapter's weights"
            self.fail(sequence, NotFinite(text))
            return False
        if token == NOT_STRUCTURED:
            guide = sequence.sampler.guide
            reason = "" if guide is None else guide.error
            self.fail(sequence, RequestRefused(f"the structure can't be followed: {reason}"))
            return False
        before = len(sequence.output.tokens)
        text, reason_of_end = sequence.append(token)
        self._report(sequence, before, text, reason_of_end)
        return reason_of_end is None

    def start_others(self, sequence: Sequence) -> list[Sequence]:
        """Return the further sequences of a request that has its first token, once."""
        generation = self.of(sequence)
        return [] if generation is None else generation.others()

    def cancel(self, target: OpId) -> list[Sequence]:
        """End the generation of an operation; return the sequences that had not ended."""
        found = self.find(target)
        if found is None:
            return []
        unfinished = found.unfinished
        for sequence in unfinished:
            offset, text = len(sequence.output.tokens), sequence.flush()
            self._stream(sequence, offset, text, "cancelled")
        self._end(found, "cancelled")
        return unfinished

    def fail(self, sequence: Sequence, error: BaseException) -> None:
        """Report that a generation failed; its other sequences are then unknown to `of`."""
        generation = self.of(sequence)
        if generation is not None:
            self._emit(OperationFailed(sequence.command.op, code_of(error), text_of(error)))
            self._release(generation)

    def resend(self, request_id: RequestId) -> None:
        """Send running or recent outputs again from their first tokens, if they are known."""
        generation = self._active.get(request_id)
        if generation is None:
            outputs = self._outputs.get(request_id)
        else:
            outputs = tuple(one.full_output() for one in generation.sequences)
        for output in outputs:
            self._emit(output)

    def _report(
        self, sequence: Sequence, offset: int, text: str, reason: FinishReason | None
    ) -> None:
        self._stream(sequence, offset, text, reason)
        generation = self.of(sequence)
        if reason is not None and generation is not None and generation.has_ended:
            self._end(generation, reason)

    def _stream(
        self, sequence: Sequence, offset: int, text: str, reason: FinishReason | None
    ) -> None:
        """Report the tokens from `offset` on, and add `text` to the output."""
        output = sequence.output
        output.text.append(text)
        output.finish_reason = reason
        if text or reason or len(output.tokens) > offset:
            self._emit(sequence.streamed(offset, text))

    def _end(self, generation: Generation, reason: FinishReason) -> None:
        first = generation.sequences[0]
        tokens = sum(len(one.output.tokens) for one in generation.sequences)
        op, reused = first.command.op, first.prefix_tokens
        self._emit(GenerationEnded(op, reason, len(first.prompt), tokens, reused))
        self._release(generation)

    def _release(self, generation: Generation) -> None:
        """Drop a generation, except for its outputs."""
        request_id = generation.sequences[0].command.request_id
        del self._active[request_id]
        self._outputs.put(*(one.full_output() for one in generation.sequences))


class SuspendedGenerations:
    """The generations that are suspended; `enqueue` lets sequences wait for the batch again."""

    def __init__(
        self,
        generations: Generations,
        waiting: PriorityQueue[Sequence],
        batch: SequenceBatch,
        enqueue: Callable[[Sequence], None],
    ) -> None:
        self._generations = generations
        self._waiting = waiting
        self._batch = batch
        self._enqueue = enqueue
        self._operations: set[OpId] = set()

    def __contains__(self, op: object) -> bool:
        """Whether the generation of an operation is suspended."""
        return op in self._operations

    @property
    def operations(self) -> list[OpId]:
        """The operations of the suspended generations, in order."""
        return sorted(self._operations)

    def has_progressed(self, slot: Slot, generation: int) -> bool:
        """Whether the oldest generation of a slot has a token since its turn began, if any is."""
        oldest = next(iter(self._generations.using(slot, generation)), None)
        return oldest is None or any(one.has_progressed for one in oldest.sequences)

    def suspend(self, slot: Slot, generation: int) -> None:
        """Suspend all generations of a slot; prompts that are being processed continue to be."""
        leaving: list[Sequence] = []
        for one in self._generations.using(slot, generation):
            self._operations.add(one.op)
            leaving += one.unfinished
        self._batch.suspend(
            [one for one in leaving if not self._waiting.remove(one.command.adapter_id, one)]
        )

    def resume(self, command: ResumeGeneration) -> None:
        """Continue a generation in a slot; do nothing for one that is not suspended.

        Those of one adapter wait in the order of these calls, so the oldest is to be the first.
        """
        if command.target in self._operations:
            self._operations.remove(command.target)
            found = self._generations.find(command.target)
            for sequence in () if found is None else _resumed(found, command):
                self._enqueue(sequence)

    def end(self, op: OpId, sequences: Iterable[Sequence]) -> None:
        """Forget a generation that has ended."""
        self._operations.discard(op)
        self._batch.forget(list(sequences))


def _resumed(generation: Generation, command: ResumeGeneration) -> list[Sequence]:
    """Put a generation into its slot; return the sequences whose prompts are processed."""
    for sequence in generation.sequences:
        sequence.resume(command.slot, command.generation)
    return [one for one in generation.unfinished if one.prompt]
