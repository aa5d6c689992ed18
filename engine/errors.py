"""The engine's errors, each with the code that a client receives.

Every error that a command can cause is an `EngineError`. Its text states what was found, what is
allowed and what to do. Those that a program with adapters of its own handles are built-in
exceptions too, so that `except ValueError` and the like reach them without an import.

    EngineError
    ├── NoRoom                 L001  RuntimeError: every slot or host place is in use
    │   ├── NoFreeSlot         L001  ValueError too: no slot, where a single adapter is activated
    │   └── HostOutOfMemory    L001  no host memory for weights or a blob
    ├── AdapterNotFound        L002  FileNotFoundError: a directory or file is missing or unreadable
    ├── AdapterDoesNotFit      L003  ValueError: rank, shape, module or dtype
    │   └── AdapterUnsound     L003  the weights file is malformed, or exceeds a bound
    ├── DeviceOutOfMemory      L004  RuntimeError: no space in the arena, or no memory for it
    ├── AdapterConfigRefused   L005  ValueError: the PEFT config is malformed or not supported
    ├── UnknownAdapter         L006  KeyError: an adapter id that the engine does not have
    │   └── NotRegistered      L006  ValueError too: an adapter that is to be pinned
    ├── NotResident            L007  an empty slot, or a stale generation
    ├── NotFinite              L008  ValueError: NaN or infinity, also after rounding
    ├── PathNotAllowed         L009  ValueError: outside the adapter roots, a link, or no plain file
    ├── Conflict               L010  files changed while being read, slot or id in use
    ├── EngineFault            L011  an unexpected failure
    ├── RequestRefused         L012  a prompt or sampling options that this model can't run
    │   └── ContextExceeded    L019  longer than the model's context
    ├── EngineOverloaded       L015  a queue reached its bound
    └── NotServed              L016  a task other than the engine's

    ModelRefused (a ValueError without a code: it ends the engine's start), ModelNotRun
"""

# Classes are named by what was found, as in the texts for clients; all derive from one error class.
# ruff: noqa: N818

from collections.abc import Sequence
from typing import ClassVar, Final

import torch

from loradock.messages.errors import DETAIL_CHARACTERS_MAX, DETAILS_MAX, ErrorCode


class EngineError(Exception):
    """A command was refused or failed, and changed nothing that a batch can see."""

    code: ClassVar[ErrorCode]
    details: tuple[str, ...] = ()
    """Every finding, where the text names only the first of many."""

    def __str__(self) -> str:
        # `KeyError` quotes its text, and `OSError` expects an error number before it.
        return Exception.__str__(self)

    def about(self, subject: str) -> "EngineError":
        """Return this error with a text that begins with what it is about."""
        error = type(self)(f"{subject}: {self}")
        error.details = self.details
        return error


class NoRoom(EngineError, RuntimeError):
    """No slot or host place is free, and none can be freed."""

    code = ErrorCode.NO_ROOM


class NoFreeSlot(NoRoom, ValueError):
    """No slot is free for the one adapter that is to be activated."""


class HostOutOfMemory(NoRoom):
    """The host has no memory for an adapter's weights or its blob, page-locked or not."""


class AdapterNotFound(EngineError, FileNotFoundError):
    """The adapter's directory or one of its files is missing or can't be read."""

    code = ErrorCode.NOT_FOUND


class AdapterDoesNotFit(EngineError, ValueError):
    """The adapter's tensors don't fit this model or this engine's limits."""

    code = ErrorCode.DOES_NOT_FIT


class AdapterUnsound(AdapterDoesNotFit):
    """The weights file is malformed, or exceeds a bound."""


class DeviceOutOfMemory(EngineError, RuntimeError):
    """The arena has no free space, or the device has no memory for the arena."""

    code = ErrorCode.DEVICE_OUT_OF_MEMORY


class AdapterConfigRefused(EngineError, ValueError):
    """The PEFT config is malformed, or uses a feature that is not supported."""

    code = ErrorCode.CONFIG_REFUSED


class UnknownAdapter(EngineError, KeyError):
    """A command names an adapter id that the engine does not have."""

    code = ErrorCode.UNKNOWN_ADAPTER


class NotRegistered(UnknownAdapter, ValueError):
    """The adapter that is to be pinned is not on the host."""


class NotResident(EngineError):
    """A slot is empty, or has another generation than the command names."""

    code = ErrorCode.NOT_RESIDENT


class NotFinite(EngineError, ValueError):
    """A tensor contains NaN or infinity, or would after rounding to the LoRA dtype."""

    code = ErrorCode.NOT_FINITE


class PathNotAllowed(EngineError, ValueError):
    """The path leaves the adapter roots, crosses a link, or is not a regular file."""

    code = ErrorCode.PATH_NOT_ALLOWED


class Conflict(EngineError):
    """A slot or id is in use, or a file changed while it was read."""

    code = ErrorCode.CONFLICT


class RequestRefused(EngineError):
    """A request that this model can't run: unknown tokens, no tokenizer, unreadable images."""

    code = ErrorCode.MALFORMED


class ContextExceeded(RequestRefused):
    """The prompt, or prompt and `max_tokens` together, are longer than the model's context."""

    code = ErrorCode.CONTEXT_EXCEEDED


class EngineOverloaded(EngineError):
    """A queue of the engine is full."""

    code = ErrorCode.OVERLOADED


class NotServed(EngineError):
    """The engine was started for a task other than the request's."""

    code = ErrorCode.NOT_SERVED


class EngineFault(EngineError):
    """An unexpected failure."""

    code = ErrorCode.ENGINE_GONE


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
        *(ContextExceeded, EngineOverloaded, NotServed),
    )
}


def error_of(code: ErrorCode, message: str, details: tuple[str, ...] = ()) -> EngineError:
    """Return an error with this code; `EngineFault` for a code of no class."""
    error = _BY_CODE.get(code, EngineFault)(message)
    error.details = details
    return error


def bounded_details(findings: Sequence[str]) -> tuple[str, ...]:
    """Return findings as a message may have them; the last one counts those that are left out."""
    lines = [finding[:DETAIL_CHARACTERS_MAX] for finding in findings[:DETAILS_MAX]]
    if len(findings) > DETAILS_MAX:
        lines[-1] = f"and {len(findings) - DETAILS_MAX + 1} more"
    return tuple(lines)


def details_of(error: BaseException) -> tuple[str, ...]:
    """Return the details of an error; none for one that is not the engine's."""
    return error.details if isinstance(error, EngineError) else ()


def code_of(error: BaseException) -> ErrorCode:
    """Return the code to report for an error; an unexpected error counts as `ENGINE_GONE`."""
    match error:
        case EngineError():
            return error.code
        case torch.OutOfMemoryError():
            return ErrorCode.DEVICE_OUT_OF_MEMORY
    return ErrorCode.NO_ROOM if is_out_of_memory(error) else ErrorCode.ENGINE_GONE
