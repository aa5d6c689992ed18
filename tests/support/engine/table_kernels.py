"""LoRA products that read a batch's tables alone, as kernels on a GPU do, and such tables on a CPU.

A tape of a step with them (`tape_capture`) can be replayed for other adapters, ranks and slots.
"""

from typing import Any

import pytest
import torch
from torch import Tensor

from loradock.engine.kernels.block_attention import (
    AttentionOptions,
    BlockAttention,
    BlockOperands,
    write_tokens,
)
from loradock.engine.kernels.interface import Kernels
from loradock.engine.kernels.operands import Groups, LoRASlices
from loradock.engine.kernels.reference import reference_kernels
from loradock.engine.kernels.reference.attention import attend_reference
from loradock.engine.layout import aligned_elements
from loradock.engine.punica.grouping import DeviceBuffer, Grouper

CPU = torch.device("cpu")


class _NoStream:
    """A stream or event of a device whose work has ended when a call returns."""

    def synchronize(self) -> None:
        """Do nothing."""

    def record(self, stream: object) -> None:
        """Do nothing."""


def use_fixed_tables(
    grouper: Grouper, monkeypatch: pytest.MonkeyPatch, words: int = 6 << 13
) -> None:
    """Let a grouper's tables have fixed addresses until they need more words, as on a GPU."""
    zeros = torch.zeros

    def pageable_zeros(*size: int, pin_memory: bool = False, **fields: Any) -> Tensor:
        # Only a device's driver can lock pages.
        del pin_memory
        return zeros(*size, **fields)

    monkeypatch.setattr(torch, "zeros", pageable_zeros)
    monkeypatch.setattr(torch.cuda, "Event", _NoStream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: _NoStream())
    grouper._buffer = DeviceBuffer(CPU, words)


def table_kernels() -> Kernels:
    """Return kernels whose products of linear layers, and attention, read nothing but tables."""
    return reference_kernels(False)._replace(
        linear=_linear, attention=BlockAttention(_attend, write_tokens, shared_rows=2)
    )


def _attend(
    y: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    blocks: BlockOperands,
    options: AttentionOptions,
) -> None:
    """Compute as `attend_reference` does; decode steps read all entries of their tables' rows.

    What a row shares is read through the table of the row whose list has it.
    """
    if not blocks.is_decode:
        attend_reference(y, query, keys, values, blocks, options)
        return
    inside = torch.arange(blocks.block_tokens)
    table = _without_shared(blocks) if blocks.shared is not None else blocks.table[blocks.rows]
    places = table[:, :, None] * blocks.block_tokens + inside
    places = places.flatten(1)
    index = torch.arange(places.shape[1])
    attends = index <= blocks.firsts[:, None]
    if options.window:
        attends &= index > blocks.firsts[:, None] - options.window
    rows, heads, width = len(places), *query.shape[::2]
    grouped = query.transpose(0, 1).reshape(rows, len(keys), -1, width)
    masked = [one[:, places].masked_fill(~attends[..., None], 0.0) for one in (keys, values)]
    own_keys, own_values = (one.transpose(0, 1) for one in masked)
    scores = grouped @ own_keys.mT * (width**-0.5 if options.scale is None else options.scale)
    if options.softcap:
        scores = options.softcap * torch.tanh(scores / options.softcap)
    scores = scores.masked_fill(~attends[:, None, None], -torch.inf)
    if options.sinks is not None:
        sinks = options.sinks.view(1, len(keys), -1, 1).expand(rows, -1, -1, 1)
        scores = torch.cat([scores, sinks], -1)
    weights = scores.softmax(-1)[..., : places.shape[1]]
    y.copy_((weights @ own_values).reshape(rows, heads, -1))


def _without_shared(blocks: BlockOperands) -> Tensor:
    """Return each row of the table, with the first blocks of the row that it shares them with."""
    assert blocks.shared is not None
    table, rows = blocks.table[blocks.rows], torch.arange(len(blocks.rows))
    counts, members = blocks.shared[:, :1] // blocks.block_tokens, blocks.shared[:, 1:]
    # Where there is no member, one more row is written.
    member = members.where(members >= 0, len(rows)).flatten()
    reader = torch.full((len(rows) + 1,), -1)
    reader[member] = rows[:, None].expand_as(members).flatten()
    return table[reader[:-1]].where(torch.arange(table.shape[1]) < counts, table)


def _linear(y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> None:
    """Compute as `linear_reference` does, over the tiles of 16 rows."""
    size, table = groups.tiles[0]
    slots, first, count = table.unbind(1)
    lanes = torch.arange(size)
    # The view of the rows has the size of the batch that was captured.
    capacity = groups.bounds.tokens
    all_rows = groups.rows.as_strided((capacity,), (1,))
    rows = all_rows[(first[:, None] + lanes).clamp(max=capacity - 1)]
    # Lanes without a row write to one more row.
    written = torch.where(lanes < count[:, None], rows, len(x))
    inputs, start = x[rows], 0
    for column, out_features in zip(slices.columns, slices.out_features, strict=True):
        a, b = _weights(slices, slots, column, out_features, groups.bounds.rank)
        delta = x.new_zeros(len(x) + 1, out_features)
        delta[written] = inputs @ a.mT @ b.mT
        y[:, start : start + out_features].add_(delta[:-1])
        start += out_features


def _weights(
    slices: LoRASlices, slots: Tensor, column: int, out_features: int, rank_max: int
) -> tuple[Tensor, Tensor]:
    """Return A [tiles, rank_max, in_features] and B [tiles, out_features, rank_max], with zeros."""
    directory = slices.directory
    offset = directory.offsets[slots, column][:, None, None]
    rank = directory.ranks[slots, column].long()[:, None, None]
    unit = aligned_elements(1, directory.data.dtype)
    b_offset = offset + (rank * slices.in_features + unit - 1) // unit * unit
    ranks = torch.arange(rank_max)
    a = offset + ranks[:, None] * slices.in_features + torch.arange(slices.in_features)
    b = b_offset + torch.arange(out_features)[:, None] * rank + ranks
    a_is_present = (offset >= 0) & (ranks[:, None] < rank)
    b_is_present = (offset >= 0) & (ranks < rank)
    read = directory.data[a.clamp(0, len(directory.data) - 1)]
    read_b = directory.data[b.clamp(0, len(directory.data) - 1)]
    return torch.where(a_is_present, read, 0.0), torch.where(b_is_present, read_b, 0.0)
