"""What can go wrong in the engine, each kind with the code that a client gets.

What it is: one small tree. What it is not: a place for texts; whoever raises says what was found,
what is allowed and what to do. One rule: every error a command can cause is an `EngineError`.

    EngineError
    ├── NoRoom                 L001  every slot or place is taken, and nobody may leave
    ├── HostOutOfMemory        L001  no room on the host for weights or a blob
    ├── AdapterNotFound        L002  directory or file is missing or can't be read
    ├── AdapterDoesNotFit      L003  rank, shape, module or dtype
    │   └── AdapterUnsound     L003  the weights file contradicts its own format
    ├── DeviceOutOfMemory      L004  no room in the arena, or no arena
    ├── AdapterConfigRefused   L005  the PEFT config asks for what is not supported, or is unsound
    ├── UnknownAdapter         L006  an id that the engine holds nothing for
    ├── NotResident            L007  an empty slot, or a stale generation
    ├── NotFinite              L008  NaN or infinity, also after rounding to the LoRA dtype
    ├── PathNotAllowed         L009  outside the adapter roots, a link, or not a regular file
    ├── Conflict               L010  files changed while being read, slot or id in use
    ├── EngineFault            L011  what nobody foresaw, as a manager's caller gets it
    ├── RequestRefused         L012  a prompt or a sampling that this model can't run
    ├── EngineOverloaded       L015  a queue reached its bound
    └── NotServed              L016  a task that this engine's model is not for

    ModelRefused (no code: it ends the start, before there are commands)
"""

# Kinds are named by what was found, as clients are told it; every one is an error by its base.
# ruff: noqa: N818

from typing import ClassVar, Final

import torch

from messages.errors import ErrorCode


class EngineError(Exception):
    """A command was refused or failed; nothing that a batch can see was changed by it."""

    code: ClassVar[ErrorCode]


class NoRoom(EngineError):
    """No slot or no place on the host is free, and nobody may leave."""

    code = ErrorCode.NO_ROOM


class HostOutOfMemory(EngineError):
    """The host has no room for an adapter's weights or its blob, page-locked or not."""

    code = ErrorCode.NO_ROOM


class AdapterNotFound(EngineError):
    """The adapter's directory or one of its files is missing or can't be read."""

    code = ErrorCode.NOT_FOUND


class AdapterDoesNotFit(EngineError):
    """The adapter's tensors don't fit this model or this engine's limits."""

    code = ErrorCode.DOES_NOT_FIT


class AdapterUnsound(AdapterDoesNotFit):
    """The weights file is no sound safetensors file, or passes a bound."""


class DeviceOutOfMemory(EngineError):
    """The arena has no room, or the device has no room for the arena."""

    code = ErrorCode.DEVICE_OUT_OF_MEMORY


class AdapterConfigRefused(EngineError):
    """The PEFT config asks for something that is not supported, or is no sound config."""

    code = ErrorCode.CONFIG_REFUSED


class UnknownAdapter(EngineError):
    """A command names an adapter id that the engine holds nothing for."""

    code = ErrorCode.UNKNOWN_ADAPTER


class NotResident(EngineError):
    """A slot is empty, or has another generation than the one that was named."""

    code = ErrorCode.NOT_RESIDENT


class NotFinite(EngineError):
    """A tensor holds NaN or infinity, or would after rounding to the LoRA dtype."""

    code = ErrorCode.NOT_FINITE


class PathNotAllowed(EngineError):
    """The path leads out of the adapter roots, over a link, or to no regular file."""

    code = ErrorCode.PATH_NOT_ALLOWED


class Conflict(EngineError):
    """Something else is where the command wants to be, or changed under its hands."""

    code = ErrorCode.CONFLICT


class RequestRefused(EngineError):
    """A generation asks for what this model can't run: too long, foreign tokens, no tokenizer."""

    code = ErrorCode.MALFORMED


class EngineOverloaded(EngineError):
    """A queue of the engine reached its bound."""

    code = ErrorCode.OVERLOADED


class NotServed(EngineError):
    """The engine was started for another task than the request's."""

    code = ErrorCode.NOT_SERVED


class EngineFault(EngineError):
    """Something failed that nobody foresaw; the log has it whole."""

    code = ErrorCode.ENGINE_GONE


class ModelRefused(Exception):
    """The base model's directory holds nothing that this engine can serve rightly."""


FOREIGN_FAILURES: Final = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RuntimeError,
    TypeError,
    ValueError,
)
"""What foreign model code raises where it is called in a way it does not support."""


_BY_CODE: Final = {
    kind.code: kind
    for kind in (
        *(NoRoom, AdapterNotFound, AdapterDoesNotFit, DeviceOutOfMemory, AdapterConfigRefused),
        *(UnknownAdapter, NotResident, NotFinite, PathNotAllowed, Conflict, RequestRefused),
        *(EngineOverloaded, NotServed),
    )
}


def error_of(code: ErrorCode, message: str) -> EngineError:
    """The error that a code stands for."""
    return _BY_CODE.get(code, EngineFault)(message)


def code_of(error: BaseException) -> ErrorCode:
    """What a client is told; what nobody foresaw counts as the engine not being able to answer."""
    match error:
        case EngineError():
            return error.code
        case torch.OutOfMemoryError():
            return ErrorCode.DEVICE_OUT_OF_MEMORY
        case MemoryError():
            return ErrorCode.NO_ROOM
    return ErrorCode.ENGINE_GONE
