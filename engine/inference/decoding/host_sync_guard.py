"""A mode that detects operations for which the host waits for the device.

Work that passes can be captured and replayed with other data. There is no list of operations:
PyTorch's own tags specify whether a result depends on data.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DATA_DEPENDENT: Final = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),
)
"""PyTorch's tags of operations that the host has to wait for."""

_INDEXED: Final = (torch.ops.aten.index,)
_INDEX_WRITES: Final = (
    *(torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_),
)
"""Operations that the host waits for only where an index is a mask."""

_GROUPED: Final = torch.ops.aten._grouped_mm
_GROUPED_DTYPE: Final = torch.bfloat16
_GROUPED_MAJORS: Final = (9, 10)
"""The dtype and the compute capabilities for which a grouped matmul is one kernel. For all others
PyTorch copies the groups' ends to the host, without a dispatched operation, and loops over them."""

_COPIES: Final = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
"""Operations that may copy from one device to another."""


class HostSync(RuntimeError):  # noqa: N818 - named by what was found, like the engine's errors
    """Work that had to run on the device alone needed the host."""


class ForbidHostSync(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode in which operations that read `device`, or copy to or from it, raise `HostSync`.

    An operation reads the device if its result is a value, or has a shape, that depends on data
    there. With another `device`, data on the host may be read. On a CPU `tolist` and `numpy` read
    memory without a dispatched operation and are not detected.
    """

    def __init__(self, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._device = device.type

    def __torch_dispatch__(
        self,
        func: Any,
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        """Run one operation, unless it reads or copies."""
        if _depends_on_data(func, args) and self._device in _devices_of(args):
            raise HostSync(f"{func} reads the device")
        result = self._decomposed(func, args, kwargs or {})
        if result is NotImplemented:
            result = func(*args, **(kwargs or {}))
        if func.overloadpacket in _COPIES and len({*_devices_of(args), *_devices_of([result])}) > 1:
            raise HostSync(f"{func} copies between the device and the host")
        return result

    def _decomposed(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Return the result of a composite operation, each part of which is checked."""
        with self:
            return func.decompose(*args, **kwargs)


def _depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    operation = func.overloadpacket
    if operation is _GROUPED:
        return _loops_on_host(args[0])
    if operation in _INDEXED:
        return any(_is_mask(index) for index in args[1])
    if operation in _INDEX_WRITES:
        # One value is written under a mask without a count of its elements.
        return args[2].numel() > 1 and any(_is_mask(index) for index in args[1])
    return not _DATA_DEPENDENT.isdisjoint(func.tags)


def _loops_on_host(x: Tensor) -> bool:
    """Return whether a grouped matmul over these rows is a loop on the host."""
    if x.device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(x.device)
    return x.dtype != _GROUPED_DTYPE or major not in _GROUPED_MAJORS


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _devices_of(values: Sequence[Any]) -> list[str]:
    return [value.device.type for value in values if isinstance(value, Tensor)]
