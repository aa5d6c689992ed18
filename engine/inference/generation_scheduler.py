"""Continuous batching: requests join and leave the running batch between two forward passes.

Before every forward pass each sequence's (slot, generation) is checked against the arena; a stale
sequence fails alone (L007). Adapters are not scheduled here: a request names its slot.
"""

from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Final

from engine.config import EngineConfig
from engine.errors import NotFinite, NotResident, RequestRefused, code_of
from engine.inference.admission import SlotTable, check_admission
from engine.inference.batch_step import BatchStep, ForwardError
from engine.inference.image_prefetch import ImagePrefetcher
from engine.inference.output_cache import OutputCache
from engine.inference.sampler import NOT_FINITE
from engine.inference.sequence import Sequence
from engine.jobs import Jobs
from engine.models.causal_model import CausalModel
from engine.models.image_processor import ProcessedPrompt
from engine.models.tokenization import prompt_tokens
from engine.punica.wrapper import PunicaWrapper
from messages.commands import StartGeneration
from messages.ids import OpId, RequestId
from messages.prompts import IllustratedPrompt
from messages.reports import GenerationEnded, OperationFailed, Report
from messages.requests import FinishReason, TokensStreamed

PREFILL_TOKENS_MAX: Final = 8192
"""The most prompt tokens, padding included, in one forward pass; a longer prompt runs alone."""


class GenerationScheduler:
    """All generations of an engine: the queue, the running sequences, and their reports.

    Used by one thread, which calls `step` while not idle. Reports leave through `emit`; `jobs`
    processes images.
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
        self._prefetcher = ImagePrefetcher(jobs)
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        # The number of the next waiting sequences that are prefilled one at a time.
        self._prefill_singly = 0
        self._batch = BatchStep(model, punica, slots, config)
        self._active: dict[RequestId, Sequence] = {}
        self._outputs = OutputCache()

    @property
    def is_idle(self) -> bool:
        """Whether `step` would do nothing."""
        return not self._waiting and not self._running

    @property
    def is_reading(self) -> bool:
        """Whether images are being processed on any rank; only `collect` detects the end."""
        return self._prefetcher.is_busy

    @property
    def operations(self) -> list[OpId]:
        """The operations whose generations have not ended."""
        return [sequence.command.op for sequence in self._active.values()]

    def start(self, command: StartGeneration) -> None:
        """Queue a generation; raises `EngineError` where it can't be run."""
        waiting = len(self._waiting) + len(self._prefetcher)
        waiting_max = self._config.queue_requests_max
        check_admission(command, self._slots, waiting, waiting_max, self._active)
        sequence = Sequence(command, self._model)
        self._enqueue(sequence)
        self._active[command.request_id] = sequence

    def stop(self, target: OpId) -> None:
        """End the generation that operation `target` started; do nothing where it has ended."""
        active = self._active.values()
        sequence = next((one for one in active if one.command.op == target), None)
        if sequence is None:
            return
        self._stream(sequence, [], sequence.flush())
        self._end(sequence, "cancelled")
        if sequence in self._running:
            self._keep([row for row, one in enumerate(self._running) if one is not sequence])
        elif sequence in self._waiting:
            self._waiting.remove(sequence)
        else:
            self._prefetcher.cancel(sequence)

    def resend(self, request_id: RequestId) -> None:
        """Send a running or recent output again from its first token, if it is known."""
        sequence = self._active.get(request_id)
        output = self._outputs.get(request_id) if sequence is None else sequence.full_output()
        if output is not None:
            self._emit(output)

    def collect(self) -> None:
        """Move sequences whose images have been processed to the queue."""
        for sequence, future in self._prefetcher.collect(self._ready):
            error = future.exception()
            if error is not None:
                self._fail(sequence, error)
            else:
                sequence.set_prompt(future.result())
                self._waiting.append(sequence)

    def close(self) -> None:
        """Start no more jobs."""
        self._prefetcher.close()

    def step(self) -> None:
        """Prefill waiting sequences as capacity allows, then decode one token per running one."""
        self._fail_stale()
        self._prefill()
        if self._running:
            self._decode()

    @property
    def _ready(self) -> int:
        """The number of waiting sequences with processed images."""
        return sum(sequence.images is not None for sequence in self._waiting)

    def _enqueue(self, sequence: Sequence) -> None:
        """Tokenize a text prompt now, or have a job process a prompt with images."""
        prompt, sampling = sequence.command.prompt, sequence.command.sampling
        if self._model.tokenizer is None and sampling.stop:
            raise RequestRefused(
                "the model's directory has no tokenizer, so stop strings can't be found"
            )
        if not isinstance(prompt, IllustratedPrompt):
            tokens = prompt_tokens(self._model, prompt, sampling.max_tokens)
            sequence.set_prompt(ProcessedPrompt(tokens))
            self._waiting.append(sequence)
            return
        if self._model.prompt_reader is None:
            raise RequestRefused(
                f"images in the prompt, but the model is served for text only: "
                f"{self._model.no_images_reason}"
            )
        read = partial(self._model.prompt_reader.read, prompt, sampling.max_tokens)
        self._prefetcher.add(sequence, read, self._ready)

    def _fail_stale(self) -> None:
        self._keep([row for row, one in enumerate(self._running) if self._is_resident(one)])

    def _is_resident(self, sequence: Sequence) -> bool:
        """Return whether the adapter is still in its slot; fail the sequence where it is not."""
        try:
            self._slots.check(sequence.command)
        except NotResident as error:
            self._fail(sequence, error)
            return False
        return True

    def _prefill(self) -> None:
        """Prefill waiting sequences together and append those that continue to the batch."""
        sequences = self._next_waiting()
        if not sequences:
            return
        try:
            prefill = self._batch.prefill(sequences)
        except ForwardError as failure:
            self._retry_or_fail(sequences, failure)
            return
        rows = self._accept(sequences, prefill.tokens)
        if not rows:
            return
        joining = [sequences[row] for row in rows]
        for sequence in joining:
            sequence.images = None
        self._batch.join(prefill, rows)
        self._running += joining

    def _next_waiting(self) -> list[Sequence]:
        """Dequeue, in order, the sequences that fit into the batch and into one forward pass."""
        sequences: list[Sequence] = []
        width = 0
        while self._waiting and len(self._running) + len(sequences) < self._config.max_num_seqs:
            width = max(width, len(self._waiting[0].prompt))
            is_full = width * (len(sequences) + 1) > PREFILL_TOKENS_MAX
            if sequences and (self._prefill_singly or is_full):
                break
            sequence = self._waiting.popleft()
            if self._is_resident(sequence):
                sequences.append(sequence)
        self._prefill_singly = max(0, self._prefill_singly - 1)
        return sequences

    def _decode(self) -> None:
        try:
            tokens = self._batch.decode(self._running)
        except ForwardError as failure:
            self._retry_or_fail(self._running, failure)
            self._keep([])
            return
        self._keep(self._accept(self._running, tokens))

    def _retry_or_fail(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Fail the sequences of a forward pass that failed, or prefill them again one at a time.

        One prompt's images may be the cause, which must not affect the other sequences.
        """
        if failure.has_images and len(sequences) > 1:
            self._waiting.extendleft(reversed(sequences))
            self._prefill_singly = len(sequences)
            return
        for sequence in sequences:
            self._fail(sequence, failure.error)

    def _accept(self, sequences: list[Sequence], tokens: list[int]) -> list[int]:
        """Append a token to each sequence; return the rows of those that continue."""
        return [
            row
            for row, (sequence, token) in enumerate(zip(sequences, tokens, strict=True))
            if self._append(sequence, token)
        ]

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
        self._emit(GenerationEnded(op, reason, len(sequence.prompt), tokens))
        self._release(sequence)

    def _fail(self, sequence: Sequence, error: BaseException) -> None:
        self._emit(OperationFailed(sequence.command.op, code_of(error), str(error)))
        self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        """Drop an ended sequence, except for its output."""
        del self._active[sequence.command.request_id]
        self._outputs.put(sequence.full_output())

    def _keep(self, rows: list[int]) -> None:
        """Keep only these of the running sequences."""
        if len(rows) == len(self._running):
            return
        self._running = [self._running[row] for row in rows]
        self._batch.keep(rows)
