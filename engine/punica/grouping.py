"""A batch's slots in the form that kernels read, and its one way to the device.

What it is: rows sorted by slot, and the groups cut into tiles; built by vectorised host code and
brought to the device by one asynchronous copy. What it is not: a reader of adapter ids. One rule:
where a table lies and how large a launch over it is follow from `GroupBounds` alone, so a captured
graph that has those bounds can be replayed with every batch that has them too.
"""

from collections.abc import Sequence
from typing import Final, NamedTuple

import torch
from torch import Tensor

from engine.kernels.operands import TILE_ROWS, GroupBounds, Groups, Span, Tiles
from engine.layout import power_of_two

TOKENS_MAX: Final = 8192
"""How many rows the device's tables take before they first have to grow."""


class Batch(NamedTuple):
    """A batch's two mappings on the device: by token and by sampled row."""

    tokens: Groups
    prompts: Groups


class Grouper:
    """Builds a batch's groups on `device`; one for each Punica wrapper.

    On CUDA the tables lie in one buffer that is written again for each batch: what an earlier call
    returned then says what the latest one does. The copy is ordered behind the kernels that read
    the batch before it, and its source is one of two page-locked buffers, so the host fills one
    while the other may still be on its way. On a CPU every call returns tensors of its own.
    """

    def __init__(
        self, device: torch.device, rank_max: int, specialize_active: bool = False
    ) -> None:
        self._rank_max = rank_max
        self._specialize_active = specialize_active
        self._link = _Link(device) if device.type == "cuda" else None

    @property
    def place(self) -> object:
        """What stands for the device's tables: it is another object once they lie elsewhere."""
        return None if self._link is None else self._link.place

    def group(self, token_slots: Tensor, prompt_slots: Tensor, slots_max: int) -> Batch:
        """Both mappings' groups; slots: [rows] int64 on the host, -1 for the base model."""
        first = self._draft(token_slots, slots_max)
        # Where every row is sampled both mappings are one.
        is_one = torch.equal(token_slots, prompt_slots)
        drafts = [first, first if is_one else self._draft(prompt_slots, slots_max)]
        rooms = [draft.words for draft in drafts]
        words = sum(rooms)
        host = (
            torch.zeros(words, dtype=torch.int64) if self._link is None else self._link.open(words)
        )
        for draft, part in zip(drafts, torch.split(host, rooms), strict=True):
            draft.write(part)
        device = host if self._link is None else self._link.send(words)
        tokens, prompts = (
            draft.read(part) for draft, part in zip(drafts, torch.split(device, rooms), strict=True)
        )
        return Batch(tokens, prompts)

    def _draft(self, slots: Tensor, slots_max: int) -> "_Draft":
        """Sort the rows with an adapter stably by slot."""
        sorted_slots, order = torch.sort(slots, stable=True)
        base_rows = int((slots < 0).sum())
        active, counts = torch.unique_consecutive(sorted_slots[base_rows:], return_counts=True)
        groups = power_of_two(len(active)) if self._specialize_active else slots_max
        tokens = power_of_two(len(slots))
        bounds = GroupBounds(tokens, min(groups, tokens, slots_max), self._rank_max)
        return _Draft(slots, order[base_rows:], active, counts, bounds)


class _Draft:
    """One mapping's tables on the host, and their order in a buffer.

    The order: the number of active groups; for each group slot, count, start; the tiles of each
    height; the rows; each token's slot. Every table has the room that the bounds ask for, and zeros
    behind its end.
    """

    def __init__(
        self, token_slots: Tensor, rows: Tensor, slots: Tensor, counts: Tensor, bounds: GroupBounds
    ) -> None:
        self._token_slots, self._bounds = token_slots, bounds
        self._rows, self._slots, self._counts = rows, slots, counts
        self._starts = torch.cumsum(counts, 0) - counts
        groups = (slots, counts, self._starts)
        tiles = [_tiles(*groups, height).flatten() for height in TILE_ROWS]
        self._tables = (torch.tensor([len(slots)]), *groups, *tiles, rows, token_slots)
        tile_rooms = [3 * bounds.tiles(height) for height in TILE_ROWS]
        self._rooms = [1, *[bounds.groups] * 3, *tile_rooms, bounds.tokens, bounds.tokens]
        self.words = sum(self._rooms)

    def write(self, buffer: Tensor) -> None:
        """Fill `buffer` [words] int64, which is all zeros."""
        for room, table in zip(torch.split(buffer, self._rooms), self._tables, strict=True):
            room[: len(table)] = table

    def read(self, buffer: Tensor) -> Groups:
        """The tables in `buffer`, which is what `write` filled or a copy of it."""
        active, slots, counts, starts, *tiles, rows, token_slots = torch.split(buffer, self._rooms)
        count, tokens = len(self._slots), len(self._token_slots)
        return Groups(
            rows=rows[: len(self._rows)],
            slots=slots[:count],
            counts=counts[:count],
            starts=starts[:count],
            spans=_spans(self._slots, self._counts, self._starts),
            tokens=tokens,
            token_slots=token_slots[:tokens],
            active=active,
            tiles=tuple(
                Tiles(height, table.view(-1, 3))
                for height, table in zip(TILE_ROWS, tiles, strict=True)
            ),
            bounds=self._bounds,
        )


class _Link:
    """One buffer on the device, and two page-locked ones that are copied to it in turn."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._turn = 0
        self._allocate(6 * TOKENS_MAX)

    def open(self, words: int) -> Tensor:
        """The next page-locked buffer, all zeros; waits where its last copy is still on its way."""
        if words > len(self._on_device):
            # The copies into the old buffer have to end before its memory is another's.
            torch.cuda.current_stream(self._device).synchronize()
            self._allocate(power_of_two(words))
        self._turn = 1 - self._turn
        self._copied[self._turn].synchronize()
        return self._on_host[self._turn][:words].zero_()

    def send(self, words: int) -> Tensor:
        """Start the copy of what `open` gave; its place on the device."""
        place = self._on_device[:words]
        place.copy_(self._on_host[self._turn][:words], non_blocking=True)
        self._copied[self._turn].record(torch.cuda.current_stream(self._device))
        return place

    def _allocate(self, words: int) -> None:
        self.place = object()
        # Tensors made in inference mode could not be written outside of it.
        with torch.inference_mode(False):
            self._on_device = torch.zeros(words, dtype=torch.int64, device=self._device)
            self._on_host = [
                torch.zeros(words, dtype=torch.int64, pin_memory=True) for _ in range(2)
            ]
        self._copied = [torch.cuda.Event() for _ in range(2)]  # type: ignore[no-untyped-call]


def _tiles(slots: Tensor, counts: Tensor, starts: Tensor, height: int) -> Tensor:
    """Every group cut into blocks of at most `height` rows: [tiles, 3], slot, first, count."""
    per_group = (counts + height - 1) // height
    group = torch.repeat_interleave(torch.arange(len(slots)), per_group)
    before = (torch.cumsum(per_group, 0) - per_group)[group]
    skipped = (torch.arange(len(group)) - before) * height
    rest = (counts[group] - skipped).clamp(max=height)
    return torch.stack([slots[group], starts[group] + skipped, rest], dim=1)


def _spans(slots: Tensor, counts: Tensor, starts: Tensor) -> tuple[Span, ...]:
    columns: Sequence[list[int]] = (slots.tolist(), starts.tolist(), (starts + counts).tolist())
    return tuple(map(Span, *columns))
