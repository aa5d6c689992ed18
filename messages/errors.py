"""The error codes, their meanings, and the exceptions with a code, of the engine and of clients.

A code never changes its meaning; a new failure gets a new code. An engine raises an exception, the
controller passes on its code, message and details, and a client raises an exception of the same
class. Exceptions that programs handle are built-in exceptions too, so that `except ValueError` and
the like reach them without an import.

    LoradockError
    ├── EngineError               what an engine finds
    │   ├── NoRoom                L001  RuntimeError: every slot or host place is in use
    │   ├── AdapterNotFound       L002  FileNotFoundError: a directory or file is missing
    │   ├── AdapterDoesNotFit     L003  ValueError: rank, shape, module or dtype
    │   ├── DeviceOutOfMemory     L004  RuntimeError: no space in the arena, or no memory for it
    │   ├── AdapterConfigRefused  L005  ValueError: the PEFT config is malformed or not supported
    │   ├── UnknownAdapter        L006  KeyError: no adapter of this name or id
    │   ├── NotResident           L007  an empty slot, or a stale slot version
    │   ├── NotFinite             L008  ValueError: NaN or infinity, also after rounding
    │   ├── PathNotAllowed        L009  ValueError: outside the adapter roots, a link, not a file
    │   ├── Conflict              L010  files changed while being read, slot or name in use
    │   ├── EngineGone            L011  the engine ended, or did not answer in time
    │   ├── Malformed             L012  a request that is not valid, or that this model can't run
    │   │   └── ContextExceeded   L019  longer than the model's context
    │   ├── Overloaded            L015  a queue reached its bound
    │   └── NotServed             L016  a task other than the engine's
    ├── NotAllowed                L013
    ├── LogUnavailable            L014
    ├── HandlingFailed            L017
    └── ServerStops               L018
"""

# Classes are named by what happened, like the codes, and not with the suffix `Error`.
# ruff: noqa: N818

from collections.abc import Iterator
from enum import StrEnum
from typing import ClassVar, Final, NamedTuple, Self

DETAILS_MAX: Final = 128
DETAIL_CHARACTERS_MAX: Final = 320
"""Bounds on the findings that travel with an error."""


class ErrorCode(StrEnum):
    """Stable codes, one per kind of error."""

    NO_ROOM = "L001"
    NOT_FOUND = "L002"
    DOES_NOT_FIT = "L003"
    DEVICE_OUT_OF_MEMORY = "L004"
    CONFIG_REFUSED = "L005"
    UNKNOWN_ADAPTER = "L006"
    NOT_RESIDENT = "L007"
    NOT_FINITE = "L008"
    PATH_NOT_ALLOWED = "L009"
    CONFLICT = "L010"
    ENGINE_GONE = "L011"
    MALFORMED = "L012"
    NOT_ALLOWED = "L013"
    LOG_UNAVAILABLE = "L014"
    OVERLOADED = "L015"
    NOT_SERVED = "L016"
    HANDLING_FAILED = "L017"
    STOPPING = "L018"
    CONTEXT_EXCEEDED = "L019"


class Meaning(NamedTuple):
    """A code's description, and whether the same request can succeed later."""

    summary: str
    typical_cause: str
    retryable: bool


MEANINGS: Final[dict[ErrorCode, Meaning]] = {
    ErrorCode.NO_ROOM: Meaning(
        "no slot, or no space on the host", "everything is held or leased", True
    ),
    ErrorCode.NOT_FOUND: Meaning("weights or config file not found", "wrong path", False),
    ErrorCode.DOES_NOT_FIT: Meaning(
        "adapter doesn't fit this model", "rank, sizes or names of modules", False
    ),
    ErrorCode.DEVICE_OUT_OF_MEMORY: Meaning(
        "device out of memory", "the device is shared with another program", True
    ),
    ErrorCode.CONFIG_REFUSED: Meaning(
        "PEFT config refused", "a setting that is not served: use_qalora, ...", False
    ),
    ErrorCode.UNKNOWN_ADAPTER: Meaning("unknown adapter", "never loaded, or removed", False),
    ErrorCode.NOT_RESIDENT: Meaning(
        "not resident, or a stale generation", "mapping names an adapter without a slot", True
    ),
    ErrorCode.NOT_FINITE: Meaning("values not finite", "NaN or infinity in a tensor", False),
    ErrorCode.PATH_NOT_ALLOWED: Meaning(
        "path not allowed", "outside the adapter roots, or a link that leads out of them", False
    ),
    ErrorCode.CONFLICT: Meaning(
        "conflict", "name taken by other content, adapter in use or held", False
    ),
    ErrorCode.ENGINE_GONE: Meaning(
        "the engine is gone, or did not answer in time", "engine crash or overload", True
    ),
    ErrorCode.MALFORMED: Meaning(
        "the request is not valid", "a value out of bounds, or another version", False
    ),
    ErrorCode.NOT_ALLOWED: Meaning("not allowed", "client key without this right", False),
    ErrorCode.LOG_UNAVAILABLE: Meaning(
        "the log can't be written; reads still work", "full disk", True
    ),
    ErrorCode.OVERLOADED: Meaning("too many requests in flight", "a queue reached its bound", True),
    ErrorCode.NOT_SERVED: Meaning(
        "the engine's model has another task", "embedding requested from a generating model", False
    ),
    ErrorCode.HANDLING_FAILED: Meaning(
        "handling failed in the controller; nothing was changed", "a defect of LoRADock", False
    ),
    ErrorCode.STOPPING: Meaning(
        "the server is stopping", "`loradock stop` waits for requests in progress", True
    ),
    ErrorCode.CONTEXT_EXCEEDED: Meaning(
        "longer than the model's context",
        "a long prompt, or max_tokens that it leaves no space for",
        False,
    ),
}


class LoradockError(Exception):
    """A request that was refused or failed.

    `code` is stable, `message` is for people. `request_id` is the client's id of the request, empty
    if none was sent. `retry_after_s`: when the controller suggests another attempt; 0 if it
    suggests nothing. `details`: every finding, if the message names only the first of many; of the
    last failures only, so a repeated request can be answered without them.
    """

    code: ClassVar[ErrorCode]

    def __init__(self, message: str = "", request_id: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.request_id = request_id
        self.retry_after_s = 0.0
        self.details: tuple[str, ...] = ()

    @property
    def retryable(self) -> bool:
        """True if the same request can succeed later."""
        return MEANINGS[self.code].retryable

    def __str__(self) -> str:
        return f"{self.code} {MEANINGS[self.code].summary}: {self.message}"

    def about(self, subject: str) -> Self:
        """Return this error with a message that begins with what it is about."""
        error = type(self)(f"{subject}: {self.message}", self.request_id)
        error.details = self.details
        return error


class EngineError(LoradockError):
    """A command was refused or failed, and changed nothing that a batch can see."""


class NoRoom(EngineError, RuntimeError):
    """Every slot, or the host, is occupied by adapters that can't be evicted."""

    code = ErrorCode.NO_ROOM


class AdapterNotFound(EngineError, FileNotFoundError):
    """The adapter's directory or one of its files is missing or can't be read."""

    code = ErrorCode.NOT_FOUND


class AdapterDoesNotFit(EngineError, ValueError):
    """The adapter's rank, shapes or modules don't fit the model or the engine's limits."""

    code = ErrorCode.DOES_NOT_FIT


class DeviceOutOfMemory(EngineError, RuntimeError):
    """The arena has no free space, or the device has no memory for it."""

    code = ErrorCode.DEVICE_OUT_OF_MEMORY


class AdapterConfigRefused(EngineError, ValueError):
    """The PEFT config is malformed, or uses a feature that is not supported."""

    code = ErrorCode.CONFIG_REFUSED


class UnknownAdapter(EngineError, KeyError):
    """No adapter of this name or id is known."""

    code = ErrorCode.UNKNOWN_ADAPTER


class NotResident(EngineError):
    """The adapter is not in its slot any more."""

    code = ErrorCode.NOT_RESIDENT


class NotFinite(EngineError, ValueError):
    """A tensor contains NaN or infinity, or would after rounding to the LoRA dtype."""

    code = ErrorCode.NOT_FINITE


class PathNotAllowed(EngineError, ValueError):
    """The path leaves the adapter roots, crosses a link, or is not a regular file."""

    code = ErrorCode.PATH_NOT_ALLOWED


class Conflict(EngineError):
    """The name belongs to other content, the adapter is held or in use, or its files changed."""

    code = ErrorCode.CONFLICT


class EngineGone(EngineError):
    """The engine is gone or failed unexpectedly, or no answer came before the deadline."""

    code = ErrorCode.ENGINE_GONE


class Malformed(EngineError):
    """The request is invalid, this model can't run it, or its answer has the wrong type."""

    code = ErrorCode.MALFORMED


class ContextExceeded(Malformed):
    """The prompt, or prompt and `max_tokens` together, are longer than the model's context."""

    code = ErrorCode.CONTEXT_EXCEEDED


class Overloaded(EngineError):
    """Too many requests are in flight."""

    code = ErrorCode.OVERLOADED


class NotServed(EngineError):
    """The engine's model was loaded for a task other than the request's."""

    code = ErrorCode.NOT_SERVED


class NotAllowed(LoradockError):
    """The client's key doesn't have the right to make this request."""

    code = ErrorCode.NOT_ALLOWED


class LogUnavailable(LoradockError):
    """The controller can't write its log and refuses commands; queries still work."""

    code = ErrorCode.LOG_UNAVAILABLE


class HandlingFailed(LoradockError):
    """The controller could not handle the request, an internal error; nothing was changed."""

    code = ErrorCode.HANDLING_FAILED


class ServerStops(LoradockError):
    """The server is stopping: requests in progress end, and new ones are refused."""

    code = ErrorCode.STOPPING


def _tree(kind: type[LoradockError]) -> Iterator[type[LoradockError]]:
    for child in kind.__subclasses__():
        yield child
        yield from _tree(child)


ERRORS: Final[dict[ErrorCode, type[LoradockError]]] = {
    kind.code: kind for kind in _tree(LoradockError) if kind is not EngineError
}
"""The class of each code."""


def error_of(
    code: ErrorCode,
    message: str,
    request_id: str = "",
    *,
    retry_after_s: float = 0.0,
    details: tuple[str, ...] = (),
) -> LoradockError:
    """Return an error with this code."""
    error = ERRORS[code](message, request_id)
    error.retry_after_s, error.details = retry_after_s, details
    return error


def text_of(error: BaseException) -> str:
    """Return an error's message without its code, which is reported beside it."""
    return error.message if isinstance(error, LoradockError) else str(error)
