"""A batch over one padded cache: row i of the cache belongs to the i-th running sequence.

For models whose attention can't be computed over blocks. Prompts are prefilled in groups of similar
length, with separate caches that join the running one.
"""

from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from copy import copy
from functools import partial
from typing import Final

import torch
from torch import Tensor

from loradock.engine.models.image_inputs import ImageInputs, position_offsets
from loradock.engine.models.probing import MakeCache
from loradock.engine.models.row_cache import RowCache, RowStates
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.serving.blocks import block_keys
from loradock.engine.serving.budget import STEP_TOKENS_MAX, StepBudget
from loradock.engine.serving.forward import (
    BatchEvents,
    ForwardError,
    ForwardRunner,
    KVUse,
    Waiting,
    decode_mapping,
)
from loradock.engine.serving.prefix_states import Beginning, PrefixStates
from loradock.engine.serving.sampling import PromptChunk
from loradock.engine.serving.sequence import Sequence

WIDTH_PADDED_MAX: Final = 32
"""Prompts up to this length are prefilled together however different they are."""

PADDING_MAX: Final = 1.5
"""Longer ones only while the columns, padding included, are at most this many times the tokens."""


def may_join(lengths: SequenceOf[int], length: int) -> bool:
    """Return whether a prompt of `length` tokens may be prefilled with prompts of `lengths`."""
    width = max(*lengths, length) if lengths else length
    cells, tokens = width * (len(lengths) + 1), sum(lengths) + length
    return width <= WIDTH_PADDED_MAX or cells <= PADDING_MAX * tokens


class PrefillBatch:
    """Prompts that are prefilled together, in chunks of columns, with a separate KV cache.

    Rows are padded on the left, so a chunk holds the last tokens of short rows and the first tokens
    of long rows. Rows with images are prefilled in one chunk, because images are read at once.
    `beginnings`: for rows with states, what each of them begins with; a chunk ends where states of
    a row are to be stored.
    """

    def __init__(
        self,
        sequences: SequenceOf[Sequence],
        new_cache: MakeCache,
        beginnings: SequenceOf[Beginning] = (),
    ) -> None:
        self.sequences = list(sequences)
        self.images: list[ImageInputs | None] = [one.images for one in sequences]
        self._beginnings = list(beginnings) or [Beginning()] * len(self.sequences)
        pairs = zip(sequences, self._beginnings, strict=True)
        rows = [one.tokens[begun.tokens :] for one, begun in pairs]
        # The columns of each row: its tokens after those that it begins with.
        self._counts = [len(row) for row in rows]
        self._width = max(self._counts)
        self._input_ids = torch.tensor([[0] * (self._width - len(row)) + row for row in rows])
        self._done = 0
        self.cache = new_cache([0] * len(self.sequences), position_offsets(self.images))
        self.cache.prompt_lengths = [one.prompt_length for one in sequences]
        for row, begun in enumerate(self._beginnings):
            if begun.tokens and isinstance(self.cache, RowStates):
                self.cache.restore(row, begun.states, begun.tokens)

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.sequences)

    @property
    def is_done(self) -> bool:
        """True if all columns are in the cache."""
        return self._done == self._width

    def next_chunk(self, tokens_max: int) -> Tensor:
        """Return the next columns, [rows, columns] int64, and count them in the cache's lengths.

        `tokens_max`: the most tokens, padding included, but at least one column.
        """
        columns = max(1, tokens_max // len(self))
        if any(self.images):
            columns = self._width
        start, end = self._done, min(self._width, self._done + columns)
        ends = [
            self._width - count + tokens - begun.tokens
            for count, begun in zip(self._counts, self._beginnings, strict=True)
            for tokens in begun.stored
        ]
        self._done = min([end, *(one for one in ends if one > start)])
        pairs = zip(self._columns, self._beginnings, strict=True)
        self.cache.lengths = [begun.tokens + columns for columns, begun in pairs]
        return self._input_ids[:, start : self._done]

    @property
    def _columns(self) -> list[int]:
        """The columns of each row up to the end of the last chunk."""
        left = self._width - self._done
        return [max(0, count - left) for count in self._counts]

    def store(self, prefixes: PrefixStates) -> None:
        """Store the states of rows that are at an end to be stored after the last chunk."""
        if isinstance(self.cache, RowStates):
            for row, begun in enumerate(self._beginnings):
                key = begun.stored.get(self.cache.done[row])
                if key is not None:
                    prefixes.store(key, self.cache, row)

    def mapping(self, chunk: Tensor) -> LoRAMapping:
        """Map the tokens of the last chunk to the adapters of their rows, and padding to the base.

        A chunk of one column has one adapter per row, for padding too, which nothing reads.
        """
        ids = torch.tensor([one.command.adapter_id for one in self.sequences])
        columns = chunk.shape[1]
        if columns == 1:
            return LoRAMapping(ids, ids)
        own = torch.tensor(self._columns)[:, None]
        is_own = torch.arange(columns) >= columns - own
        return LoRAMapping((is_own * ids[:, None]).flatten(), ids, is_prefill=True)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """True if the logits of all tokens are needed."""
        return any(one.needs_prompt_logprobs for one in self.sequences)

    def scored(self, logits: Tensor) -> list[PromptChunk]:
        """Return the last chunk's tokens to be scored; logits: [rows, columns, vocabulary]."""
        columns = logits.shape[1]
        chunks = []
        for row, (sequence, total) in enumerate(
            zip(self.sequences, self.cache.lengths, strict=True)
        ):
            own = min(columns, total)
            if sequence.prompt_logprobs is not None and own:
                own_logits = logits[row, columns - own :]
                chunks.append(PromptChunk(sequence.prompt_logprobs, total - own, own_logits))
        return chunks

    def keep(self, rows: SequenceOf[int]) -> None:
        """Keep only these rows, and drop the columns that are then padding in all of them."""
        self.cache.keep(rows)
        self._select(rows)

    def take(self, row: int) -> "PrefillBatch | None":
        """Remove a row, and return it in a separate batch; None if none of it is in the cache."""
        count = self._counts[row]
        done = count - (self._width - self._done)
        others = [other for other in range(len(self)) if other != row]
        if done <= 0:
            self.keep(others)
            return None
        taken = copy(self)
        taken._input_ids = self._input_ids[:, self._width - count :]
        taken._width, taken._done = count, done
        taken._select([row])
        taken.cache = self.cache.take(row)
        self._select(others)
        return taken

    def _select(self, rows: SequenceOf[int]) -> None:
        self.sequences = [self.sequences[row] for row in rows]
        self.images = [self.images[row] for row in rows]
        self._counts = [self._counts[row] for row in rows]
        self._beginnings = [self._beginnings[row] for row in rows]
        self._input_ids = self._input_ids[list(rows)]
        if rows:
            self._done = max(self._done, self._width - max(self._counts))


PREFILL_TOKENS_MAX: Final = 8192
"""The most prompt tokens, padding included, prefilled together; a longer prompt runs alone."""

PREFILLS_MAX: Final = 4
"""The most groups of prompts that are prefilled in turn: short prompts overtake long ones."""


class PaddedBatch:
    """Prefills one group's chunk, and then decodes one token of every running sequence.

    `suspended_max`: the most sequences that can be computed again of which something is kept while
    they are suspended. `prefixes`: the states that prompts begin with. `lacks_memory`: False; the
    cache grows as long as there is memory.
    """

    lacks_memory = False

    def __init__(
        self,
        runner: ForwardRunner,
        budget: StepBudget,
        events: BatchEvents,
        suspended_max: int,
        prefixes: PrefixStates,
    ) -> None:
        self.budget: Final = budget
        self._runner = runner
        self._model = runner.model
        self._events = events
        self._cache = self._model.new_cache()
        self._running: list[Sequence] = []
        # What was computed of suspended sequences: the caches of those that ran, prompts of others.
        self._suspended: dict[Sequence, RowCache | PrefillBatch] = {}
        self._suspended_max = suspended_max
        self._prefixes = prefixes
        # The group whose chunk is next comes first.
        self._prefilling: deque[PrefillBatch] = deque()

    @property
    def size(self) -> int:
        """The number of sequences in the batch."""
        return len(self._running) + sum(map(len, self._prefilling))

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of the batch."""
        return [*self._running, *self.prefilling]

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
        size_bytes = sum(cache.size_bytes for cache in caches)
        return KVUse(size_bytes, 0, "padded", shares_prefixes=self._prefixes.bytes_max > 0)

    def admit(self, waiting: Waiting) -> int:
        """Form a group of the next waiting sequences, if the batch has capacity; return its size.

        Suspended sequences of which something was kept continue at once.
        """
        if len(self._prefilling) >= PREFILLS_MAX:
            return 0
        sequences: list[Sequence] = []
        beginnings: list[Beginning] = []
        lengths: list[int] = []
        size = self.size
        while waiting.queue and size + len(sequences) < waiting.sequences_max:
            if waiting.queue.first() in self._suspended:
                sequence = waiting.queue.pop()
                kept = self._suspended.pop(sequence)
                if waiting.is_resident(sequence) and self._continue(sequence, kept):
                    size += 1
                continue
            begun = self._beginning(waiting.queue.first())
            length = len(waiting.queue.first().tokens) - begun.tokens
            is_full = max([*lengths, length]) * (len(lengths) + 1) > PREFILL_TOKENS_MAX
            if sequences and (waiting.one_by_one or is_full or not may_join(lengths, length)):
                break
            sequence = waiting.queue.pop()
            if waiting.is_resident(sequence):
                sequences.append(sequence)
                lengths.append(length)
                beginnings.append(begun)
        if sequences:
            # After the others, which a stream of short prompts would stop otherwise.
            self._prefilling.append(self._group_of(sequences, beginnings))
        return len(sequences)

    def _beginning(self, sequence: Sequence) -> Beginning:
        """Return the states that a sequence begins with; none if all its logits are needed."""
        if not self._prefixes.bytes_max or sequence.needs_prompt_logprobs:
            return Beginning()
        root = self._runner.prefix_root(sequence)
        return self._prefixes.find(list(block_keys(root, sequence.tokens[:-1])))

    def _group_of(self, sequences: list[Sequence], beginnings: list[Beginning]) -> PrefillBatch:
        """Return a group whose sequences begin with stored states, unless memory lacks for them."""
        try:
            group = PrefillBatch(sequences, self._model.new_cache, beginnings)
        except (RuntimeError, MemoryError) as error:
            self._drop_prefixes(error)
            return PrefillBatch(sequences, self._model.new_cache)
        for sequence, begun in zip(sequences, beginnings, strict=True):
            sequence.record_reused(begun.tokens)
            self._prefixes.record(begun.keys)
        return group

    def _drop_prefixes(self, error: Exception) -> None:
        """Drop all stored states; raise the error if the engine can't continue."""
        self._runner.failure_of(error, 1)
        self._prefixes.clear()

    def keep(self, stays: Callable[[Sequence], bool]) -> None:
        """Drop all sequences but those for which `stays` returns True; called once for each."""
        self._keep([row for row, one in enumerate(self._running) if stays(one)])
        for batch in self._prefilling:
            rows = [row for row, one in enumerate(batch.sequences) if stays(one)]
            if len(rows) < len(batch):
                batch.keep(rows)
        self._prefilling = deque(batch for batch in self._prefilling if len(batch))

    def suspend(self, sequences: list[Sequence]) -> None:
        """Take sequences out, and keep what was computed of them, up to a number of them.

        The others, the last ones in order, are computed again.
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

        If memory for it lacks, the sequence is computed again, or has failed if it can't be.
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
        last = max([sequence, *others], key=lambda one: one.order_key)
        self.forget([last])
        return last is not sequence

    def _continue(self, sequence: Sequence, kept: RowCache | PrefillBatch) -> bool:
        """Run or prefill a suspended sequence on; return False if memory lacks."""
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
        if self._model.row_lengths.restarts:
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
        self.budget.count(chunk.numel())
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
            self._store(batch)
            self._prefilling.append(batch)
            return
        tokens = self._runner.sample(batch.sequences, logits)
        rows = self._events.on_tokens(batch.sequences, tokens)
        if rows:
            joining = [batch.sequences[row] for row in rows]
            self._join(joining, batch.cache, rows)

    def _store(self, batch: PrefillBatch) -> None:
        try:
            batch.store(self._prefixes)
        except (RuntimeError, MemoryError) as error:
            self._drop_prefixes(error)

    def _chunk_tokens(self, batch: PrefillBatch) -> int:
        """Return the most tokens of a group's next chunk, padding included."""
        if not self.budget.chunks:
            return STEP_TOKENS_MAX
        tokens_max = self.budget.prompt_tokens(len(self._running))
        if batch.needs_prompt_logprobs:
            tokens_max = min(tokens_max, self._runner.scored_tokens_max)
        return tokens_max

    def _join(self, joining: list[Sequence], cache: RowCache, rows: SequenceOf[int] = (0,)) -> bool:
        """Append rows of a cache to the running batch; return False if memory lacks."""
        try:
            cache.keep(rows)
            self._cache.join(cache)
        except (RuntimeError, MemoryError) as error:
            count = len(self._running) + len(joining)
            self._fail_sequences(self._running + joining, self._runner.failure_of(error, count))
            return False
        for sequence in joining:
            sequence.images = None
        self._running += joining
        return True

    def _decode(self) -> None:
        self._cache.grow(1)
        running = self._running
        self.budget.count(len(running))
        tokens = torch.tensor([[sequence.output.tokens[-1]] for sequence in running])
        run = partial(self._model.forward, tokens, self._cache)
        try:
            logits = self._runner.forward(running, decode_mapping(running), run)
        except ForwardError as failure:
            self._fail_sequences(running, failure)
            return
        self._keep(self._events.on_tokens(running, self._runner.sample(running, logits)))

    def _fail_sequences(self, sequences: list[Sequence], failure: ForwardError) -> None:
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
