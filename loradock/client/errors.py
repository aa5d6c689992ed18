"""The errors that a client of the controller raises: those of `loradock.messages.errors`."""

from loradock.messages.errors import (
    ERRORS,
    AdapterConfigRefused,
    AdapterDoesNotFit,
    AdapterNotFound,
    Conflict,
    ContextExceeded,
    DeviceOutOfMemory,
    EngineError,
    EngineGone,
    HandlingFailed,
    LogUnavailable,
    LoradockError,
    Malformed,
    NoRoom,
    NotAllowed,
    NotFinite,
    NotResident,
    NotServed,
    Overloaded,
    PathNotAllowed,
    ServerStops,
    UnknownAdapter,
)
from loradock.messages.requests import Refused

__all__ = [
    "ERRORS",
    "AdapterConfigRefused",
    "AdapterDoesNotFit",
    "AdapterNotFound",
    "Conflict",
    "ContextExceeded",
    "DeviceOutOfMemory",
    "EngineError",
    "EngineGone",
    "HandlingFailed",
    "LogUnavailable",
    "LoradockError",
    "Malformed",
    "NoRoom",
    "NotAllowed",
    "NotFinite",
    "NotResident",
    "NotServed",
    "Overloaded",
    "PathNotAllowed",
    "ServerStops",
    "UnknownAdapter",
    "error_of",
]


def error_of(refused: Refused) -> LoradockError:
    """Return the exception for a refusal."""
    error = ERRORS[refused.code](refused.message, refused.request_id)
    error.retry_after_s = refused.retry_after_ms / 1000
    error.details = refused.details
    return error
