"""Values that are derived from a launch's operands, kept for an equal launch."""

from typing import Generic, NamedTuple, TypeVar
from weakref import WeakKeyDictionary

from torch import Tensor

from loradock.engine.kernels.operands import Groups, LoRASlices

Value = TypeVar("Value")


class _Entry(NamedTuple, Generic[Value]):
    """A layer's value and the operands it was derived from; `groups` is compared by identity."""

    groups: Groups
    version: int
    signature: tuple[object, ...]
    value: Value


class OperandMemo(Generic[Value]):
    """The value that was derived for each layer after its last check.

    A value is valid for one `Groups` object, one version of the directory, and one shape, stride,
    dtype and device of `y` and `x`. Operands that match need no check, because a check reads
    nothing else.
    """

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[LoRASlices, _Entry[Value]] = WeakKeyDictionary()

    def get(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups) -> Value | None:
        """Return the layer's value; None if it was derived from other operands, or never."""
        entry = self._entries.get(slices)
        if (
            entry is None
            or entry.groups is not groups
            or entry.version != slices.directory.version
            or entry.signature != _signature(y, x)
        ):
            return None
        return entry.value

    def set(self, y: Tensor, x: Tensor, slices: LoRASlices, groups: Groups, value: Value) -> None:
        """Replace the layer's value by one that was derived from these operands."""
        version = slices.directory.version
        self._entries[slices] = _Entry(groups, version, _signature(y, x), value)


def _signature(y: Tensor, x: Tensor) -> tuple[object, ...]:
    return (y.shape, y.stride(), y.dtype, y.device, x.shape, x.stride(), x.dtype, x.device)
