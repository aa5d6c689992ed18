"""Layers that an adapter replaces whole (`modules_to_save`).

A saved layer is computed exactly as the base layer is, for the rows of its adapter.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.func import functional_call

from engine.kernels.operands import RowOrder
from engine.layout import ABSENT
from engine.punica.wrapper import PunicaWrapper
from engine.residency.arena import Arena


class SavedRows(NamedTuple):
    """The rows of one adapter that has replaced the layer: weight `[out, in]`, bias `[out]`."""

    rows: Tensor
    weight: Tensor
    bias: Tensor


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
        """Yield the rows of each adapter that has the layer; shape: the input's leading one."""
        is_known = punica is not None and self.slots
        groups = punica.groups_of(shape, row_order=row_order) if punica and is_known else None
        if groups is None:
            return
        for slot, start, end in groups.spans:
            saved = self._arena.weights(slot, self._column) if slot in self.slots else None
            if saved is not None:
                yield SavedRows(groups.rows[start:end], saved[0], saved[1].flatten())


class ReplaceableNorm:
    """A forward hook of a norm, which computes rows of adapters that have saved it with their own.

    The module itself stays in its place, because it is not adapted otherwise.
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
        x = inputs[0].reshape(-1, inputs[0].shape[-1])
        outputs, parameters = y.view(len(x), -1), dict(norm.named_parameters())
        # Calling the norm with other parameters calls this hook too.
        self._is_running = True
        try:
            for rows, weight, bias in self._saved.rows_of(self._punica, inputs[0].shape[:-1]):
                saved = {"weight": weight.flatten(), "bias": bias}
                own = {name: saved[name].to(one.dtype) for name, one in parameters.items()}
                outputs[rows] = functional_call(norm, own, (x[rows],))
        finally:
            self._is_running = False
        return y


def is_replaceable_norm(module: nn.Module) -> bool:
    """Whether a module has nothing but a weight, and perhaps a bias, per feature."""
    parameters = dict(module.named_parameters())
    shapes = {tuple(parameter.shape) for parameter in parameters.values()}
    is_leaf = next(module.children(), None) is None and "weight" in parameters
    return is_leaf and parameters.keys() <= {"weight", "bias"} and {len(s) for s in shapes} == {1}
