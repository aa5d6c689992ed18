"""Generations in progress: their sequences, and the reports of what they produce and how they end.

A generation has one sequence per requested output. It ends with one report, after all of them have
ended or when one of them fails. Outputs are kept for a while after their end, for clients that lost
their connection in the meantime.
"""

from collections.abc import Callable
from typing import Final

from loradock.engine.errors import EngineError, Malformed, NotFinite, code_of, text_of
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.serving.sampling import NOT_FINITE, NOT_STRUCTURED
from loradock.engine.serving.sequence import PreparedPrompt, Sequence
from loradock.messages.commands import StartGeneration
from loradock.messages.ids import AdapterId, OpId, RequestId, Slot
from loradock.messages.reports import GenerationEnded, OperationFailed, PrivateReport, Report
from loradock.messages.requests import TokensStreamed
from loradock.messages.views import FinishReason

OUTPUTS_MAX: Final = 256
"""The most outputs in the cache."""

OUTPUTS_BYTES_MAX: Final = 64 << 20
"""The most bytes of all outputs in the cache."""

_TOKEN_BYTES: Final = 8
_ENTRY_BYTES: Final = 128
"""Of a token with its log-probability, as objects in memory."""


class OutputCache:
    """Whole outputs of ended requests, one report per output, bounded in outputs and bytes."""

    def __init__(self) -> None:
        self._outputs: dict[RequestId, tuple[PrivateReport, ...]] = {}
        self._size_bytes = 0

    def get(self, request_id: RequestId) -> tuple[PrivateReport, ...]:
        """Return a request's outputs; none if they are not in the cache."""
        return self._outputs.get(request_id, ())

    def put(self, *outputs: PrivateReport) -> None:
        """Store all outputs of a request in place of older ones, and evict the oldest ones.

        Outputs that exceed the bounds alone are evicted at once.
        """
        request_id = outputs[0].request_id
        self._remove(request_id)
        self._outputs[request_id] = outputs
        self._size_bytes += sum(map(_size_bytes, outputs))
        while self._size_bytes > OUTPUTS_BYTES_MAX or len(self._outputs) > OUTPUTS_MAX:
            self._remove(next(iter(self._outputs)))

    def _remove(self, request_id: RequestId) -> None:
        if request_id in self._outputs:
            self._size_bytes -= sum(map(_size_bytes, self._outputs.pop(request_id)))


def _size_bytes(output: PrivateReport) -> int:
    if isinstance(output, TokensStreamed):
        scored = (*output.logprobs, *output.prompt_logprobs)
        entries = sum(1 + len(entry.top) for entry in scored if entry is not None)
        return _TOKEN_BYTES * len(output.tokens) + len(output.text) + _ENTRY_BYTES * entries
    return sum(map(len, output.vectors))


class Generation:
    """The sequences of one request, of which the first one starts alone.

    The others start with its first token: most of their prompt can then be reused.
    """

    def __init__(self, command: StartGeneration, model: CausalModel) -> None:
        self.op: Final = command.op
        # Whether its sequences are in the queue or in the batch, while it is to leave its slot.
        self.is_computed = True
        self.sequences = [Sequence(command, model)]
        self._model = model
        self._prepared: PreparedPrompt | None = None

    def set_prompt(self, prepared: PreparedPrompt) -> None:
        """Store the prompt."""
        [first] = self.sequences
        self._prepared = prepared if first.command.sampling.n > 1 else None
        first.set_prompt(prepared.fork())

    def others(self) -> list[Sequence]:
        """Return the sequences after the first one, at the first call; then none."""
        if self._prepared is None:
            return []
        command = self.sequences[0].command
        others = [Sequence(command, self._model, index) for index in range(1, command.sampling.n)]
        for sequence in others:
            sequence.set_prompt(self._prepared.fork())
        self.sequences += others
        self._prepared = None
        return others

    @property
    def adapter_id(self) -> AdapterId:
        """Its adapter's id."""
        return self.sequences[0].command.adapter_id

    @property
    def place(self) -> tuple[Slot, int]:
        """The slot that its adapter is or was in, and the slot's version."""
        command = self.sequences[0].command
        return command.slot, command.generation

    @property
    def slice_tokens(self) -> int:
        """The most tokens that one of its sequences has generated in its time slice."""
        return max(one.slice_tokens for one in self.sequences)

    @property
    def unfinished(self) -> list[Sequence]:
        """The sequences that have not ended."""
        return [one for one in self.sequences if one.output.finish_reason is None]

    @property
    def has_ended(self) -> bool:
        """True if all sequences have ended."""
        return self._prepared is None and not self.unfinished


class Generations:
    """All generations in progress, by request; their reports leave through `emit`.

    `suspended`: those that leave or have left their slots, until their adapters are in slots again.
    """

    def __init__(self, model: CausalModel, emit: Callable[[Report], None]) -> None:
        self._model = model
        self._emit: Final = emit
        self._active: dict[RequestId, Generation] = {}
        self.suspended: Final[dict[OpId, Generation]] = {}
        self._outputs = OutputCache()

    def __contains__(self, request_id: object) -> bool:
        """Return whether a generation with this id is in progress."""
        return request_id in self._active

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return [generation.op for generation in self._active.values()]

    def add(self, command: StartGeneration) -> Sequence:
        """Add a generation and return its first sequence."""
        generation = Generation(command, self._model)
        self._active[command.request_id] = generation
        return generation.sequences[0]

    def of(self, sequence: Sequence) -> Generation:
        """Return the generation of a sequence that is active."""
        return self._active[sequence.command.request_id]

    def find(self, op: OpId) -> Generation | None:
        """Return the generation that an operation started; None if it has ended."""
        return next((one for one in self._active.values() if one.op == op), None)

    def using(self, slot: Slot, slot_version: int) -> list[Generation]:
        """Return the generations whose adapter is in this slot, the oldest first."""
        return [one for one in self._active.values() if one.place == (slot, slot_version)]

    def append(self, sequence: Sequence, token: int) -> bool:
        """Append a token to a sequence, report it, and return whether the sequence continues."""
        if not sequence.is_active:
            return False
        if token in (NOT_FINITE, NOT_STRUCTURED):
            self.fail(sequence, _error_of(token, sequence))
            return False
        offset = len(sequence.output.tokens)
        text, reason = sequence.append(token)
        self._stream(sequence, offset, text, reason)
        if reason is not None and (generation := self.of(sequence)).has_ended:
            self._end(generation, reason)
        return reason is None

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
        """Report that the generation of a sequence failed; none of its sequences is active then."""
        if sequence.is_active:
            self._emit(OperationFailed(sequence.command.op, code_of(error), text_of(error)))
            self._release(self.of(sequence))

    def resend(self, request_id: RequestId) -> None:
        """Send running or recent outputs again from their first tokens, if they are known."""
        generation = self._active.get(request_id)
        if generation is None:
            outputs = self._outputs.get(request_id)
        else:
            outputs = tuple(one.full_output() for one in generation.sequences)
        for output in outputs:
            self._emit(output)

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
        prompt, reused = len(first.prompt), first.prefix_tokens
        self._emit(GenerationEnded(generation.op, reason, prompt, tokens, reused))
        self._release(generation)

    def _release(self, generation: Generation) -> None:
        """Drop a generation, except for its outputs."""
        for sequence in generation.sequences:
            sequence.is_active = False
        self.suspended.pop(generation.op, None)
        del self._active[generation.sequences[0].command.request_id]
        self._outputs.put(*(one.full_output() for one in generation.sequences))


def _error_of(token: int, sequence: Sequence) -> EngineError:
    """Return why there is no next token."""
    if token == NOT_FINITE:
        return NotFinite("the model's output is not finite; check the adapter's weights")
    grammar = sequence.sampler.grammar
    reason = "" if grammar is None else grammar.error
    return Malformed(f"the structure can't be followed: {reason}")
