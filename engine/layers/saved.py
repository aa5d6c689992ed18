"""Layers that an adapter replaces whole (`modules_to_save`), or for single tokens.

A saved layer is computed exactly as the base layer is, for the rows of its adapter. An embedding or
a head of which rows were trained (`trainable_token_indices`) is the base's for all other tokens.
"""

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import embedding, linear

from loradock.engine.kernels.operands import RowOrder
from loradock.engine.layout import ABSENT, token_ids_of
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.residency.arena import Arena


class Step(Protocol):
    """A part of a layer's plan."""

    def run(self, y: Tensor, x: Tensor) -> None:
        """Change the layer's output in place: y [rows, out], x [rows, in], both contiguous."""


class SavedRows(NamedTuple):
    """The rows of one adapter that has replaced the layer: weight `[out, in]`, bias `[out]`."""

    rows: Tensor
    weight: Tensor
    bias: Tensor


class AffineStep(NamedTuple):
    """Scales and shifts the base outputs of an adapter's rows; the scale is in `weight`."""

    columns: slice
    rows: SavedRows

    def run(self, y: Tensor, x: Tensor) -> None:  # noqa: ARG002 - the protocol's
        """Compute `y = y * scale + shift`."""
        rows, scale, shift = self.rows
        scaled = y[rows, self.columns] * scale.flatten().to(y.dtype)
        y[rows, self.columns] = scaled + shift.to(y.dtype)


class SavedStep(NamedTuple):
    """Computes an adapter's rows with its own layer."""

    columns: slice
    rows: SavedRows

    def run(self, y: Tensor, x: Tensor) -> None:
        """Compute `y = x @ weight.T + bias`."""
        rows, weight, bias = self.rows
        y[rows, self.columns] = linear(x[rows], weight.to(x.dtype), bias.to(x.dtype))


class LookupStep(NamedTuple):
    """Looks up an adapter's rows in its own embedding, times `scale`; x: ids [rows, 1]."""

    rows: SavedRows
    scale: float

    def run(self, y: Tensor, x: Tensor) -> None:
        """Compute `y = scale * weight[x]`."""
        rows, weight, _ = self.rows
        y[rows] = embedding(x[rows, 0], weight).to(y.dtype) * self.scale


class SavedWeights:
    """The column of the directory with the layers that adapters have saved."""

    def __init__(self, arena: Arena, column: int) -> None:
        self._arena = arena
        self._column = column
        self._version = -1
        self._slots: frozenset[int] = frozenset()

    @property
    def slots(self) -> frozenset[int]:
        """The slots whose adapters have the layer."""
        directory = self._arena.directory
        if self._version != directory.version:
            present = directory.host_offsets[:, self._column] != ABSENT
            self._slots = frozenset(present.nonzero().flatten().tolist())
            self._version = directory.version
        return self._slots

    def rows_of(
        self,
        punica: PunicaWrapper | None,
        shape: Sequence[int],
        row_order: RowOrder = RowOrder.MAPPING,
    ) -> Iterator[SavedRows]:
        """Yield the rows of each adapter that has the layer; shape: the input's leading one.

        Raises `ValueError` as `PunicaWrapper.groups_of` does, but not for a batch without them.
        """
        if punica is None or self.slots.isdisjoint(punica.active_slots):
            return
        groups = punica.groups_of(shape, row_order=row_order)
        if groups is None:
            return
        for slot, start, end in groups.spans:
            saved = self._arena.weights(slot, self._column) if slot in self.slots else None
            if saved is not None:
                yield SavedRows(groups.rows[start:end], saved[0], saved[1].flatten())


class TokenVectors(NamedTuple):
    """The rows of one adapter that has separate rows for some tokens.

    `token_ids`: [tokens] int64, ascending. `vectors`: [tokens, hidden], of the arena's dtype.
    """

    rows: Tensor
    token_ids: Tensor
    vectors: Tensor


class TokenLookupStep(NamedTuple):
    """Writes an adapter's vectors, times `scale`, at ids that are its tokens; x: ids [rows, 1]."""

    tokens: TokenVectors
    scale: float

    def run(self, y: Tensor, x: Tensor) -> None:
        """Replace rows of y [rows, hidden]."""
        rows, token_ids, trained = self.tokens
        own = x[rows, 0]
        found = torch.searchsorted(token_ids, own).clamp(max=len(token_ids) - 1)
        is_own = (token_ids[found] == own)[:, None]
        vectors = trained[found].to(y.dtype) * self.scale
        y[rows] = torch.where(is_own, vectors, y[rows])


class TokenLogitsStep(NamedTuple):
    """Writes the logits of an adapter's tokens.

    PEFT computes a head with trained rows without its `bias`, so the adapter was trained so.
    """

    tokens: TokenVectors
    bias: Tensor | None

    def run(self, y: Tensor, x: Tensor) -> None:
        """Replace columns of y [rows, vocabulary]; x: [rows, hidden]."""
        rows, token_ids, vectors = self.tokens
        if self.bias is not None:
            y[rows] -= self.bias.to(y.dtype)
        logits = linear(x[rows], vectors.to(x.dtype))
        y[rows[:, None], token_ids[None]] = logits.to(y.dtype)


class TokenRows(SavedWeights):
    """The column of the directory with the rows of single tokens that adapters have trained."""

    def vectors_of(
        self, punica: PunicaWrapper | None, shape: Sequence[int], row_order: RowOrder
    ) -> Iterator[TokenVectors]:
        """Yield the rows of each adapter with trained tokens; shape: the input's leading one."""
        for rows, vectors, digits in self.rows_of(punica, shape, row_order):
            yield TokenVectors(rows, token_ids_of(digits.view(len(vectors), -1)), vectors)


class ReplaceableNorm:
    """A forward hook of a norm, which computes rows of adapters that have saved it with their own.

    The module itself stays in its place, because it is not adapted otherwise. Its input is
    [rows, ..., features], or [batch, tokens, ..., features], where the axes between are of one row:
    a norm over each head of queries has as many vectors per token.
    """

    def __init__(self, norm: nn.Module) -> None:
        self.norm = norm
        self.features = norm.get_parameter("weight").numel()
        self._saved: SavedWeights | None = None
        self._punica: PunicaWrapper | None = None
        self._is_running = False
        norm.register_forward_hook(self._replace_rows)

    def bind(self, arena: Arena, column: int, punica: PunicaWrapper) -> None:
        """Use a column of the directory, and the mapping of `punica`."""
        self._saved, self._punica = SavedWeights(arena, column), punica

    def _replace_rows(self, norm: nn.Module, inputs: tuple[Tensor, ...], y: Tensor) -> Tensor:
        if self._saved is None or self._is_running or not self._saved.slots:
            return y
        y = y.contiguous()
        axes = min(2, inputs[0].ndim - 1)
        leading = inputs[0].shape[:axes]
        x, outputs = (one.reshape(math.prod(leading), *one.shape[axes:]) for one in (inputs[0], y))
        parameters = dict(norm.named_parameters())
        # Calling the norm with other parameters calls this hook too.
        self._is_running = True
        try:
            for rows, weight, bias in self._saved.rows_of(self._punica, leading):
                saved = {"weight": weight.flatten(), "bias": bias}
                own = {name: saved[name].to(one.dtype) for name, one in parameters.items()}
                outputs[rows] = functional_call(norm, own, (x[rows],))
        finally:
            self._is_running = False
        return y


def is_replaceable_norm(module: nn.Module) -> bool:
    """Return whether a module has nothing but a weight, and perhaps a bias, per feature."""
    parameters = dict(module.named_parameters())
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    is_leaf = next(module.children(), None) is None and "weight" in parameters
    return is_leaf and parameters.keys() <= {"weight", "bias"} and {len(s) for s in shapes} == {1}
