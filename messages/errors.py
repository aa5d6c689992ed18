"""The error codes for clients, and their meanings.

A code never changes its meaning; a new failure gets a new code. Exceptions are each package's own;
they carry a code.
"""

from enum import StrEnum
from typing import Final, NamedTuple

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
    """A code's description, and whether the same request may succeed later."""

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
