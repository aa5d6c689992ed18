"""Prompts that are prefilled together, in chunks of columns, with a KV cache of their own.

Rows are padded on the left, so a chunk holds the last tokens of short rows and the first ones of
long rows. Rows with images are prefilled in one chunk, because images are read at once.
"""

from collections.abc import Sequence as SequenceOf
from copy import copy
from typing import Final

import torch
from torch import Tensor

from loradock.engine.inference.sequence import Sequence
from loradock.engine.models.caches.kv_cache import BatchKVCache
from loradock.engine.models.probes.batching import MakeCache
from loradock.engine.models.vision.image_inputs import ImageInputs, position_offsets
from loradock.engine.punica.mapping import LoRAMapping
from loradock.engine.sampling.logprobs import PromptChunk

WIDTH_PADDED_MAX: Final = 32
"""Prompts up to this length are prefilled together however different they are."""

PADDING_MAX: Final = 1.5
"""Longer ones only while the columns, padding included, are at most this many times the tokens."""


def may_join(lengths: SequenceOf[int], length: int) -> bool:
    """Whether a prompt of `length` tokens may be prefilled with prompts of `lengths`."""
    width = max(*lengths, length) if lengths else length
    cells, tokens = width * (len(lengths) + 1), sum(lengths) + length
    return width <= WIDTH_PADDED_MAX or cells <= PADDING_MAX * tokens


class PrefillBatch:
    """The prompts of some sequences, of which the columns before `done` are in `cache`."""

    def __init__(
        self, sequences: SequenceOf[Sequence], new_cache: MakeCache = BatchKVCache
    ) -> None:
        self.sequences = list(sequences)
        self.images: list[ImageInputs | None] = [one.images for one in sequences]
        self._totals = [len(one.tokens) for one in sequences]
        self._width = max(self._totals)
        self._input_ids = torch.tensor(
            [[0] * (self._width - len(one.tokens)) + one.tokens for one in sequences]
        )
        self._done = 0
        self.cache = new_cache([0] * len(self.sequences), position_offsets(self.images))
        self.cache.prompt_lengths = [one.prompt_length for one in sequences]

    def __len__(self) -> int:
        """Return the number of rows."""
        return len(self.sequences)

    @property
    def is_done(self) -> bool:
        """Whether all columns are in the cache."""
        return self._done == self._width

    def next_chunk(self, tokens_max: int) -> Tensor:
        """Return the next columns, [rows, columns] int64, and count them in the cache's lengths.

        `tokens_max`: the most tokens, padding included, but at least one column.
        """
        columns = max(1, tokens_max // len(self))
        if any(self.images):
            columns = self._width
        start, self._done = self._done, min(self._width, self._done + columns)
        left = self._width - self._done
        self.cache.lengths = [max(0, total - left) for total in self._totals]
        return self._input_ids[:, start : self._done]

    def mapping(self, chunk: Tensor) -> LoRAMapping:
        """Map each row's own tokens of the last chunk to its adapter, and padding to the base.

        A chunk of one column has one adapter per row, for padding too, which nothing reads.
        """
        ids = torch.tensor([one.command.adapter_id for one in self.sequences])
        columns = chunk.shape[1]
        if columns == 1:
            return LoRAMapping(ids, ids)
        own = torch.tensor(self.cache.lengths)[:, None]
        is_own = torch.arange(columns) >= columns - own
        return LoRAMapping((is_own * ids[:, None]).flatten(), ids, is_prefill=True)

    @property
    def needs_prompt_logprobs(self) -> bool:
        """Whether the logits of all tokens are needed."""
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
        """Remove a row, and return it in a batch of its own; None if none of it is in the cache."""
        total = self._totals[row]
        done = total - (self._width - self._done)
        others = [other for other in range(len(self)) if other != row]
        if done <= 0:
            self.keep(others)
            return None
        taken = copy(self)
        taken._input_ids = self._input_ids[:, self._width - total :]
        taken._width, taken._done = total, done
        taken._select([row])
        taken.cache = self.cache.take(row)
        self._select(others)
        return taken

    def _select(self, rows: SequenceOf[int]) -> None:
        self.sequences = [self.sequences[row] for row in rows]
        self.images = [self.images[row] for row in rows]
        self._totals = [self._totals[row] for row in rows]
        self._input_ids = self._input_ids[list(rows)]
        if rows:
            self._done = max(self._done, self._width - max(self._totals))
