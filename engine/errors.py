"""The engine's errors: those of `loradock.messages.errors`, and others that only an engine has.

Every error that a command can cause is an `EngineError`. Its message states what was found, what is
allowed and what to do.

    NoRoom
    ├── NoFreeSlot         L001  ValueError too: no slot, when a single adapter is activated
    └── HostOutOfMemory    L001  no host memory for weights or a blob
    AdapterDoesNotFit
    └── AdapterUnsound     L003  the weights file is malformed, or exceeds a bound
    UnknownAdapter
    └── NotRegistered      L006  ValueError too: an adapter that is to be pinned

    ModelRefused (a ValueError without a code: it ends the engine's start), ModelNotRun
"""

# Classes are named by what was found, as in the texts for clients.
# ruff: noqa: N818

from collections.abc import Sequence
from typing import Final

import torch

from loradock.messages.errors import (
    DETAIL_CHARACTERS_MAX,
    DETAILS_MAX,
    AdapterConfigRefused,
    AdapterDoesNotFit,
    AdapterNotFound,
    Conflict,
    ContextExceeded,
    DeviceOutOfMemory,
    EngineError,
    ErrorCode,
    LoradockError,
    Malformed,
    NoRoom,
    NotFinite,
    NotResident,
    NotServed,
    Overloaded,
    PathNotAllowed,
    UnknownAdapter,
    error_of,
    text_of,
)

__all__ = [
    "MODEL_CODE_ERRORS",
    "AdapterConfigRefused",
    "AdapterDoesNotFit",
    "AdapterNotFound",
    "AdapterUnsound",
    "Conflict",
    "ContextExceeded",
    "DeviceOutOfMemory",
    "EngineError",
    "HostOutOfMemory",
    "LoradockError",
    "Malformed",
    "ModelNotRun",
    "ModelRefused",
    "NoFreeSlot",
    "NoRoom",
    "NotFinite",
    "NotRegistered",
    "NotResident",
    "NotServed",
    "Overloaded",
    "PathNotAllowed",
    "UnknownAdapter",
    "bounded_details",
    "code_of",
    "details_of",
    "error_of",
    "is_device_out_of_memory",
    "is_out_of_memory",
    "text_of",
]


class NoFreeSlot(NoRoom, ValueError):
    """No slot is free for the one adapter that is to be activated."""


class HostOutOfMemory(NoRoom):
    """The host has no memory for an adapter's weights or its blob, page-locked or not."""


class AdapterUnsound(AdapterDoesNotFit):
    """The weights file is malformed, or exceeds a bound."""


class NotRegistered(UnknownAdapter, ValueError):
    """The adapter that is to be pinned is not on the host."""


class ModelRefused(ValueError):
    """The base model can't be served correctly by this engine."""


class ModelNotRun(ModelRefused):
    """The base model does not run when it is called as models of its kind are."""


MODEL_CODE_ERRORS: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""Exceptions of a model's own code when it is called in a way that it does not support."""


_DEVICE_OUT_OF_MEMORY: Final = (
    *("CUBLAS_STATUS_ALLOC_FAILED", "CUDNN_STATUS_ALLOC_FAILED"),
    # A library's handle takes memory too, and its creation says no more than this.
    *("CUBLAS_STATUS_NOT_INITIALIZED", "CUDNN_STATUS_NOT_INITIALIZED"),
    # PyTorch's and Triton's own texts for an error of the driver.
    *("CUDA error: out of memory", "Triton Error [CUDA]: out of memory"),
)


def is_device_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of device memory: of PyTorch, its libraries or Triton."""
    if isinstance(error, torch.OutOfMemoryError):
        return True
    return isinstance(error, RuntimeError) and any(t in str(error) for t in _DEVICE_OUT_OF_MEMORY)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error is a lack of memory; on a CPU, torch reports it as a plain
    RuntimeError.
    """
    if isinstance(error, MemoryError) or is_device_out_of_memory(error):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


def bounded_details(findings: Sequence[str]) -> tuple[str, ...]:
    """Return findings as a message may have them; the last one counts those that are left out."""
    lines = [finding[:DETAIL_CHARACTERS_MAX] for finding in findings[:DETAILS_MAX]]
    if len(findings) > DETAILS_MAX:
        lines[-1] = f"and {len(findings) - DETAILS_MAX + 1} more"
    return tuple(lines)


def details_of(error: BaseException) -> tuple[str, ...]:
    """Return the details of an error; none for one that is not the engine's."""
    return error.details if isinstance(error, LoradockError) else ()


def code_of(error: BaseException) -> ErrorCode:
    """Return the code to report for an error; an unexpected error counts as `ENGINE_GONE`."""
    if isinstance(error, LoradockError):
        return error.code
    if is_device_out_of_memory(error):
        return ErrorCode.DEVICE_OUT_OF_MEMORY
    return ErrorCode.NO_ROOM if is_out_of_memory(error) else ErrorCode.ENGINE_GONE
