"""The memory of blocks, one pair of buffers per layer, and what one forward pass does with it.

Buffers are [heads, tokens, head_dim], so that adjacent blocks of a sequence are read in place, as
one view, and what one head attends to is contiguous. A sequence reads its own tokens only, never
the rest of a block, so nothing that another one has left can reach it.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.block_attention import (
    BlockAttention,
    BlockOperands,
    WriteTokens,
    write_tokens,
)
from loradock.engine.layout import next_power_of_two
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.models.library.names import Cache, CacheLayerMixin
from loradock.engine.serving.blocks import BLOCK_TOKENS, BlockTable, blocks_of, common_blocks

MaskFunction = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Of `transformers`: indices of row, head, query and key, which broadcast -> attends."""

_NO_ROW: Final = -1

KVStates = Sequence[tuple[Tensor, Tensor]]
"""The keys and values of a sequence's tokens in each layer, [heads, tokens, head_dim]."""


class PackedChunk(NamedTuple):
    """A sequence's part of a forward pass: its new tokens, after the `table.length` tokens before.

    `offset`: the position of a token minus its index in the sequence; not 0 after images.
    `is_scored`: whether the logits after each of the tokens are needed, and not only after the
    last one. `prompt`: the number of tokens of the prompt, of which these may be a part.
    """

    tokens: Sequence[int]
    table: BlockTable
    offset: int = 0
    is_scored: bool = False
    prompt: int = 0

    @property
    def end(self) -> int:
        """The number of the sequence's tokens after the pass."""
        return self.table.length + len(self.tokens)

    @property
    def logits(self) -> int:
        """The number of the tokens whose logits are needed."""
        return len(self.tokens) if self.is_scored else 1


@dataclass(frozen=True)
class SequenceSpan:
    """A sequence's place: queries `begin` to `end`, and tokens `start` to `length` in memory.

    `blocks`: those of these tokens. `first_token`: where the first one is in the memory. `numbers`:
    the blocks, [blocks] int64 on the device, if they are not adjacent.
    """

    begin: int
    end: int
    start: int
    length: int
    blocks: list[int]
    first_token: int
    numbers: Tensor | None

    @property
    def count(self) -> int:
        """The number of queries."""
        return self.end - self.begin

    @property
    def held(self) -> int:
        """The number of tokens that are in memory."""
        return self.length - self.start


class DecodeGroup(NamedTuple):
    """Sequences with one query each and similar numbers of tokens, attended in one call.

    Tensors are on the device, int64, with a row per sequence. queries: [rows], of the pass. starts,
    lengths: [rows], of the tokens in memory. tokens: [rows, width], the place of each of them in
    the memory; after a sequence's end its first one, which is masked. released_max: the largest of
    `starts`.
    """

    queries: Tensor
    starts: Tensor
    lengths: Tensor
    tokens: Tensor
    released_max: int


WIDTH_STEPS: Final = 4
"""The widths of groups between a power of two and the next one."""


def decode_groups(spans: Sequence[SequenceSpan], device: torch.device) -> list[DecodeGroup]:
    """Group sequences of one query each by their tokens in memory, rounded up to few widths.

    A library may plan a call for each shape of its operands, which takes long.
    """
    by_width: dict[int, list[SequenceSpan]] = {}
    for span in spans:
        by_width.setdefault(_width_of(span.held), []).append(span)
    return [_group_of(group, width, device) for width, group in by_width.items()]


def _width_of(tokens: int) -> int:
    """Return tokens rounded up to whole blocks and to a few widths per power of two."""
    step = max(BLOCK_TOKENS, next_power_of_two(tokens) // 2 // WIDTH_STEPS)
    return -(-tokens // step) * step


def _group_of(spans: Sequence[SequenceSpan], width: int, device: torch.device) -> DecodeGroup:
    blocks = torch.zeros(len(spans), blocks_of(width), dtype=torch.int64)
    for number, span in enumerate(spans):
        blocks[number, : len(span.blocks)] = torch.tensor(span.blocks)
    places = [(span.begin, span.start, span.length) for span in spans]
    queries, starts, lengths = torch.tensor(places).unbind(1)
    inside = torch.arange(BLOCK_TOKENS)
    tokens = (blocks[:, :, None] * BLOCK_TOKENS + inside).flatten(1)[:, :width]
    tokens = tokens.where(torch.arange(width) < (lengths - starts)[:, None], tokens[:, :1])
    released_max = int(starts.max())
    queries, starts, lengths, tokens = (
        one.to(device) for one in (queries, starts, lengths, tokens)
    )
    return DecodeGroup(queries, starts, lengths, tokens, released_max)


class PackedStep:
    """One forward pass: where its new tokens are written, and the layers that have written them.

    `written`: [tokens], places in the memory, int64 on the device. `write`: the operation that
    writes them. `mask_functions`: those under which a layer has attended.
    """

    def __init__(self, written: Tensor, write: WriteTokens = write_tokens) -> None:
        self.written: Final = written
        self.write: Final = write
        self.mask_functions: set[MaskFunction] = set()
        self._layers: dict[int, PagedLayer] = {}
        # Keeps the identities of `_layers` unique during the pass.
        self._keys: list[Tensor] = []

    def add_layer(self, keys: Tensor, layer: "PagedLayer") -> None:
        """Record that a layer was given these keys."""
        self._layers[id(keys)] = layer
        self._keys.append(keys)

    def layer_of(self, keys: Tensor) -> "PagedLayer":
        """Return the layer that was given these keys; raises `LookupError` for other tensors."""
        return self._layers[id(keys)]


class GatheredStep(PackedStep):
    """A pass whose sequences are attended by PyTorch's functions, over views or copies of blocks.

    `spans`: of the sequences that are attended one by one; `groups`: the others. `groups_decodes`:
    whether sequences of one token are attended in groups, which is faster if each call takes time
    to launch, and slower on a CPU, which reads them in place.
    """

    def __init__(
        self, chunks: Sequence[PackedChunk], written: Tensor, *, groups_decodes: bool = False
    ) -> None:
        super().__init__(written)
        device, begin = written.device, 0
        self.spans: list[SequenceSpan] = []
        for chunk in chunks:
            table, end = chunk.table, begin + len(chunk.tokens)
            used = table.blocks[: blocks_of(chunk.end - table.start)]
            is_run = used == [*range(used[0], used[0] + len(used))]
            numbers = None if is_run else torch.tensor(used, device=device)
            self.spans.append(
                SequenceSpan(
                    begin, end, table.start, chunk.end, used, used[0] * BLOCK_TOKENS, numbers
                )
            )
            begin = end
        self.groups: list[DecodeGroup] = []
        if groups_decodes:
            self.groups = decode_groups([span for span in self.spans if span.count == 1], device)
            self.spans = [span for span in self.spans if span.count > 1]


class KernelStep(PackedStep):
    """A pass whose sequences are attended by a kernel, over `blocks`.

    `lookback`: the tokens before its own that a sequence has blocks for in any case.
    """

    def __init__(
        self, written: Tensor, kernel: BlockAttention, blocks: BlockOperands, lookback: int
    ) -> None:
        super().__init__(written, kernel.write)
        self.kernel: Final = kernel
        self.blocks: Final = blocks
        self.lookback: Final = lookback


def places_of(chunks: Sequence[PackedChunk]) -> list[int]:
    """Return the place in the memory of each new token of the chunks."""
    places: list[int] = []
    for chunk in chunks:
        table, token = chunk.table, chunk.table.length
        while token < chunk.end:
            first = table.place(token)
            count = min(BLOCK_TOKENS - first % BLOCK_TOKENS, chunk.end - token)
            places += range(first, first + count)
            token += count
    return places


def find_shared(tables: Sequence[BlockTable], rows_max: int, tokens_min: int) -> list[list[int]]:
    """Return the rows of `BlockOperands.shared` for a decode step of these sequences.

    rows_max: the most rows of a list. Lists are made so that few tokens are read; none is made that
    saves less than `tokens_min` tokens.
    """
    found = [nothing_shared(rows_max) for _ in tables]
    begun = defaultdict[int, list[int]](list)
    for row, table in enumerate(tables):
        if table.blocks and not table.released:
            begun[table.blocks[0]].append(row)
    for rows in begun.values():
        if len(rows) < 2:
            continue
        rows.sort(key=lambda row: tables[row].blocks)
        for group, blocks in _shared_groups(rows, tables, rows_max):
            if (len(group) - 1) * blocks * BLOCK_TOKENS < max(1, tokens_min):
                continue
            found[group[0]][1 : 1 + len(group)] = group
            for row in group:
                found[row][0] = blocks * BLOCK_TOKENS
    return found


def nothing_shared(rows_max: int) -> list[int]:
    """Return the row of `BlockOperands.shared` of a sequence that shares nothing."""
    return [0, *[_NO_ROW] * rows_max] if rows_max else []


def _shared_groups(
    rows: Sequence[int], tables: Sequence[BlockTable], rows_max: int
) -> Iterator[tuple[list[int], int]]:
    """Yield groups of sorted rows, and how many blocks the rows of each have in common.

    A row joins the last group if more is saved then, although fewer blocks may be common to all.
    """
    group, common = [rows[0]], len(tables[rows[0]].blocks)
    for row in rows[1:]:
        same = min(common, common_blocks(tables[group[0]].blocks, tables[row].blocks))
        if len(group) < rows_max and len(group) * same > (len(group) - 1) * common:
            group.append(row)
            common = same
        else:
            yield group, common
            group, common = [row], len(tables[row].blocks)
    yield group, common


class DeviceBlockTable:
    """The blocks of a batch's sequences as one table on the device, to which blocks are appended.

    data: [rows + 1, width] int64; entry [row, n] is the block of a sequence's tokens from
    `n * BLOCK_TOKENS` on. A sequence has a row from its first pass on, until others need it; the
    last row is that of dummies, whose only block is `dummy_block`.
    """

    def __init__(self, rows: int, width: int, dummy_block: int, device: torch.device) -> None:
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.data: Final = torch.zeros((rows + 1, width), dtype=torch.int64, device=device)
            self.data[rows, 0] = dummy_block
        self.dummy_row: Final = rows
        self._free = list(range(rows))
        # The least recently used one comes first.
        self._rows: OrderedDict[BlockTable, int] = OrderedDict()
        # What `shared` returned for these tables; none if their first blocks may have changed.
        self._shared_by: Sequence[BlockTable] = ()
        self._shared: list[list[int]] = []

    def update(self, tables: Sequence[BlockTable]) -> tuple[list[int], list[int], list[int]]:
        """Return each table's row, and what is not in the data yet: places in it, and blocks.

        The caller writes these before the tables are read. Tables must be fewer than the rows.
        """
        rows: list[int] = []
        places: list[int] = []
        blocks: list[int] = []
        for table in tables:
            if table not in self._rows:
                self._rows[table] = self._free.pop() if self._free else self._take()
                table.appended = 0
            self._rows.move_to_end(table)
            if not table.appended:
                self._shared_by = ()
            row = self._rows[table]
            rows.append(row)
            first, end = max(table.appended, table.released), table.prefix.end
            if first < end:
                places += range(row * self.data.shape[1] + first, row * self.data.shape[1] + end)
                blocks += table.blocks[first - table.released :]
                table.appended = end
        return rows, places, blocks

    def shared(
        self, tables: Sequence[BlockTable], rows_max: int, tokens_min: int
    ) -> list[list[int]]:
        """Return `find_shared` of tables, which `update` has seen as they are."""
        if self._shared_by != tables:
            self._shared_by = tables
            self._shared = find_shared(tables, rows_max, tokens_min)
        return self._shared

    def write(self, places: Tensor, blocks: Tensor) -> None:
        """Write blocks to their places; both int64 on the device."""
        self.data.view(-1).index_copy_(0, places, blocks)

    def _take(self) -> int:
        _, row = self._rows.popitem(last=False)
        return row


class PagedKVCache:
    """The memory of `blocks` blocks in every layer; buffers are made by the first forward pass.

    One more block, after them, is that of dummies. `cache` is what the model is called with, `step`
    the forward pass that it is called for.
    """

    def __init__(self, blocks: int) -> None:
        self.blocks: Final = blocks
        self.step: PackedStep | None = None
        self.cache = Cache(layer_class_to_replicate=partial(PagedLayer, self))

    @property
    def layers(self) -> list["PagedLayer"]:
        """The layers that hold keys and values."""
        return [layer for layer in self.cache.layers if layer.is_initialized]

    @property
    def block_bytes(self) -> int:
        """The bytes of one block in all layers, known after the first forward pass."""
        return sum(layer.token_bytes for layer in self.layers) * BLOCK_TOKENS

    def adopt(self, table: BlockTable, padded: BatchKVCache) -> None:
        """Copy the keys and values of a padded batch of one row into the blocks of `table`."""
        pairs = [(layer.keys, layer.values) for layer in padded.layers]
        self.write(
            table,
            [
                (keys[0], values[0])
                for keys, values in pairs
                if keys is not None and values is not None
            ],
        )

    def read(self, table: BlockTable) -> KVStates:
        """Return copies on the host of the tokens that are in the blocks of `table`."""
        places = self._places(table, table.length - table.start)
        return [
            (layer.keys.index_select(1, places).cpu(), layer.values.index_select(1, places).cpu())
            for layer in self.layers
        ]

    def write(self, table: BlockTable, states: KVStates) -> None:
        """Write tokens from `table.start` on into the blocks of `table`."""
        places = self._places(table, states[0][0].shape[1])
        for layer, (keys, values) in zip(self.layers, states, strict=True):
            layer.keys.index_copy_(1, places, keys.to(places.device))
            layer.values.index_copy_(1, places, values.to(places.device))

    def _places(self, table: BlockTable, count: int) -> Tensor:
        """Return the places of the first `count` tokens of a table in the memory, [count]."""
        tokens = range(table.start, table.start + count)
        places = torch.tensor([*map(table.place, tokens)], dtype=torch.int64)
        return places.to(self.layers[0].keys.device)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's keys and values: two buffers of [heads, blocks * BLOCK_TOKENS, head_dim]."""

    is_sliding = False

    def __init__(self, owner: PagedKVCache) -> None:
        super().__init__()
        self._owner = owner

    @property
    def token_bytes(self) -> int:
        """The bytes of one token's keys and values."""
        return (self.keys.nbytes + self.values.nbytes) // self.keys.shape[1]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate for all blocks; a CPU provides the memory only when it is written."""
        tokens = (self._owner.blocks + 1) * BLOCK_TOKENS
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self.keys, self.values = (
                states.new_empty((states.shape[1], tokens, states.shape[3]))
                for states in (key_states, value_states)
            )
        self.is_initialized = True

    def update(
        self, key_states: Tensor, value_states: Tensor, *_: object, **__: object
    ) -> tuple[Tensor, Tensor]:
        """Write one pass's states, [1, heads, tokens, head_dim], and return them unchanged.

        The attention function reads the others, for each sequence separately.
        """
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        step = self._owner.step
        if step is None:
            raise RuntimeError("a paged cache is used outside of a packed forward pass")
        step.write(self.keys, self.values, key_states[0], value_states[0], step.written)
        step.add_layer(key_states, self)
        return key_states, value_states

    def read(self, span: SequenceSpan, first: int) -> tuple[Tensor, Tensor]:
        """Return a sequence's keys and values, [1, heads, tokens, head_dim].

        first: of its tokens in memory, the first one to be read.
        """
        numbers = None if span.numbers is None else span.numbers[first // BLOCK_TOKENS :]
        return self.read_tokens(span.first_token + first, span.held - first, numbers)

    def read_tokens(self, start: int, count: int, copied: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return `count` tokens from `start` in the memory, [1, heads, count, head_dim].

        copied: the blocks that they are in, in the first of which is `start`, if these are not
        adjacent.
        """
        keys, values = self.keys, self.values
        if copied is not None:
            keys, values = (
                buffer.view(len(buffer), -1, BLOCK_TOKENS, buffer.shape[2])
                .index_select(1, copied)
                .flatten(1, 2)
                for buffer in (keys, values)
            )
            start %= BLOCK_TOKENS
        return keys.narrow(1, start, count)[None], values.narrow(1, start, count)[None]

    def read_group(self, group: DecodeGroup) -> tuple[Tensor, Tensor]:
        """Return copies of a group's keys and values, [rows, heads, width, head_dim]."""
        keys, values = (
            buffer.index_select(1, group.tokens.flatten()).view(
                len(buffer), *group.tokens.shape, buffer.shape[2]
            )
            for buffer in (self.keys, self.values)
        )
        return keys.transpose(0, 1), values.transpose(0, 1)

    def get_seq_length(self) -> int:
        """Return 0: positions and masks are given for each sequence."""
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return the pass's own tokens: the attention function knows those of each sequence."""
        return query_length, 0

    def get_max_length(self) -> int:
        """Return -1: the length has no bound."""
        return -1
