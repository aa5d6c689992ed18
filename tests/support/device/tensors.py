"""Tensors with real values in host memory whose device is `cuda:0`, and the modes that run them.

Every operation is checked as CUDA would (no mixed devices), recorded (launches, copies, reads,
accesses), and then run on the tensors in host memory.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from tests.support.device.attention import attend, scaled_dot_product_attention
from tests.support.device.graphs import keep_view, record_operation, record_step
from tests.support.device.record import RECORD, site
from tests.support.device.streams import (
    DEVICE,
    HOST,
    MEMORY,
    PINNED,
    access_all,
    capture,
    current_stream,
    host_reads,
    host_waits,
)

aten: Final = torch.ops.aten
HOST_DEVICE: Final = torch.device("cpu")

_READS: Final = {
    *(aten._local_scalar_dense, aten.nonzero, aten.unique_consecutive, aten._unique2, aten._unique),
    *(aten.masked_select, aten.equal, aten.is_nonzero, aten.unique_dim, aten.nonzero_static),
}
"""Operators whose result, or its size, the host waits for."""
_NO_LAUNCH: Final = {
    *(aten._unsafe_view, aten.scalar_tensor, aten._reshape_alias, aten.empty, aten.empty_strided),
    *(aten.new_empty, aten.empty_like, aten.new_empty_strided, aten.detach, aten.alias),
    aten.lift_fresh,
}
_UNFILLED: Final = {aten.empty, aten.empty_like, aten.new_empty}
_INDEXING: Final = {
    *(aten.index, aten.index_put_, aten.index_put, aten._index_put_impl_, aten._unsafe_index),
    aten._unsafe_index_put,
}
_COPIES: Final = {aten._to_copy, aten.copy_}
_CONSTANT: Final = {aten.is_pinned: False, aten._fused_sdp_choice: 0}
"""Attention that is called from within PyTorch's own code is decomposed into its parts."""
_MASKS: Final = (torch.bool, torch.uint8)


class _Skipping:
    is_on = False


skipping: Final = _Skipping()


@contextmanager
def skipped_kernels() -> Iterator[None]:
    """Count the launches of Triton kernels, and don't run them: new memory is filled with zeros."""
    skipping.is_on = True
    try:
        yield
    finally:
        skipping.is_on = False


class SimulatedTensor(Tensor):
    """A tensor on the simulated device; `inner` has its values, with the same shape and strides."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> "SimulatedTensor":
        with torch.inference_mode(False):
            made = Tensor._make_wrapper_subclass(
                cls,
                inner.shape,
                strides=inner.stride(),
                storage_offset=inner.storage_offset(),
                dtype=inner.dtype,
                layout=inner.layout,
                device=DEVICE,
                requires_grad=False,
            )
        made.inner = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return DISPATCH.run(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.inner.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.inner.untyped_storage()

    def tolist(self) -> Any:
        host_reads("tolist")
        return self.inner.tolist()

    def numpy(self, *_: Any, **__: Any) -> Any:
        raise TypeError("can't convert cuda:0 device type tensor to numpy")

    def is_pinned(self, *_: Any) -> bool:
        return False

    def record_stream(self, stream: Any) -> None:
        MEMORY.of(self.inner).recorded.add(stream)

    def __repr__(self) -> str:
        return f"simulated({self.inner!r})"

    def __deepcopy__(self, memo: Any) -> "SimulatedTensor":
        return SimulatedTensor(self.inner.clone())


def unwrap(value: Any) -> Any:
    """Return the tensor in host memory of a simulated one; other values as they are."""
    return value.inner if isinstance(value, SimulatedTensor) else value


def _is_host(value: Any) -> bool:
    is_simulated = isinstance(value, SimulatedTensor)
    return isinstance(value, Tensor) and not is_simulated and value.device.type == "cpu"


class _Operation:
    """One call of an operator, with its tensors by where they are."""

    def __init__(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.func, self.args, self.kwargs = func, args, kwargs
        self.packet = func.overloadpacket
        self.name = str(self.packet)
        leaves = tree_leaves((args, kwargs))
        self.simulated = [leaf for leaf in leaves if isinstance(leaf, SimulatedTensor)]
        self.hosted = [leaf for leaf in leaves if _is_host(leaf)]
        device = kwargs.get("device")
        self.device = None if device is None else torch.device(device)
        self.is_free = func.is_view or self.packet in _NO_LAUNCH

    @property
    def is_for_device(self) -> bool:
        return bool(self.simulated) or (self.device is not None and self.device.type == "cuda")

    def written(self) -> list[SimulatedTensor]:
        """Return the tensors that the operator changes."""
        schema = self.func._schema.arguments
        named = {argument.name: value for argument, value in zip(schema, self.args, strict=False)}
        named |= self.kwargs
        return [
            named[argument.name]
            for argument in schema
            if argument.alias_info is not None
            and argument.alias_info.is_write
            and isinstance(named.get(argument.name), SimulatedTensor)
        ]


class DispatchMode(TorchDispatchMode):
    """Runs every operation that has a simulated tensor, or makes one."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run one operation."""
        operation = _Operation(func, args, kwargs)
        if not operation.is_for_device:
            return _run_on_host(operation)
        if operation.packet is aten.scaled_dot_product_attention:
            _refuse_mixed(operation)
            return SimulatedTensor(attend(*map(unwrap, args), **tree_map(unwrap, kwargs)))
        if _is_composite(func):
            with self:
                out = func.decompose(*args, **kwargs)
            if out is not NotImplemented:
                return out
        if operation.packet in _CONSTANT:
            return _CONSTANT[operation.packet]
        return _copy(operation) if operation.packet in _COPIES else _compute(operation)


DISPATCH: Final = DispatchMode()


def _is_composite(func: Any) -> bool:
    key = "CompositeImplicitAutograd"
    return bool(torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), key))


def _run_on_host(operation: _Operation) -> Any:
    """Run an operation without simulated tensors; page-locked memory is marked."""
    kwargs = operation.kwargs
    with _disable_current_modes():
        if kwargs.get("pin_memory"):
            made = operation.func(*operation.args, **{**kwargs, "pin_memory": False})
            PINNED.add(made)
            return made
        is_mutable = operation.func._schema.is_mutable
        for index, tensor in enumerate(operation.hosted):
            MEMORY.host_access(tensor, is_mutable and index == 0, operation.name)
        return operation.func(*operation.args, **kwargs)


def _copy(operation: _Operation) -> Any:
    """Copy within the device, or between it and the host."""
    args, kwargs, name = operation.args, operation.kwargs, operation.name
    is_new = operation.packet is aten._to_copy
    source = args[0] if is_new else args[1]
    to_device = (
        (operation.device or source.device).type == "cuda"
        if is_new
        else isinstance(args[0], SimulatedTensor)
    )
    is_async = bool(kwargs.get("non_blocking") or (not is_new and len(args) > 2 and args[2]))
    crosses = isinstance(source, SimulatedTensor) != to_device
    host = None
    if crosses:
        host = source if to_device else None if is_new else args[0]
        _transfer(source, host, to_device, is_async)
    stream = current_stream()
    launch = stream.launch()
    if not is_new:
        target = unwrap(args[0])
        with _disable_current_modes():
            target.copy_(unwrap(source))
        record_step(lambda: target.copy_(unwrap(source)))
        out = args[0]
    else:
        skipped = ("device", "non_blocking", "pin_memory")
        rest = {key: value for key, value in kwargs.items() if key not in skipped}
        with _disable_current_modes():
            made = operation.func(unwrap(source), **rest)
        record_operation(operation.func, (unwrap(source),), rest, made)
        out = SimulatedTensor(made) if to_device else made
    if host is None or is_async:
        _access_copy(source, out, host, launch, name)
    if crosses and not is_async:
        HOST.join(stream.clock)
    if not crosses:
        RECORD.launches[name] += 1
    return out


def _access_copy(source: Tensor, target: Any, host: Tensor | None, launch: int, name: str) -> None:
    """Add the accesses of both sides; those of host memory only if it is page-locked."""
    for tensor, is_write in ((source, False), (target, True)):
        if isinstance(tensor, SimulatedTensor):
            MEMORY.access(tensor.inner, is_write, launch, name)
        elif tensor is host and host is not None and PINNED.contains(host):
            MEMORY.access(host, is_write, launch, name, on_device=False)


def _transfer(source: Tensor, host: Tensor | None, to_device: bool, is_async: bool) -> None:
    """Record a copy between host and device; the host waits unless it is asynchronous."""
    is_pinned = host is not None and PINNED.contains(host)
    kind = ("async pinned" if is_pinned else "async pageable") if is_async else "blocking"
    (RECORD.to_device if to_device else RECORD.to_host)[kind, site()] += 1
    RECORD.copied_bytes += unwrap(source).nbytes
    if capture.is_active and kind != "async pinned":
        RECORD.error("a copy of pageable memory during a capture", kind)
    if not is_async:
        HOST.join(current_stream().clock)


def _compute(operation: _Operation) -> Any:
    """Run an operator on the tensors in host memory, and record its launch."""
    _refuse_mixed(operation)
    packet, kwargs = operation.packet, dict(operation.kwargs)
    has_unknown_size = packet is aten.repeat_interleave and kwargs.get("output_size") is None
    if operation.simulated and (packet in _READS or has_unknown_size):
        host_reads(operation.name)
    if operation.device is not None:
        kwargs["device"] = HOST_DEVICE
    args, kwargs = tree_map(unwrap, operation.args), tree_map(unwrap, kwargs)
    if packet is aten.histc:
        args = (args[0].float(), *args[1:])
    with _disable_current_modes():
        out = operation.func(*args, **kwargs)
        if skipping.is_on and packet in _UNFILLED:
            out.zero_()
    if operation.is_free:
        keep_view(out)
    else:
        record_operation(operation.func, args, kwargs, out)
    return out if packet is aten._local_scalar_dense else _wrap(operation, out)


def _wrap(operation: _Operation, out: Any) -> Any:
    """Return the results as simulated tensors, and add the operation's accesses."""
    same = {id(tensor.inner): tensor for tensor in operation.simulated}

    def wrap(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        # A tensor that is changed in place is returned as the same object.
        return same[id(value)] if id(value) in same else SimulatedTensor(value)

    result = tree_map(wrap, out)
    made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, SimulatedTensor)]
    if not operation.is_free:
        RECORD.launches[operation.name] += 1
        launch = current_stream().launch()
        access_all([t.inner for t in operation.simulated], False, launch, operation.name)
        access_all([t.inner for t in operation.written() or made], True, launch, operation.name)
    elif not operation.func.is_view:
        for tensor in made:
            MEMORY.of(tensor.inner)
    return result


def _refuse_mixed(operation: _Operation) -> None:
    """Raise RuntimeError for tensors on both devices; scalars and indices can be on the host."""
    mixed = [tensor for tensor in operation.hosted if tensor.dim() > 0]
    if operation.packet in _INDEXING:
        mixed = _check_indices(operation, mixed)
    if mixed and operation.simulated:
        RECORD.error("tensors on two devices", operation.name)
        raise RuntimeError(
            f"Expected all tensors to be on the same device: {operation.name} has "
            f"{[tuple(tensor.shape) for tensor in mixed]} on cpu"
        )


def _check_indices(operation: _Operation, mixed: list[Tensor]) -> list[Tensor]:
    """Record the copies and reads that indices cause; return the tensors that are no indices."""
    indices = [index for index in operation.args[1] if isinstance(index, Tensor)]
    for index in indices:
        if _is_host(index):
            RECORD.to_device["blocking: an index on the host", site()] += 1
            host_waits("an index on the host")
        elif index.dtype in _MASKS:
            puts_one = operation.packet is not aten.index and operation.args[2].numel() == 1
            if not puts_one:
                host_reads("a mask as an index")
    if operation.simulated and _is_host(operation.args[0]):
        RECORD.error("host memory is indexed by a tensor of the device", operation.name)
    return [tensor for tensor in mixed if not any(tensor is index for index in indices)]


_get_data: Final = Tensor.data.__get__  # type: ignore[attr-defined]
_HOST_READS: Final = (Tensor.tolist, Tensor.numpy)


class FunctionMode(TorchFunctionMode):
    """Calls that PyTorch's C++ would refuse in a build without CUDA, or run without dispatch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        first = args[0] if args else None
        if func in (torch.tensor, torch.as_tensor):
            return _make_tensor(func, args, kwargs)
        if func is Tensor.cuda:
            return _to(args[:1], {"device": DEVICE})
        if func is Tensor.to:
            moved = _to(args, kwargs)
            return func(*args, **kwargs) if moved is NotImplemented else moved
        if isinstance(first, SimulatedTensor):
            if func is _get_data:
                return first.detach()
            if func is scaled_dot_product_attention:
                return aten.scaled_dot_product_attention(*args, **kwargs)
        elif func in _HOST_READS and isinstance(first, Tensor):
            MEMORY.host_access(first, False, func.__name__)
        return func(*args, **kwargs)


def _device_of(value: Any) -> torch.device | None:
    if isinstance(value, torch.device):
        return value
    if isinstance(value, str):
        return torch.device(value)
    return None


def _make_tensor(func: Callable[..., Any], args: Any, kwargs: dict[str, Any]) -> Any:
    """`torch.tensor` and `torch.as_tensor`."""
    device = _device_of(kwargs.get("device"))
    is_simulated = bool(args) and isinstance(args[0], SimulatedTensor)
    if not is_simulated and (device is None or device.type != "cuda"):
        return func(*args, **kwargs)
    kwargs.pop("device", None)
    if is_simulated:
        made = args[0] if func is torch.as_tensor else args[0].clone()
    else:
        made = func(*args, **kwargs)
    return _to((made,), {"device": device or DEVICE})


def _to(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """`Tensor.to`, in all its forms, if it reaches or leaves the simulated device."""
    tensor, *rest = args
    device, dtype = _device_of(kwargs.get("device")), kwargs.get("dtype")
    for value in (*rest, kwargs.get("other")):
        if isinstance(value, Tensor):
            device, dtype = value.device, value.dtype
        elif isinstance(value, torch.dtype):
            dtype = value
        else:
            device = _device_of(value) or device
    is_simulated = isinstance(tensor, SimulatedTensor)
    if not is_simulated and (device is None or device.type != "cuda"):
        return NotImplemented
    to_device = is_simulated if device is None else device.type == "cuda"
    flags = [value for value in rest if isinstance(value, bool)]
    non_blocking = kwargs.get("non_blocking", flags[0] if flags else False)
    copies = kwargs.get("copy", flags[1] if len(flags) > 1 else False)
    if is_simulated == to_device and dtype in (None, tensor.dtype) and not copies:
        return tensor
    target = DEVICE if to_device else HOST_DEVICE
    return aten._to_copy(
        tensor, dtype=dtype or tensor.dtype, device=target, non_blocking=non_blocking
    )


@contextmanager
def simulated_calls() -> Iterator[None]:
    """Run the block's calls of PyTorch, in this thread, with the simulated device."""
    with FunctionMode(), DISPATCH:
        yield
