"""A batch over blocks of tokens: prompt chunks and decode steps share one packed forward pass.

A sequence has blocks for the tokens that it has, and shares those of its beginning with every
sequence of the same adapter version that begins with the same tokens. If no block is left, the
last sequence in order waits again and is computed again later; those that can't be computed again
have all their blocks from the start, and leave them only while they are suspended.

Every step makes progress: the first sequence in order has its next token, or a chunk of its prompt,
unless it waits for those that can't be computed again, which then have theirs. None waits forever:
a sequence alone fits, because suspended ones hold no block against it, and one that has come in
loses its blocks to older and more urgent ones only.
"""

from bisect import insort
from collections.abc import Callable, Iterable
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.serving.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    NoFreeBlocks,
    Prefix,
    blocks_of,
)
from loradock.engine.serving.budget import StepBudget
from loradock.engine.serving.decoding import CapturedDecode
from loradock.engine.serving.forward import (
    BatchEvents,
    ForwardError,
    ForwardRunner,
    KVUse,
    PackedModel,
    Waiting,
    adapter_ids_of,
    decode_mapping,
)
from loradock.engine.serving.paged_cache import KVStates, PackedChunk
from loradock.engine.serving.sampling import PromptChunk
from loradock.engine.serving.sequence import Sequence


class PagedSequence:
    """A sequence of the batch and its blocks, of which it refers to at most `blocks_max` at once.

    `tokens`: those to be prefilled. `offset`: see `PackedChunk`. `prompt_length`: that of the
    sequence when it began. `keys`: of its full blocks that may be shared, without the last token;
    empty if none may. `is_scored`: whether the prompt's log-probabilities are needed; then it is
    computed whole, and others may reuse its blocks. `states`: the keys and values of its tokens
    while it has no blocks for them.
    """

    def __init__(self, sequence: Sequence, table: BlockTable, blocks_max: int) -> None:
        self.sequence: Final = sequence
        self.table: Final = table
        self.tokens: Final = sequence.tokens
        self.prompt_length: Final = sequence.prompt_length
        self.is_scored: Final = sequence.needs_prompt_logprobs
        images = sequence.images
        self.offset: Final = 0 if images is None else images.offset
        self.keys: Final = table.keys_of(self.tokens[:-1])
        self.states: KVStates | None = None
        self._blocks_max = blocks_max

    @property
    def is_prefilled(self) -> bool:
        """True if the prompt is in the cache."""
        return self.table.length >= len(self.tokens)

    @property
    def has_own_tokens(self) -> bool:
        """True if it has blocks or tokens beyond those that it reuses."""
        return not self.table.length == self.table.capacity == self.table.reused

    @property
    def left(self) -> int:
        """The tokens of the prompt that are not in the cache."""
        return len(self.tokens) - self.table.length

    def missing_blocks(self, begun: Prefix) -> int:
        """Return the blocks that it needs until its prompt is in the cache, or to its end.

        begun: the blocks that it has, or with which it can begin.
        """
        tokens = len(self.tokens) if self.sequence.can_resume else self.sequence.tokens_max
        return max(0, min(blocks_of(tokens) - begun.end, self._blocks_max - len(begun.blocks)))

    def reserve(self, tokens: int) -> bool:
        """Reserve blocks for `tokens` tokens in all; return False if there are too few."""
        if tokens <= self.table.capacity:
            return True
        # A window that advances through the memory stays adjacent if it has room for two.
        windows = self.table.start + 2 * self._blocks_max * BLOCK_TOKENS
        expected = min(self.sequence.tokens_max, windows)
        try:
            self.table.reserve(tokens, expected)
        except NoFreeBlocks:
            return False
        return True

    def advance(self, length: int) -> None:
        """Count the first `length` tokens as computed."""
        self.table.advance(length, lambda: self.sequence.tokens)

    def chunk(self, count: int) -> PackedChunk:
        """Return the next `count` tokens of the sequence, for which blocks are reserved."""
        table = self.table
        if self.is_prefilled:
            tokens, is_scored = [self.sequence.output.tokens[-1]], False
        else:
            tokens, is_scored = self.tokens[table.length : table.length + count], self.is_scored
        return PackedChunk(tokens, table, self.offset, is_scored, self.prompt_length)


class Paging(NamedTuple):
    """The most blocks that a sequence refers to at once, and whether sequences reuse blocks."""

    sequence_blocks: int
    shares_prefixes: bool


class PagedBatch:
    """Sequences over the blocks of `packed`.

    `lacks_memory`: whether the last call of `admit` left a sequence waiting for
    memory. `budget`: the tokens of a step. `captured`: the decode steps, if they are captured; then
    chunks of prompts are a second pass of the step.
    """

    def __init__(
        self,
        runner: ForwardRunner,
        packed: PackedModel,
        budget: StepBudget,
        events: BatchEvents,
        paging: Paging,
        captured: CapturedDecode | None = None,
    ) -> None:
        self.budget: Final = budget
        self.pool: Final = BlockPool(packed.cache.blocks)
        self.lacks_memory = False
        self._runner = runner
        self._packed = packed
        self._captured = captured
        self._events = events
        self._sequence_blocks = paging.sequence_blocks
        self._shares_prefixes = paging.shares_prefixes
        # In order: one loses its blocks to those before it.
        self._members: list[PagedSequence] = []
        # In the order in which they were suspended.
        self._suspended: dict[Sequence, PagedSequence] = {}

    @property
    def size(self) -> int:
        """The number of sequences in the batch."""
        return len(self._members)

    @property
    def sequences(self) -> list[Sequence]:
        """The sequences of the batch, in order."""
        return [one.sequence for one in self._members]

    @property
    def running(self) -> list[Sequence]:
        """The sequences that are decoded."""
        return [one.sequence for one in self._members if one.is_prefilled]

    @property
    def prefilling(self) -> list[Sequence]:
        """The sequences whose prompts are not yet in the cache."""
        return [one.sequence for one in self._members if not one.is_prefilled]

    @property
    def kv_use(self) -> KVUse:
        """The bytes of the blocks that sequences refer to, and of all blocks."""
        block_bytes, blocks = self._packed.cache.block_bytes, self.pool.blocks
        sizes = self.pool.referenced * block_bytes, blocks * block_bytes
        return KVUse(*sizes, "paged", blocks, BLOCK_TOKENS, self._shares_prefixes)

    def admit(self, waiting: Waiting) -> int:
        """Take sequences from the queue while there are blocks for their prompts; count them."""
        count, self.lacks_memory = 0, False
        while waiting.queue and len(self._members) < waiting.sequences_max:
            if waiting.one_by_one and (count or self.prefilling):
                break
            sequence = waiting.queue.first()
            member = self._suspended.get(sequence) or self._member_of(sequence)
            if not self._fits_after_dropping(member):
                self.lacks_memory = True
                break
            waiting.queue.pop()
            if waiting.is_resident(sequence):
                self._add(member)
                count += 1
            else:
                self.forget([sequence])
        return count

    def keep(self, stays: Callable[[Sequence], bool]) -> None:
        """Drop all sequences but those for which `stays` returns True; called once for each."""
        self._leave([one for one in self._members if not stays(one.sequence)])

    def suspend(self, sequences: list[Sequence]) -> None:
        """Take sequences out, with their blocks until other sequences need these.

        They continue when `admit` takes them from the queue, from their blocks, from a copy, or
        from their tokens. Those that can't be computed again are kept in any case.
        """
        leaving = [one for one in self._members if one.sequence in sequences]
        self._members = [one for one in self._members if one not in leaving]
        self._suspended |= {one.sequence: one for one in leaving}

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Free the blocks of suspended sequences."""
        for sequence in sequences:
            member = self._suspended.pop(sequence, None)
            if member is not None:
                member.table.release()

    def step(self) -> None:
        """Run one packed pass of all running sequences and of chunks of the prompts."""
        unread = next((one for one in self._members if one.sequence.images is not None), None)
        if unread is not None:
            self._prefill_images(unread)
        if self._runner.model.row_lengths.restarts:
            self._restart_longer()
        for one in [one for one in self._members if one.is_prefilled]:
            self._reserve_or_preempt(one, one.table.length + 1)
        parts = [(one, 1) for one in self._members if one.is_prefilled]
        if len(parts) < len(self._members):
            chunks = self._chunks(max(1, self.budget.prompt_tokens(len(parts))))
            # A chunk of the first prompt may have taken the blocks of a running sequence.
            parts = [(one, 1) for one in self._members if one.is_prefilled]
            parts += [(one, count) for one, count in chunks if one in self._members]
        # Sequences of one adapter are adjacent, so that kernels read and write them in place.
        parts.sort(key=lambda part: part[0].sequence.command.slot)
        if parts:
            self.budget.count(sum(count for _, count in parts))
            self._run(parts)

    def _member_of(self, sequence: Sequence) -> PagedSequence:
        root = self._runner.prefix_root(sequence) if self._shares_prefixes else None
        table = BlockTable(self.pool, root, self._packed.lookback)
        return PagedSequence(sequence, table, self._sequence_blocks)

    def _fits(self, member: PagedSequence, freed: int = 0) -> bool:
        """Return whether there are blocks for a sequence, after those promised to the others.

        freed: the blocks that are counted as available, although suspended sequences have them.
        """
        # A sequence that continues has its blocks, or its tokens.
        has_begun = member.table.length or member.table.blocks
        begun = member.table.prefix if has_begun else self._reusable(member)
        prefilling = [one for one in self._members if not one.is_prefilled]
        promised = sum(one.missing_blocks(one.table.prefix) for one in prefilling)
        # One more block for each sequence, so that the next steps preempt nothing.
        growth = len(self._members) + 1 if self._members else 0
        needed = member.missing_blocks(begun) + growth
        available = self.pool.available + freed - self.pool.cached_among(begun.blocks)
        return needed + promised <= available

    def _fits_after_dropping(self, member: PagedSequence) -> bool:
        """Return whether a sequence fits, after suspended ones have given up blocks for it.

        They keep their blocks if all of these would be too few.
        """
        if self._fits(member):
            return True
        used = {block for one in (*self._members, member) for block in one.table.blocks}
        if not self._fits(member, freed=self.pool.referenced - len(used)):
            return False
        while not self._fits(member):
            if not self._free_suspended(member):
                return False
        return True

    def _free_suspended(self, keep: PagedSequence | None = None) -> bool:
        """Free the blocks of the sequence that was suspended first; return whether one had blocks.

        It will be computed again, unless it can't be, or is spared: then it is copied to the host.
        """
        suspended = self._suspended.values()
        member = next((one for one in suspended if one.table.blocks and one is not keep), None)
        if member is None:
            return False
        if member.sequence.can_recompute and not self._spares(member, keep):
            self.forget([member.sequence])
            return True
        try:
            member.states = self._packed.cache.read(member.table)
        except (RuntimeError, MemoryError) as error:
            self._drop_kv(member, error)
        else:
            member.table.vacate()
        return True

    def _spares(self, member: PagedSequence, keep: PagedSequence | None) -> bool:
        """Return whether to keep what was computed of a prompt: only the first one's in order.

        Otherwise two prompts that take longer than a time slice could undo each other's forever.
        """
        if member.is_prefilled or member.table.length == member.table.reused:
            return False
        spared = [
            one.sequence
            for one in self._suspended.values()
            if one.states and one.sequence.can_recompute and one is not keep
        ]
        if any(one.order_key < member.sequence.order_key for one in spared):
            return False
        self.forget(spared)
        return True

    def _reusable(self, member: PagedSequence) -> Prefix:
        """Return the blocks of other sequences that a sequence can begin with.

        Images are read at once, so either all of them are in these blocks, or none is used. Of
        tokens that another sequence computed there are no logits.
        """
        if member.is_scored:
            return Prefix()
        found = member.table.find(member.keys)
        if member.sequence.images is not None:
            media, tokens = self._runner.model.media_tokens, member.tokens
            last = max((at for at, token in enumerate(tokens) if token in media), default=-1)
            if last < 0 or found.end * BLOCK_TOKENS <= last:
                return Prefix()
        return found

    def _add(self, member: PagedSequence) -> None:
        sequence, table = member.sequence, member.table
        self._suspended.pop(sequence, None)
        insort(self._members, member, key=lambda one: one.sequence.order_key)
        self._reuse(member)
        table.reserve(table.length if sequence.can_resume else sequence.tokens_max)
        if member.states is not None:
            try:
                self._packed.cache.write(table, member.states)
            except (RuntimeError, MemoryError) as error:
                self._drop_kv(member, error)
            member.states = None

    def _drop_kv(self, member: PagedSequence, error: Exception) -> None:
        """Let a sequence be computed again for whose copy memory lacks; fail it if it can't be.

        Raises the error if the engine can't continue.
        """
        failure = self._runner.failure_of(error, 1)
        is_suspended = member not in self._members
        self.forget([member.sequence])
        self._leave([member])
        if not member.sequence.can_recompute:
            self._events.on_failure([member.sequence], failure)
        elif not is_suspended:
            self._events.on_preemption([member.sequence])

    def _reuse(self, member: PagedSequence) -> None:
        """Begin a sequence that has computed nothing with the blocks of others."""
        if not member.has_own_tokens:
            found = self._reusable(member)
            if found.end > member.table.prefix.end:
                member.table.reuse(found, member.keys)
                member.sequence.record_reused(member.table.reused)
                member.sequence.images = None

    def _restart_longer(self) -> None:
        """Let sequences wait again whose first tokens have to be computed for another length."""
        changed = [one for one in self._members if one.sequence.prompt_length != one.prompt_length]
        self._leave(changed)
        if changed:
            self._events.on_preemption([one.sequence for one in changed])

    def _reserve_or_preempt(self, member: PagedSequence, tokens: int) -> None:
        """Reserve blocks for a sequence; preempt the last ones in order while there are too few.

        The sequence itself is preempted if no later one can be computed again.
        """
        while member in self._members and not member.reserve(tokens):
            if self._free_suspended():
                continue
            later = self._members[self._members.index(member) + 1 :]
            candidates = (one for one in reversed(later) if one.sequence.can_recompute)
            victim = next(candidates, member)
            self._leave([victim])
            self._events.on_preemption([victim.sequence])

    def _chunks(self, tokens: int) -> list[tuple[PagedSequence, int]]:
        """Divide `tokens` among the prompts: half for the first, then the shortest ones first.

        The first one in order receives what the others leave, and blocks of sequences after it.
        """
        eligible = self._not_computed_by_others()
        if not eligible:
            return []
        oldest, *others = eligible
        others.sort(key=lambda one: one.left)
        counts = dict.fromkeys(map(id, eligible), 0)
        first = -(-tokens // 2) if others else tokens
        scored = self._runner.scored_tokens_max
        for one, share in ((oldest, first), *((one, tokens) for one in others), (oldest, tokens)):
            most = min(share, scored) if one.is_scored else share
            count = min(one.left - counts[id(one)], most, tokens)
            end = one.table.length + counts[id(one)] + count
            if one is oldest:
                self._reserve_or_preempt(one, end)
            elif one in self._members and not one.reserve(end):
                continue
            if one in self._members:
                tokens -= count
                scored -= count if one.is_scored else 0
                counts[id(one)] += count
        return [(one, counts[id(one)]) for one in eligible if counts[id(one)]]

    def _not_computed_by_others(self) -> list[PagedSequence]:
        """Return the sequences with a prompt, but none whose next block another one computes."""
        claimed: set[bytes] = set()
        eligible = []
        for one in self._members:
            if one.is_prefilled or one.sequence.images is not None:
                continue
            self._reuse(one)
            begun = one.table.length // BLOCK_TOKENS
            keys = one.keys[begun:]
            is_new = one.table.length == one.table.reused and not one.is_scored
            if is_new and keys and keys[0] in claimed:
                continue
            claimed.update(keys)
            eligible.append(one)
        return eligible

    def _run(self, parts: list[tuple[PagedSequence, int]]) -> None:
        """Run the passes of a step, and report a token of each sequence without a prompt."""
        members: list[PagedSequence] = []
        logits: list[Tensor] = []
        for own in self._passes(parts):
            sequences = [one for one, _ in own]
            try:
                logits.append(self._run_pass(own))
            except ForwardError as failure:
                self._fail_sequences(sequences, failure)
            else:
                members += sequences
        if members:
            self._report(members, torch.cat(logits) if len(logits) > 1 else logits[0])

    def _passes(
        self, parts: list[tuple[PagedSequence, int]]
    ) -> list[list[tuple[PagedSequence, int]]]:
        """Return one pass, or decode steps and chunks of prompts apart if the former are captured.

        The host launches the chunks while the device computes the decode steps.
        """
        if self._captured is None:
            return [parts]
        decodes = [part for part in parts if part[0].is_prefilled]
        chunks = [part for part in parts if not part[0].is_prefilled]
        return [own for own in (decodes, chunks) if own]

    def _run_pass(self, parts: list[tuple[PagedSequence, int]]) -> Tensor:
        """Run one pass and count its tokens; return the logits of the last ones, [parts, ...].

        Raises `ForwardError`.
        """
        members = [one for one, _ in parts]
        sequences = [one.sequence for one in members]
        chunks = [one.chunk(count) for one, count in parts]
        if self._captured is not None and members[0].is_prefilled:
            rows = self._captured.padded_rows(len(chunks))
            mapping = decode_mapping(sequences, rows)
            forward = partial(self._captured.run, chunks)
        else:
            mapping = _mapping_of(sequences, chunks)
            forward = partial(self._packed.forward, chunks)
        logits = self._runner.forward(sequences, mapping, forward)
        for one, chunk in zip(members, chunks, strict=True):
            one.advance(chunk.end)
        return self._score(members, chunks, logits)

    def _score(
        self, members: list[PagedSequence], chunks: list[PackedChunk], logits: Tensor
    ) -> Tensor:
        """Score the tokens of prompts; return the logits of the last ones, [chunks, vocabulary].

        logits: [logits, vocabulary], of the chunks one after another.
        """
        if not any(chunk.is_scored for chunk in chunks):
            return logits
        parts = torch.split(logits, [chunk.logits for chunk in chunks])
        scored = [
            PromptChunk(scores, one.table.length - chunk.logits, part)
            for one, chunk, part in zip(members, chunks, parts, strict=True)
            if chunk.is_scored and (scores := one.sequence.prompt_logprobs) is not None
        ]
        self._runner.score(scored)
        return torch.stack([part[-1] for part in parts])

    def _report(self, members: list[PagedSequence], logits: Tensor) -> None:
        """Sample a token of each sequence whose prompt is in the cache; drop those that end."""
        done = [number for number, one in enumerate(members) if one.is_prefilled]
        if not done:
            return
        sequences = [members[number].sequence for number in done]
        # Selecting all rows would copy them.
        own = logits if len(done) == len(members) else logits[done]
        tokens = self._runner.sample(sequences, own)
        staying = set(self._events.on_tokens(sequences, tokens))
        self._leave([members[number] for at, number in enumerate(done) if at not in staying])

    def _prefill_images(self, member: PagedSequence) -> None:
        """Run a prompt with images alone through the padded pass, and copy its cache to blocks."""
        sequence, count = member.sequence, len(member.tokens)
        ids, images = adapter_ids_of([sequence]), [sequence.images]
        mapping = LoRAMapping(ids.expand(count), ids, is_prefill=count > 1)
        try:
            logits = self._runner.forward([sequence], mapping, partial(self._read, member), images)
        except ForwardError as failure:
            self._fail_sequences([member], failure)
            return
        member.advance(count)
        sequence.images = None
        self._score_whole(member, logits)
        self._report([member], logits[:, -1])

    def _score_whole(self, member: PagedSequence, logits: Tensor) -> None:
        """Score the tokens of a prompt with images in parts; logits: [1, tokens, vocabulary]."""
        scores, first = member.sequence.prompt_logprobs, 0
        if not member.is_scored or scores is None:
            return
        for part in torch.split(logits[0], self._runner.scored_tokens_max):
            self._runner.score([PromptChunk(scores, first, part)])
            first += len(part)

    def _read(self, member: PagedSequence) -> Tensor:
        """Return the logits after the last token, or after every one, [1, tokens, vocabulary]."""
        padded, model = BatchKVCache([len(member.tokens)], [member.offset]), self._runner.model
        tokens, images = torch.tensor([member.tokens]), [member.sequence.images]
        if member.is_scored:
            logits = model.forward_all(tokens, padded, images)
        else:
            logits = model.forward(tokens, padded, images)[:, None]
        self._packed.cache.adopt(member.table, padded)
        return logits

    def _fail_sequences(self, members: list[PagedSequence], failure: ForwardError) -> None:
        self._leave(members)
        self._events.on_failure([one.sequence for one in members], failure)

    def _leave(self, members: list[PagedSequence]) -> None:
        """Take sequences out of the batch, and release their blocks."""
        if members:
            leaving = set(map(id, members))
            for one in members:
                one.table.release()
            self._members = [one for one in self._members if id(one) not in leaving]


def _mapping_of(sequences: list[Sequence], chunks: list[PackedChunk]) -> LoRAMapping:
    """Map the tokens of chunks, and those with logits, to the adapters of their sequences."""
    ids = adapter_ids_of(sequences)
    counts = torch.tensor([len(chunk.tokens) for chunk in chunks])
    kept = torch.tensor([chunk.logits for chunk in chunks])
    return LoRAMapping(
        ids.repeat_interleave(counts),
        ids.repeat_interleave(kept),
        is_prefill=bool((counts > 1).any()),
    )
