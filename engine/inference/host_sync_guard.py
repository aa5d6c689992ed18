"""Seeing that a piece of work never waits for what lies on the device.

What it is: a mode in which an operation raises that the host would have to wait for. What it is
not: a list of operations; PyTorch tells of each whether its result depends on data. One rule: what
passes here can be captured, and replayed with other data.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

_DEPENDENT: Final = frozenset(
    (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape),
)
"""What PyTorch says of operations that the host has to wait for."""

_INDEXED: Final = (torch.ops.aten.index,)
_INDEX_WRITES: Final = (
    *(torch.ops.aten.index_put, torch.ops.aten.index_put_, torch.ops.aten._index_put_impl_),
)
"""Operations that the host waits for only where an index is a mask."""

_GROUPED: Final = torch.ops.aten._grouped_mm
_GROUPED_DTYPE: Final = torch.bfloat16
_GROUPED_MAJORS: Final = (9, 10)
"""The dtype and the compute capabilities for which a grouped product is one kernel; for all others
PyTorch brings the groups' ends to the host, by no operation that is seen, and loops over them."""

_COPIES: Final = (torch.ops.aten.copy_, torch.ops.aten._to_copy)
"""Operations that may bring something to another device."""


class HostRead(RuntimeError):  # noqa: N818 - named by what was found, as all errors here are
    """Work that was to run on the device alone needed the host."""


class NoHostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While it is on, operations raise `HostRead` that read the device, or copy to or from it.

    Reading is what gives a value or a shape that follows from data there. What lies on the host
    may be read, where `device` is another. On a CPU `tolist` and `numpy` read memory without an
    operation, and pass unseen.
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
            raise HostRead(f"{func} reads the device")
        found = self._in_parts(func, args, kwargs or {})
        if found is NotImplemented:
            found = func(*args, **(kwargs or {}))
        if func.overloadpacket in _COPIES and len({*_devices_of(args), *_devices_of([found])}) > 1:
            raise HostRead(f"{func} copies between the device and the host")
        return found

    def _in_parts(self, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What an operation that is made of others gives, each of which is watched."""
        with self:
            return func.decompose(*args, **kwargs)


def _depends_on_data(func: Any, args: Sequence[Any]) -> bool:
    operation = func.overloadpacket
    if operation is _GROUPED:
        return _is_loop(args[0])
    if operation in _INDEXED:
        return any(_is_mask(index) for index in args[1])
    if operation in _INDEX_WRITES:
        # One value at a mask's places is written without counting them.
        return args[2].numel() > 1 and any(_is_mask(index) for index in args[1])
    return not _DEPENDENT.isdisjoint(func.tags)


def _is_loop(x: Tensor) -> bool:
    """Whether a grouped product over these rows is a loop on the host."""
    if x.device.type != "cuda":
        return False
    major, _ = torch.cuda.get_device_capability(x.device)
    return x.dtype != _GROUPED_DTYPE or major not in _GROUPED_MAJORS


def _is_mask(index: Tensor | None) -> bool:
    return index is not None and index.dtype in (torch.bool, torch.uint8)


def _devices_of(values: Sequence[Any]) -> list[str]:
    return [value.device.type for value in values if isinstance(value, Tensor)]
