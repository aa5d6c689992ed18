"""A batch over one padded cache: row i of the cache belongs to the i-th running sequence.

For models whose attention can't be computed row by row, and for captured steps. Prompts are
prefilled in groups of similar length, with caches of their own that join the running one.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from functools import partial
from typing import Final

import torch

from loradock.engine.config import EngineConfig
from loradock.engine.inference.batch import BatchEvents, ForwardError, KVUse, Waiting
from loradock.engine.inference.decoding.decode_probe import choose_decode
from loradock.engine.inference.forward_runner import ForwardRunner
from loradock.engine.inference.prefill import PrefillBatch, may_join
from loradock.engine.inference.sequence import Sequence
from loradock.engine.inference.step_budget import TOKENS_MAX, StepBudget
from loradock.engine.models.caches.row_cache import RowCache
from loradock.engine.punica.mapping import BASE, LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper

PREFILL_TOKENS_MAX: Final = 8192
"""The most prompt tokens, padding included, prefilled together; a longer prompt runs alone."""

PREFILLS_MAX: Final = 4
"""The most groups of prompts that are prefilled in turn, so that short ones overtake long ones."""


class PaddedBatch:
    """Prefills one group's chunk, and then decodes one token of every running sequence."""

    def __init__(
        self,
        runner: ForwardRunner,
        punica: PunicaWrapper,
        config: EngineConfig,
        budget: StepBudget,
        events: BatchEvents,
    ) -> None:
        self.budget = budget
        self._runner = runner
        self._model = runner.model
        self._events = events
        slots = len(runner.slots.residents)
        self._strategy = choose_decode(self._model, punica, slots, config)
        self._cache = self._model.new_cache(keeps_capacity=self._strategy.keeps_capacity)
        self._running: list[Sequence] = []
        # What was computed of suspended sequences: the caches of those that ran, prompts of others.
        self._suspended: dict[Sequence, RowCache | PrefillBatch] = {}
        self._suspended_max = config.max_num_seqs
        # The group whose chunk is next comes first.
        self._prefilling: deque[PrefillBatch] = deque()

    @property
    def running(self) -> list[Sequence]:
        """The sequences of the running cache."""
        return self._running

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences of all groups."""
        return [sequence for batch in self._prefilling for sequence in batch.sequences]

    @property
    def kv_use(self) -> KVUse:
        """The bytes of the batch's cache and of those of prefilled groups, without a budget."""
        parts = (self._cache, *self._prefilling, *self._suspended.values())
        caches = (part.cache if isinstance(part, PrefillBatch) else part for part in parts)
        return KVUse(sum(cache.size_bytes for cache in caches), 0, "padded")

    @property
    def lacks_memory(self) -> bool:
        """False: the cache grows as long as there is memory."""
        return False

    def admit(self, waiting: Waiting) -> int:
        """Form a group of the next waiting sequences, as rows and groups are free.

        Suspended ones of which something was kept continue at once.
        """
        if len(self._prefilling) >= PREFILLS_MAX:
            return 0
        sequences: list[Sequence] = []
        lengths: list[int] = []
        rows = len(self._running) + len(self.prefilling)
        while waiting.queue and rows + len(sequences) < waiting.rows_max:
            if waiting.queue.first() in self._suspended:
                sequence = waiting.queue.pop()
                kept = self._suspended.pop(sequence)
                if waiting.is_resident(sequence) and self._continue(sequence, kept):
                    rows += 1
                continue
            length = len(waiting.queue.first().tokens)
            is_full = max([*lengths, length]) * (len(lengths) + 1) > PREFILL_TOKENS_MAX
            if sequences and (waiting.one_by_one or is_full or not may_join(lengths, length)):
                break
            sequence = waiting.queue.pop()
            if waiting.is_resident(sequence):
                sequences.append(sequence)
                lengths.append(length)
        if sequences:
            # After the others, which a stream of short prompts would stop otherwise.
            self._prefilling.append(PrefillBatch(sequences, self._model.new_cache))
        return len(sequences)

    def keep(self, stays: Callable[[Sequence], bool]) -> None:
        """Drop all sequences but those for which `stays` returns True."""
        self._keep([row for row, one in enumerate(self._running) if stays(one)])
        for batch in self._prefilling:
            rows = [row for row, one in enumerate(batch.sequences) if stays(one)]
            if len(rows) < len(batch):
                batch.keep(rows)
        self._prefilling = deque(batch for batch in self._prefilling if len(batch))

    def suspend(self, sequences: list[Sequence]) -> None:
        """Take sequences out, and keep what was computed of them, up to a number of them.

        The others, the last ones by rank, are computed again.
        """
        failed: list[tuple[Sequence, ForwardError]] = []
        for sequence in [one for one in self._running if one in sequences]:
            row = self._running.index(sequence)
            if self._take(sequence, partial(self._cache.take, row), failed):
                del self._running[row]
        for group in self._prefilling:
            for sequence in [one for one in group.sequences if one in sequences]:
                self._take(sequence, partial(group.take, group.sequences.index(sequence)), failed)
        self.keep(lambda one: one not in sequences)
        for sequence, failure in failed:
            self._events.on_failure([sequence], failure)

    def _take(
        self,
        sequence: Sequence,
        take: Callable[[], RowCache | PrefillBatch | None],
        failed: list[tuple[Sequence, ForwardError]],
    ) -> bool:
        """Keep what `take` removes from the batch, if a sequence may be suspended with it.

        Where memory for it lacks, the sequence is computed again, or has failed if it can't be.
        """
        if not self._may_suspend(sequence):
            return False
        try:
            kept = take()
        except (RuntimeError, MemoryError) as error:
            failure = self._runner.failure_of(error, 1)
            if not sequence.can_resume:
                failed.append((sequence, failure))
            return False
        if kept is not None:
            self._suspended[sequence] = kept
        return kept is not None

    def _may_suspend(self, sequence: Sequence) -> bool:
        if len(self._suspended) < self._suspended_max or not sequence.can_resume:
            return True
        others = [one for one in self._suspended if one.can_resume]
        last = max([sequence, *others], key=lambda one: one.rank)
        self.forget([last])
        return last is not sequence

    def _continue(self, sequence: Sequence, kept: RowCache | PrefillBatch) -> bool:
        """Run or prefill a suspended sequence on; return False where memory lacks."""
        if isinstance(kept, PrefillBatch):
            self._prefilling.append(kept)
            return True
        return self._join([sequence], kept)

    def forget(self, sequences: list[Sequence]) -> None:
        """Free the caches of suspended sequences."""
        for sequence in sequences:
            self._suspended.pop(sequence, None)

    def step(self) -> None:
        """Prefill a chunk of the next group, and then decode."""
        if self._prefilling:
            self._prefill(self._prefilling.popleft())
        self._restart_longer()
        if self._running:
            self._decode()

    def _restart_longer(self) -> None:
        """Let sequences wait again whose first tokens have to be computed for another length."""
        lengths = self._cache.prompt_lengths
        pairs = list(zip(self._running, lengths, strict=True))
        changed = [one for one, length in pairs if one.prompt_length != length]
        if changed:
            self.keep(lambda one: one not in changed)
            self._events.on_preemption(changed)

    def _prefill(self, batch: PrefillBatch) -> None:
        """Prefill a chunk of a group; its sequences join the batch after the last one."""
        chunk = batch.next_chunk(self._chunk_tokens(batch))
        is_scored = batch.needs_prompt_logprobs
        run = self._model.forward_all if is_scored else self._model.forward
        forward = partial(run, chunk, batch.cache, batch.images)
        try:
            logits = self._runner.forward(
                batch.sequences, batch.mapping(chunk), forward, batch.images
            )
        except ForwardError as failure:
            self._events.on_failure(batch.sequences, failure)
            return
        if is_scored:
            self._runner.score(batch.scored(logits))
            logits = logits[:, -1]
        if not batch.is_done:
            self._prefilling.append(batch)
            return
        tokens = self._runner.sample(batch.sequences, logits)
        rows = self._events.on_tokens(batch.sequences, tokens)
        if rows:
            joining = [batch.sequences[row] for row in rows]
            self._join(joining, batch.cache, rows)

    def _chunk_tokens(self, batch: PrefillBatch) -> int:
        """Return the most tokens of a group's next chunk, padding included."""
        if not self.budget.chunks:
            return TOKENS_MAX
        tokens_max = self.budget.tokens - len(self._running)
        if batch.needs_prompt_logprobs:
            tokens_max = min(tokens_max, self._runner.scored_tokens_max)
        return tokens_max

    def _join(self, joining: list[Sequence], cache: RowCache, rows: SequenceOf[int] = (0,)) -> bool:
        """Append rows of a cache to the running batch; return False where memory lacks."""
        try:
            cache.keep(rows)
            self._cache.join(cache)
        except (RuntimeError, MemoryError) as error:
            count = len(self._running) + len(joining)
            self._give_way(self._running + joining, self._runner.failure_of(error, count))
            return False
        for sequence in joining:
            sequence.images = None
        self._running += joining
        return True

    def _decode(self) -> None:
        self._cache.grow(1)
        running = self._running
        tokens = torch.tensor([[sequence.output.tokens[-1]] for sequence in running])
        mapping = _decode_mapping(running, self._strategy.padded_rows(len(running)))
        run = partial(self._strategy.run, tokens, self._cache)
        try:
            logits = self._runner.forward(running, mapping, run)
        except ForwardError as failure:
            self._give_way(running, failure)
            return
        self._keep(self._events.on_tokens(running, self._runner.sample(running, logits)))

    def _give_way(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Empty the running batch, whose cache is half written."""
        self._running = []
        self._cache.keep([])
        self._events.on_failure(sequences, failure)

    def _keep(self, rows: list[int]) -> None:
        """Keep only these of the running sequences."""
        if len(rows) == len(self._running):
            return
        self._running = [self._running[row] for row in rows]
        self._cache.keep(rows)


def _decode_mapping(sequences: list[Sequence], rows: int) -> LoRAMapping:
    """Map each row's one token to its adapter and dummy rows to the base model."""
    ids = [sequence.command.adapter_id for sequence in sequences]
    ids += [BASE] * (rows - len(sequences))
    return LoRAMapping(ids, ids)
