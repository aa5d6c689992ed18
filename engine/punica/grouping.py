"""Grouping of a batch's rows by slot, and the copy of the groups to the device.

The tables are built by vectorised host code and copied to the device by one asynchronous copy. The
address of a table and the size of a launch over it follow from `GroupBounds` alone, so a captured
graph can be replayed for every batch with the same bounds.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.kernels.operands import TILE_ROWS, GroupBounds, Groups, SlotSpan, Tiles
from loradock.engine.layout import next_power_of_two

INITIAL_TOKENS: Final = 8192
"""The rows for which the device's tables have capacity before they first grow."""


class Batch(NamedTuple):
    """A batch's two mappings on the device: by token and by sampled row."""

    tokens: Groups
    prompts: Groups


class Grouper:
    """Builds a batch's groups on `device`; one per Punica wrapper.

    On CUDA the tables are stored in one buffer that each batch overwrites, so the groups that an
    earlier call returned then have the contents of the latest batch. The copy is ordered after the
    kernels that read the previous batch. Its source is one of two page-locked buffers, so the host
    fills one while the other's copy may be in flight. On a CPU every call returns new tensors.
    """

    def __init__(
        self, device: torch.device, rank_max: int, specialize_active: bool = False
    ) -> None:
        self._device = device
        self._rank_max = rank_max
        self._specialize_active = specialize_active
        self._buffer = DeviceBuffer(device, 6 * INITIAL_TOKENS) if device.type == "cuda" else None

    @property
    def buffer_identity(self) -> object:
        """An object that identifies the device's tables; replaced when they are reallocated."""
        return None if self._buffer is None else self._buffer.identity

    def bounds_of(self, tokens: int, adapters: int, max_loras: int) -> GroupBounds:
        """Return the bounds of a batch with this number of rows and of adapters among them."""
        groups = next_power_of_two(adapters) if self._specialize_active else max_loras
        rounded = next_power_of_two(tokens)
        return GroupBounds(rounded, min(groups, rounded, max_loras), self._rank_max)

    def group(self, token_slots: Tensor, prompt_slots: Tensor, max_loras: int) -> Batch:
        """Return both mappings' groups; slots: [rows] int64 on the host, -1 for the base model."""
        of_tokens = self._sort(token_slots, max_loras)
        # If every row is sampled, both mappings are equal.
        are_equal = torch.equal(token_slots, prompt_slots)
        tables = [of_tokens, of_tokens if are_equal else self._sort(prompt_slots, max_loras)]
        sizes = [table.words for table in tables]
        words = sum(sizes)
        host = (
            torch.zeros(words, dtype=torch.int64)
            if self._buffer is None
            else self._buffer.next_host_buffer(words)
        )
        for table, part in zip(tables, torch.split(host, sizes), strict=True):
            table.write(part)
        device = host if self._buffer is None else self._buffer.send(words)
        tokens, prompts = (
            table.read(part) for table, part in zip(tables, torch.split(device, sizes), strict=True)
        )
        return Batch(tokens, prompts)

    def group_once(self, slots: Tensor, max_loras: int) -> Groups:
        """Return the groups of other rows of the same batch, in separate memory.

        slots: [rows] int64 on the host, -1 for the base model.
        """
        tables = self._sort(slots, max_loras)
        host = torch.zeros(tables.words, dtype=torch.int64)
        tables.write(host)
        return tables.read(host.to(self._device))

    def _sort(self, slots: Tensor, max_loras: int) -> "_BatchTables":
        """Sort the rows with an adapter stably by slot."""
        sorted_slots, order = torch.sort(slots, stable=True)
        base_rows = int((slots < 0).sum())
        active, counts = torch.unique_consecutive(sorted_slots[base_rows:], return_counts=True)
        bounds = self.bounds_of(len(slots), len(active), max_loras)
        return _BatchTables(slots, order[base_rows:], active, counts, bounds)


class _BatchTables:
    """One mapping's tables on the host, and their layout in a buffer.

    The order: the tiles of each size; the rows; each token's slot. Every table has the capacity of
    the bounds, with zeros after its end, and starts at a multiple of 16 bytes, for which kernels
    are compiled.
    """

    def __init__(
        self, token_slots: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, bounds: GroupBounds
    ) -> None:
        self._token_slots, self._rows, self._bounds = token_slots, rows, bounds
        groups = slots, counts, torch.cumsum(counts, 0) - counts
        self._spans = _spans(*groups)
        tiles = [_divide_groups(*groups, block_m).flatten() for block_m in TILE_ROWS]
        self._tables = (*tiles, rows, token_slots)
        self._tile_words = [3 * bounds.max_tiles(block_m) for block_m in TILE_ROWS]
        sizes = [*self._tile_words, bounds.tokens, bounds.tokens]
        self._sizes = [size + size % 2 for size in sizes]
        self.words = sum(self._sizes)

    def write(self, buffer: Tensor) -> None:
        """Fill `buffer` [words] int64, which is all zeros."""
        for part, table in zip(torch.split(buffer, self._sizes), self._tables, strict=True):
            part[: len(table)] = table

    def read(self, buffer: Tensor) -> Groups:
        """Return views of the tables in `buffer`, which `write` filled, or a copy of it."""
        *tiles, rows, token_slots = torch.split(buffer, self._sizes)
        tokens = len(self._token_slots)
        return Groups(
            rows=rows[: len(self._rows)],
            spans=self._spans,
            tokens=tokens,
            token_slots=token_slots[:tokens],
            tiles=tuple(
                Tiles(block_m, table[:words].view(-1, 3))
                for block_m, words, table in zip(TILE_ROWS, self._tile_words, tiles, strict=True)
            ),
            bounds=self._bounds,
        )


class DeviceBuffer:
    """One buffer on the device, and two page-locked ones that are copied to it alternately."""

    def __init__(self, device: torch.device, words: int) -> None:
        self._device = device
        self._current = 0
        self._allocate(words)

    def next_host_buffer(self, words: int) -> Tensor:
        """Return the next page-locked buffer, zeroed; waits while its last copy is in flight."""
        if words > len(self._on_device):
            # Copies into the old buffer must end before its memory is reused.
            torch.cuda.current_stream(self._device).synchronize()
            self._allocate(next_power_of_two(words))
        self._current = 1 - self._current
        self._copied[self._current].synchronize()
        return self._on_host[self._current][:words].zero_()

    def send(self, words: int) -> Tensor:
        """Start the copy of the current host buffer, and return its target on the device."""
        target = self._on_device[:words]
        target.copy_(self._on_host[self._current][:words], non_blocking=True)
        self._copied[self._current].record(torch.cuda.current_stream(self._device))
        return target

    def _allocate(self, words: int) -> None:
        self.identity = object()
        # Tensors created in inference mode can't be written outside of it.
        with torch.inference_mode(False):
            self._on_device = torch.zeros(words, dtype=torch.int64, device=self._device)
            self._on_host = [
                torch.zeros(words, dtype=torch.int64, pin_memory=True) for _ in range(2)
            ]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]


def _divide_groups(slots: Tensor, counts: Tensor, starts: Tensor, block_m: int) -> Tensor:
    """Divide every group into tiles of at most `block_m` rows: [tiles, 3], slot, first, count."""
    per_group = (counts + block_m - 1) // block_m
    group = torch.repeat_interleave(torch.arange(len(slots)), per_group)
    before = (torch.cumsum(per_group, 0) - per_group)[group]
    skipped = (torch.arange(len(group)) - before) * block_m
    rows = (counts[group] - skipped).clamp(max=block_m)
    return torch.stack([slots[group], starts[group] + skipped, rows], dim=1)


def _spans(slots: Tensor, counts: Tensor, starts: Tensor) -> tuple[SlotSpan, ...]:
    columns: Sequence[list[int]] = (slots.tolist(), starts.tolist(), (starts + counts).tolist())
    return tuple(map(SlotSpan, *columns))
