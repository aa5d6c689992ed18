"""The errors that a client of the controller raises, one class per error code.

The codes and their meanings are in `messages/errors.py`. Errors about adapters have the same names
and the same built-in base classes as in the engine, so that one handler serves both.

    LoradockError
    ├── NoRoom                L001  RuntimeError
    ├── AdapterNotFound       L002  FileNotFoundError
    ├── AdapterDoesNotFit     L003  ValueError
    ├── DeviceOutOfMemory     L004  RuntimeError
    ├── AdapterConfigRefused  L005  ValueError
    ├── UnknownAdapter        L006  KeyError
    ├── NotResident           L007
    ├── NotFinite             L008  ValueError
    ├── PathNotAllowed        L009  ValueError
    ├── Conflict              L010
    ├── EngineGone            L011  also: no answer in time
    ├── Malformed             L012
    │   └── ContextExceeded   L019
    ├── NotAllowed            L013
    ├── LogUnavailable        L014
    ├── Overloaded            L015
    ├── NotServed             L016
    ├── HandlingFailed        L017
    └── ServerStops           L018
"""
# Classes are named by what happened, like the codes, and not with the suffix `Error`.
# ruff: noqa: N818

from typing import ClassVar, Final

from loradock.messages.errors import MEANINGS, ErrorCode
from loradock.messages.requests import Refused


class LoradockError(Exception):
    """A request that was refused or failed.

    `code` is stable, `message` is for people. `request_id` is the client's id of the request, empty
    if none was sent. `retry_after_s`: when the controller suggests another attempt; 0 where it
    suggests nothing. `details`: every finding, where the message names only the first of many; of
    the last failures only, so a repeated request may be answered without them.
    """

    code: ClassVar[ErrorCode]

    def __init__(self, message: str, request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.retry_after_s = 0.0
        self.details: tuple[str, ...] = ()

    @property
    def retryable(self) -> bool:
        """Whether the same request may succeed later."""
        return MEANINGS[self.code].retryable

    def __str__(self) -> str:
        return f"{self.code} {MEANINGS[self.code].summary}: {self.message}"


class NoRoom(LoradockError, RuntimeError):
    """Every slot, or the host, is occupied by adapters that can't be evicted."""

    code = ErrorCode.NO_ROOM


class AdapterNotFound(LoradockError, FileNotFoundError):
    """The adapter's weights or config file was not found."""

    code = ErrorCode.NOT_FOUND


class AdapterDoesNotFit(LoradockError, ValueError):
    """The adapter's rank, shapes or modules don't fit the model."""

    code = ErrorCode.DOES_NOT_FIT


class DeviceOutOfMemory(LoradockError, RuntimeError):
    """The device had not enough free memory."""

    code = ErrorCode.DEVICE_OUT_OF_MEMORY


class AdapterConfigRefused(LoradockError, ValueError):
    """The adapter's PEFT configuration contains something that is not supported."""

    code = ErrorCode.CONFIG_REFUSED


class UnknownAdapter(LoradockError, KeyError):
    """No adapter of this name is known."""

    code = ErrorCode.UNKNOWN_ADAPTER


class NotResident(LoradockError):
    """The adapter was no longer in its slot."""

    code = ErrorCode.NOT_RESIDENT


class NotFinite(LoradockError, ValueError):
    """The adapter's weights contain NaN or infinity."""

    code = ErrorCode.NOT_FINITE


class PathNotAllowed(LoradockError, ValueError):
    """The adapter's path is outside the adapter roots."""

    code = ErrorCode.PATH_NOT_ALLOWED


class Conflict(LoradockError):
    """The name belongs to other content, or the adapter is held or in use."""

    code = ErrorCode.CONFLICT


class EngineGone(LoradockError):
    """The engine is gone, or no answer came before the deadline."""

    code = ErrorCode.ENGINE_GONE


class Malformed(LoradockError):
    """The request is invalid, or its answer has the wrong type."""

    code = ErrorCode.MALFORMED


class ContextExceeded(Malformed):
    """The prompt, or prompt and `max_tokens` together, are longer than the model's context."""

    code = ErrorCode.CONTEXT_EXCEEDED


class NotAllowed(LoradockError):
    """The client's key doesn't have the right to make this request."""

    code = ErrorCode.NOT_ALLOWED


class LogUnavailable(LoradockError):
    """The controller can't write its log and refuses commands; queries still work."""

    code = ErrorCode.LOG_UNAVAILABLE


class Overloaded(LoradockError):
    """Too many requests are in flight."""

    code = ErrorCode.OVERLOADED


class NotServed(LoradockError):
    """The engine's model was not loaded for this kind of request."""

    code = ErrorCode.NOT_SERVED


class HandlingFailed(LoradockError):
    """The controller could not handle the request, a defect; nothing was changed."""

    code = ErrorCode.HANDLING_FAILED


class ServerStops(LoradockError):
    """The server is stopping: requests in progress end, and new ones are refused."""

    code = ErrorCode.STOPPING


ERRORS: Final[dict[ErrorCode, type[LoradockError]]] = {
    error.code: error
    for error in (
        NoRoom,
        AdapterNotFound,
        AdapterDoesNotFit,
        DeviceOutOfMemory,
        AdapterConfigRefused,
        UnknownAdapter,
        NotResident,
        NotFinite,
        PathNotAllowed,
        Conflict,
        EngineGone,
        Malformed,
        NotAllowed,
        LogUnavailable,
        Overloaded,
        NotServed,
        HandlingFailed,
        ServerStops,
        ContextExceeded,
    )
}


def error_of(refused: Refused) -> LoradockError:
    """Return the exception for a refusal."""
    error = ERRORS[refused.code](refused.message, refused.request_id)
    error.retry_after_s = refused.retry_after_ms / 1000
    error.details = refused.details
    return error
