"""Launches of Triton kernels on the simulated device: run by the interpreter, with exact accesses.

A variant is what Triton compiles once: the kernel, its constants, the dtypes, and for each other
argument that may be specialized whether it is 1, a multiple of 16, or wider than 32 bits.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import numpy as np
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from triton.runtime import interpreter

from tests.support.device.graphs import record_step
from tests.support.device.record import RECORD
from tests.support.device.streams import MEMORY, Interval, current_stream
from tests.support.device.tensors import SimulatedTensor, skipping, unwrap

_UNIT: Final = 64
"""The bytes to which accesses are rounded."""
_LAUNCH_OPTIONS: Final = ("num_warps", "num_stages", "num_ctas")


class _Accessed(threading.local):
    """The units of memory that the running launch has read and written."""

    def __init__(self) -> None:
        self.reads: set[int] | None = None
        self.writes: set[int] | None = None


_accessed: Final = _Accessed()


def install_kernels() -> None:
    """Let the interpreter run kernels on simulated tensors."""
    function, builder = interpreter.InterpretedFunction, interpreter.InterpreterBuilder
    run, load, store = function.run, builder.create_masked_load, builder.create_masked_store

    def launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
        if not any(isinstance(arg, SimulatedTensor) for arg in args):
            return run(self, *args, grid=grid, warmup=warmup, **kwargs)
        RECORD.variants[variant_of(self, args, kwargs)] += 1
        if warmup:
            return None
        _launch(self, run, grid, args, kwargs)
        return None

    def masked_load(self: Any, pointers: Any, mask: Any, *rest: Any) -> Any:
        _note(_accessed.reads, pointers, mask)
        return load(self, pointers, mask, *rest)

    def masked_store(self: Any, pointers: Any, value: Any, mask: Any, *rest: Any) -> Any:
        _note(_accessed.writes, pointers, mask)
        return store(self, pointers, value, mask, *rest)

    function.run = launch
    builder.create_masked_load, builder.create_masked_store = masked_load, masked_store


def _launch(kernel: Any, run: Callable[..., Any], grid: Any, args: Any, kwargs: Any) -> None:
    name = kernel.fn.__name__
    tensors = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, Tensor)]
    RECORD.triton[name] += 1
    if not all(isinstance(tensor, SimulatedTensor) for tensor in tensors):
        RECORD.error("a kernel was given host memory", name)
    inner, options = [unwrap(arg) for arg in args], {k: unwrap(v) for k, v in kwargs.items()}

    def step() -> None:
        if skipping.is_on and name not in skipping.runs:
            return
        with _patched_once():
            run(kernel, *inner, grid=grid, warmup=False, **options)

    record_step(step)
    number = current_stream().launch()
    _accessed.reads, _accessed.writes = set(), set()
    try:
        with _disable_current_modes():
            step()
        for units, is_write in ((_accessed.reads, False), (_accessed.writes, True)):
            _add_accesses(
                {id(t): unwrap(t) for t in tensors}.values(), units, is_write, number, name
            )
    finally:
        _accessed.reads = _accessed.writes = None


@contextmanager
def _patched_once() -> Iterator[None]:
    """Let the interpreter patch Triton's language once per launch and module.

    It does so for each call of a device function, which takes a third of its time.
    """
    patch = interpreter._patch_lang
    scopes: dict[int, Any] = {}

    def patch_once(function: Any) -> Any:
        module = id(function.__globals__)
        if module not in scopes:
            scopes[module] = patch(function)
        return scopes[module]

    interpreter._patch_lang = patch_once
    try:
        yield
    finally:
        interpreter._patch_lang = patch


def _note(units: set[int] | None, pointers: Any, mask: Any) -> None:
    if units is not None:
        units.update(np.unique(pointers.data[mask.data.astype(bool)] // _UNIT).tolist())


def _add_accesses(tensors: Any, units: set[int], is_write: bool, launch: int, name: str) -> None:
    """Add one access per storage, of the intervals of it that were accessed."""
    storages = {tensor.untyped_storage().data_ptr(): tensor for tensor in tensors}
    touched = sorted(units)
    for start, tensor in storages.items():
        end = start + tensor.untyped_storage().nbytes()
        within = [
            unit * _UNIT
            for unit in touched
            if start <= unit * _UNIT + _UNIT - 1 and unit * _UNIT < end
        ]
        if within:
            intervals = _merged([(at - start, at - start + _UNIT) for at in within])
            MEMORY.access(tensor, is_write, launch, name, intervals)


def _merged(intervals: list[Interval]) -> tuple[Interval, ...]:
    merged = [intervals[0]]
    for first, end in intervals[1:]:
        if first == merged[-1][1]:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((first, end))
    return tuple(merged)


def variant_of(kernel: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[object, ...]:
    """Return what distinguishes the compiled kernel of a launch from others of the same kernel."""
    hints = kernel.fn.__annotations__
    fixed = kernel.kwargs.get("do_not_specialize") or ()
    given = dict(zip(kernel.arg_names, args, strict=False)) | kwargs
    parts: list[object] = [kernel.fn.__name__]
    for index, name in enumerate(kernel.arg_names):
        value = given.get(name)
        is_constant = "constexpr" in str(hints.get(name, ""))
        is_fixed = name in fixed or index in fixed
        parts.append((name, value) if is_constant else (name, _kind_of(value, is_fixed)))
    return (*parts, *((name, given[name]) for name in _LAUNCH_OPTIONS if name in given))


def _kind_of(value: Any, is_fixed: bool) -> object:
    if isinstance(value, Tensor):
        return (value.dtype, not is_fixed and value.data_ptr() % 16 == 0)
    if isinstance(value, bool) or not isinstance(value, int):
        return type(value).__name__
    width = "i32" if -(1 << 31) <= value < 1 << 31 else "i64"
    if is_fixed:
        return width
    return "1" if value == 1 else (width, value % 16 == 0)
