"""The engine's errors, each with the code that a client receives.

Every error that a command can cause is an `EngineError`. Its text states what was found, what is
allowed and what to do.

    EngineError
    ├── NoRoom                 L001  every slot or host place is in use, and none can be freed
    ├── HostOutOfMemory        L001  no host memory for weights or a blob
    ├── AdapterNotFound        L002  the directory or a file is missing or can't be read
    ├── AdapterDoesNotFit      L003  rank, shape, module or dtype
    │   └── AdapterUnsound     L003  the weights file is malformed, or exceeds a bound
    ├── DeviceOutOfMemory      L004  no space in the arena, or no memory for the arena
    ├── AdapterConfigRefused   L005  the PEFT config is malformed or uses an unsupported feature
    ├── UnknownAdapter         L006  an adapter id that the engine does not have
    ├── NotResident            L007  an empty slot, or a stale generation
    ├── NotFinite              L008  NaN or infinity, also after rounding to the LoRA dtype
    ├── PathNotAllowed         L009  outside the adapter roots, a link, or not a regular file
    ├── Conflict               L010  files changed while being read, slot or id in use
    ├── EngineFault            L011  an unexpected failure
    ├── RequestRefused         L012  a prompt or sampling options that this model can't run
    ├── EngineOverloaded       L015  a queue reached its bound
    └── NotServed              L016  a task other than the engine's

    ModelRefused (no code: it ends the engine's start, before the first command)
"""

# Classes are named by what was found, as in the texts for clients; all derive from one error class.
# ruff: noqa: N818

from typing import ClassVar, Final

import torch

from messages.errors import ErrorCode


class EngineError(Exception):
    """A command was refused or failed, and changed nothing that a batch can see."""

    code: ClassVar[ErrorCode]


class NoRoom(EngineError):
    """No slot or host place is free, and none can be freed."""

    code = ErrorCode.NO_ROOM


class HostOutOfMemory(EngineError):
    """The host has no memory for an adapter's weights or its blob, page-locked or not."""

    code = ErrorCode.NO_ROOM


class AdapterNotFound(EngineError):
    """The adapter's directory or one of its files is missing or can't be read."""

    code = ErrorCode.NOT_FOUND


class AdapterDoesNotFit(EngineError):
    """The adapter's tensors don't fit this model or this engine's limits."""

    code = ErrorCode.DOES_NOT_FIT


class AdapterUnsound(AdapterDoesNotFit):
    """The weights file is malformed, or exceeds a bound."""


class DeviceOutOfMemory(EngineError):
    """The arena has no free space, or the device has no memory for the arena."""

    code = ErrorCode.DEVICE_OUT_OF_MEMORY


class AdapterConfigRefused(EngineError):
    """The PEFT config is malformed, or uses a feature that is not supported."""

    code = ErrorCode.CONFIG_REFUSED


class UnknownAdapter(EngineError):
    """A command names an adapter id that the engine does not have."""

    code = ErrorCode.UNKNOWN_ADAPTER


class NotResident(EngineError):
    """A slot is empty, or has another generation than the command names."""

    code = ErrorCode.NOT_RESIDENT


class NotFinite(EngineError):
    """A tensor contains NaN or infinity, or would after rounding to the LoRA dtype."""

    code = ErrorCode.NOT_FINITE


class PathNotAllowed(EngineError):
    """The path leaves the adapter roots, crosses a link, or is not a regular file."""

    code = ErrorCode.PATH_NOT_ALLOWED


class Conflict(EngineError):
    """A slot or id is in use, or a file changed while it was read."""

    code = ErrorCode.CONFLICT


class RequestRefused(EngineError):
    """A request that this model can't run: too long, unknown tokens, no tokenizer."""

    code = ErrorCode.MALFORMED


class EngineOverloaded(EngineError):
    """A queue of the engine is full."""

    code = ErrorCode.OVERLOADED


class NotServed(EngineError):
    """The engine was started for a task other than the request's."""

    code = ErrorCode.NOT_SERVED


class EngineFault(EngineError):
    """An unexpected failure."""

    code = ErrorCode.ENGINE_GONE


class ModelRefused(Exception):
    """The base model can't be served correctly by this engine."""


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


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error is a lack of memory; on a CPU, torch reports it as a plain RuntimeError."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)


_BY_CODE: Final = {
    kind.code: kind
    for kind in (
        *(NoRoom, AdapterNotFound, AdapterDoesNotFit, DeviceOutOfMemory, AdapterConfigRefused),
        *(UnknownAdapter, NotResident, NotFinite, PathNotAllowed, Conflict, RequestRefused),
        *(EngineOverloaded, NotServed),
    )
}


def error_of(code: ErrorCode, message: str) -> EngineError:
    """Return an error with this code; `EngineFault` for a code of no class."""
    return _BY_CODE.get(code, EngineFault)(message)


def code_of(error: BaseException) -> ErrorCode:
    """Return the code to report for an error; an unexpected error counts as `ENGINE_GONE`."""
    match error:
        case EngineError():
            return error.code
        case torch.OutOfMemoryError():
            return ErrorCode.DEVICE_OUT_OF_MEMORY
        case MemoryError():
            return ErrorCode.NO_ROOM
    return ErrorCode.ENGINE_GONE
