"""A batch over blocks of tokens: prompt chunks and decode steps share one flat forward pass.

A sequence has blocks for the tokens that it has, and shares those of its beginning with every
sequence of the same adapter version that begins with the same tokens. Where no block is left, the
last sequence by rank waits again and is computed again later; those that can't be computed again
have all their blocks from the start, and leave them only while they are suspended.

Every step makes progress: the first sequence by rank has its next token, or a chunk of its prompt,
unless it waits for those that can't be computed again, which then have theirs. None waits forever:
a sequence alone fits, because suspended ones hold no block against it, and one that has come in
loses its blocks to older and more urgent ones only.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final

import torch
from torch import Tensor

from loradock.engine.inference.batch import BatchEvents, ForwardError, KVUse, Waiting
from loradock.engine.inference.forward_runner import ForwardRunner, adapter_rows
from loradock.engine.inference.paged_row import PagedRow, SuspendedRows
from loradock.engine.inference.sequence import Sequence
from loradock.engine.inference.step_budget import StepBudget
from loradock.engine.models.caches.kv_cache import BatchKVCache
from loradock.engine.paging.block_pool import BLOCK_TOKENS, BlockPool, Prefix
from loradock.engine.paging.block_table import BlockTable, root_key
from loradock.engine.paging.flat_model import FlatModel
from loradock.engine.paging.paged_cache import FlatRow
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.sampling.logprobs import PromptChunk


class PagedBatch:
    """Sequences over the blocks of `flat`.

    `row_blocks`: the most blocks that a sequence holds at once. `shares_prefixes`: whether blocks
    are reused. `lacks_memory`: as in `SequenceBatch`.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        flat: FlatModel,
        budget: StepBudget,
        events: BatchEvents,
        *,
        row_blocks: int,
        shares_prefixes: bool,
    ) -> None:
        self.budget: Final = budget
        self.pool: Final = BlockPool(flat.cache.blocks)
        self._runner = runner
        self._flat = flat
        self._events = events
        self._row_blocks = row_blocks
        self._shares_prefixes = shares_prefixes
        # By rank: one loses its blocks to those before it.
        self._rows: list[PagedRow] = []
        self._suspended = SuspendedRows(flat.cache, self._lose)
        self.lacks_memory = False

    @property
    def running(self) -> list[Sequence]:
        """The sequences that are decoded."""
        return [row.sequence for row in self._rows if row.is_prefilled]

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences whose prompts are not yet in the cache."""
        return [row.sequence for row in self._rows if not row.is_prefilled]

    @property
    def kv_use(self) -> KVUse:
        """The bytes of the blocks that sequences hold, and of all blocks."""
        block_bytes, blocks = self._flat.cache.block_bytes, self.pool.blocks
        return KVUse(
            self.pool.held * block_bytes,
            blocks * block_bytes,
            "paged",
            blocks,
            BLOCK_TOKENS,
            self._shares_prefixes,
        )

    @property
    def tokens_held(self) -> int:
        """The tokens in the blocks that sequences hold, each shared block counted once."""
        lengths = {
            block: min(BLOCK_TOKENS, row.table.length - number * BLOCK_TOKENS)
            for row in (*self._rows, *self._suspended)
            for number, block in enumerate(row.table.blocks, row.table.released)
        }
        return sum(max(0, length) for length in lengths.values())

    def admit(self, waiting: Waiting) -> int:
        """Take waiting sequences while there are blocks for their prompts."""
        count, self.lacks_memory = 0, False
        while waiting.queue and len(self._rows) < waiting.rows_max:
            if waiting.one_by_one and (count or self.prefilling):
                break
            sequence = waiting.queue.first()
            row = self._suspended.get(sequence) or self._row_of(sequence)
            if not self._fits_after_dropping(row):
                self.lacks_memory = True
                break
            waiting.queue.pop()
            if waiting.is_resident(sequence):
                self._add(row)
                count += 1
            else:
                self.forget([sequence])
        return count

    def keep(self, stays: Callable[[Sequence], bool]) -> None:
        """Drop all sequences but those for which `stays` returns True."""
        self._leave([row for row in self._rows if not stays(row.sequence)])

    def suspend(self, sequences: list[Sequence]) -> None:
        """Take sequences out, with their blocks until other sequences need these."""
        leaving = [row for row in self._rows if row.sequence in sequences]
        self._rows = [row for row in self._rows if row not in leaving]
        for row in leaving:
            self._suspended.add(row)

    def forget(self, sequences: list[Sequence]) -> None:
        """Free the blocks of suspended sequences."""
        self._suspended.forget(sequences)

    def step(self) -> None:
        """Run one flat pass of all running sequences and of chunks of the prompts."""
        unread = next((row for row in self._rows if row.sequence.images is not None), None)
        if unread is not None:
            self._prefill_images(unread)
        self._restart_longer()
        self._reserve_for_running()
        chunks = self._chunks(max(1, self.budget.tokens - len(self.running)))
        parts = [(row, 1) for row in self._rows if row.is_prefilled]
        parts += [(row, count) for row, count in chunks if row in self._rows]
        # Rows of one adapter are adjacent, so that kernels read and write them in place.
        parts.sort(key=lambda part: part[0].sequence.command.slot)
        if parts:
            self._run(parts)

    def _row_of(self, sequence: Sequence) -> PagedRow:
        root, images = None, sequence.images
        if self._shares_prefixes:
            version = self._runner.slots.version_of(sequence.command)
            length = self._runner.model.row_lengths.key_of(sequence.prompt_length)
            root = root_key(version, images.digest if images else b"", length)
        table = BlockTable(self.pool, root, self._flat.reach)
        return PagedRow(sequence, table, self._row_blocks)

    def _fits(self, row: PagedRow, freed: int = 0) -> bool:
        """Whether there are blocks for a sequence, after those promised to the others.

        freed: the blocks that are counted as available, although suspended sequences hold them.
        """
        # A sequence that continues has its blocks, or its tokens.
        begun = row.table.prefix if row.has_begun else self._reusable(row)
        prefilling = [one for one in self._rows if not one.is_prefilled]
        promised = sum(one.missing_blocks(one.table.prefix) for one in prefilling)
        # One more block for each sequence, so that the next steps preempt nothing.
        growth = len(self._rows) + 1 if self._rows else 0
        needed = row.missing_blocks(begun) + growth
        available = self.pool.available + freed - self.pool.kept_among(begun.blocks)
        return needed + promised <= available

    def _fits_after_dropping(self, row: PagedRow) -> bool:
        """Whether a sequence fits, after suspended ones have given up blocks for it.

        They keep their blocks where all of these would be too few.
        """
        if self._fits(row):
            return True
        held = {block for one in (*self._rows, row) for block in one.table.blocks}
        if not self._fits(row, freed=self.pool.held - len(held)):
            return False
        while not self._fits(row):
            if not self._suspended.free_blocks(row):
                return False
        return True

    def _reusable(self, row: PagedRow) -> Prefix:
        """Return the blocks of other sequences that a sequence can begin with.

        Images are read at once, so either all of them are in these blocks, or none is used. Of
        tokens that another sequence computed there are no logits.
        """
        if row.is_scored:
            return Prefix()
        found = row.table.find(row.keys)
        if row.sequence.images is not None:
            media = self._runner.model.media_tokens
            last = max((at for at, token in enumerate(row.tokens) if token in media), default=-1)
            if last < 0 or found.end * BLOCK_TOKENS <= last:
                return Prefix()
        return found

    def _add(self, row: PagedRow) -> None:
        self._suspended.remove(row)
        insort(self._rows, row, key=lambda one: one.sequence.rank)
        self._reuse(row)
        sequence = row.sequence
        row.table.reserve(row.table.length if sequence.can_resume else sequence.tokens_max)
        if row.states is not None:
            try:
                self._flat.cache.write(row.table, row.states)
            except (RuntimeError, MemoryError) as error:
                self._lose(row, error)
            row.states = None

    def _lose(self, row: PagedRow, error: Exception) -> None:
        """Let a row be computed again for whose copy memory lacks; it fails if it can't be.

        Raises the error where the engine can't continue.
        """
        failure = self._runner.failure_of(error, 1)
        is_suspended = row not in self._rows
        self._suspended.forget([row.sequence])
        self._leave([row])
        if not row.can_leave:
            self._events.on_failure([row.sequence], failure)
        elif not is_suspended:
            self._events.on_preemption([row.sequence])

    def _reuse(self, row: PagedRow) -> None:
        """Begin a sequence that has computed nothing with the blocks of others."""
        if row.table.length == row.table.capacity == row.table.reused:
            found = self._reusable(row)
            if found.end > row.table.prefix.end:
                row.table.reuse(found, row.keys)
                row.sequence.note_reused(row.table.reused)
                row.sequence.images = None

    def _restart_longer(self) -> None:
        """Let sequences wait again whose first tokens have to be computed for another length."""
        changed = [row for row in self._rows if row.sequence.prompt_length != row.prompt_length]
        self._leave(changed)
        if changed:
            self._events.on_preemption([row.sequence for row in changed])

    def _reserve_for_running(self) -> None:
        """Reserve the next token of every running sequence, the first by rank before the others."""
        for row in list(self._rows):
            if row.is_prefilled:
                self._reserve_or_preempt(row, row.table.length + 1)

    def _reserve_or_preempt(self, row: PagedRow, tokens: int) -> None:
        """Reserve blocks for a sequence; preempt the last ones by rank while there are too few.

        The sequence itself is preempted if no later one can be computed again.
        """
        while row in self._rows and not row.reserve(tokens):
            if self._suspended.free_blocks():
                continue
            later = self._rows[self._rows.index(row) + 1 :]
            victim = next((one for one in reversed(later) if one.can_leave), row)
            self._leave([victim])
            self._events.on_preemption([victim.sequence])

    def _chunks(self, tokens: int) -> list[tuple[PagedRow, int]]:
        """Divide `tokens` among the prompts: half for the first, then the shortest ones first.

        The first one by rank receives what the others leave, and blocks of sequences after it.
        """
        eligible = self._not_computed_by_others()
        if not eligible:
            return []
        oldest, *others = eligible
        others.sort(key=lambda row: row.left)
        counts = dict.fromkeys(map(id, eligible), 0)
        first = -(-tokens // 2) if others else tokens
        scored = self._runner.scored_tokens_max
        for row, share in ((oldest, first), *((row, tokens) for row in others), (oldest, tokens)):
            most = min(share, scored) if row.is_scored else share
            count = min(row.left - counts[id(row)], most, tokens)
            end = row.table.length + counts[id(row)] + count
            if row is oldest:
                self._reserve_or_preempt(row, end)
            elif row in self._rows and not row.reserve(end):
                continue
            if row in self._rows:
                tokens -= count
                scored -= count if row.is_scored else 0
                counts[id(row)] += count
        return [(row, counts[id(row)]) for row in eligible if counts[id(row)]]

    def _not_computed_by_others(self) -> list[PagedRow]:
        """Return the sequences with a prompt, but none whose next block another one computes."""
        claimed: set[bytes] = set()
        eligible = []
        for row in self._rows:
            if row.is_prefilled or row.sequence.images is not None:
                continue
            self._reuse(row)
            begun = row.table.length // BLOCK_TOKENS
            keys = row.keys[begun:]
            is_new = row.table.length == row.table.reused and not row.is_scored
            if is_new and keys and keys[0] in claimed:
                continue
            claimed.update(keys)
            eligible.append(row)
        return eligible

    def _run(self, parts: list[tuple[PagedRow, int]]) -> None:
        """Run one pass, count its tokens, and report a token of each sequence without a prompt."""
        rows = [row for row, _ in parts]
        sequences = [row.sequence for row in rows]
        flat_rows = [row.next_tokens(count) for row, count in parts]
        ids = adapter_rows(sequences)
        counts = torch.tensor([len(part.tokens) for part in flat_rows])
        kept = torch.tensor([part.logits for part in flat_rows])
        mapping = LoRAMapping(
            ids.repeat_interleave(counts),
            ids.repeat_interleave(kept),
            is_prefill=bool((counts > 1).any()),
        )
        try:
            logits = self._runner.forward(
                sequences, mapping, partial(self._flat.forward, flat_rows)
            )
        except ForwardError as failure:
            self._give_way(rows, failure)
            return
        for row, part in zip(rows, flat_rows, strict=True):
            row.advance(part.end)
        self._report(rows, self._score(rows, flat_rows, logits))

    def _score(self, rows: list[PagedRow], parts: list[FlatRow], logits: Tensor) -> Tensor:
        """Score the tokens of prompts; return the logits after each last token, [rows, vocabulary].

        logits: [logits, vocabulary], of the parts one after another.
        """
        if not any(part.is_scored for part in parts):
            return logits
        pieces = torch.split(logits, [part.logits for part in parts])
        chunks = [
            PromptChunk(scores, row.table.length - part.logits, piece)
            for row, part, piece in zip(rows, parts, pieces, strict=True)
            if part.is_scored and (scores := row.sequence.prompt_logprobs) is not None
        ]
        self._runner.score(chunks)
        return torch.stack([piece[-1] for piece in pieces])

    def _report(self, rows: list[PagedRow], logits: Tensor) -> None:
        """Sample a token of each sequence whose prompt is in the cache; drop those that end."""
        done = [number for number, row in enumerate(rows) if row.is_prefilled]
        if not done:
            return
        sequences = [rows[number].sequence for number in done]
        # Selecting all rows would copy them.
        own = logits if len(done) == len(rows) else logits[done]
        tokens = self._runner.sample(sequences, own)
        staying = set(self._events.on_tokens(sequences, tokens))
        self._leave([rows[number] for at, number in enumerate(done) if at not in staying])

    def _prefill_images(self, row: PagedRow) -> None:
        """Run a prompt with images alone through the padded pass, and copy its cache to blocks."""
        sequence = row.sequence
        ids, images = adapter_rows([sequence]), [sequence.images]
        mapping = LoRAMapping(ids.expand(len(row.tokens)), ids, is_prefill=len(row.tokens) > 1)
        try:
            logits = self._runner.forward([sequence], mapping, partial(self._read, row), images)
        except ForwardError as failure:
            self._give_way([row], failure)
            return
        row.advance(len(row.tokens))
        sequence.images = None
        self._score_whole(row, logits)
        self._report([row], logits[:, -1])

    def _score_whole(self, row: PagedRow, logits: Tensor) -> None:
        """Score the tokens of a prompt with images in parts; logits: [1, tokens, vocabulary]."""
        scores, first = row.sequence.prompt_logprobs, 0
        if not row.is_scored or scores is None:
            return
        for piece in torch.split(logits[0], self._runner.scored_tokens_max):
            self._runner.score([PromptChunk(scores, first, piece)])
            first += len(piece)

    def _read(self, row: PagedRow) -> Tensor:
        """Return the logits after the last token, or after every one, [1, tokens, vocabulary]."""
        padded, model = BatchKVCache([len(row.tokens)], [row.offset]), self._runner.model
        tokens, images = torch.tensor([row.tokens]), [row.sequence.images]
        if row.is_scored:
            logits = model.forward_all(tokens, padded, images)
        else:
            logits = model.forward(tokens, padded, images)[:, None]
        self._flat.cache.adopt(row.table, padded)
        return logits

    def _give_way(self, rows: list[PagedRow], failure: ForwardError) -> None:
        self._leave(rows)
        self._events.on_failure([row.sequence for row in rows], failure)

    def _leave(self, rows: Iterable[PagedRow]) -> None:
        leaving = {id(row) for row in rows}
        for row in rows:
            row.table.release()
        self._rows = [row for row in self._rows if id(row) not in leaving]
