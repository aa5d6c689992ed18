"""Types of identifiers and numbers, with the bounds that decoding enforces.

An identifier that decoding accepts is safe to log and to show. Inside the controller, its log and
the engine the id of a request is `CLIENT:ID`: `ID` is what the client chose, `CLIENT` its name, so
that no client can name another's request.
"""

from base64 import b64encode
from hashlib import blake2b
from typing import Annotated, Final, Literal

from msgspec import Meta

# ``\Z`` and not ``$``, which also accepts a trailing newline; ".." can't leave a directory.
NAME_PATTERN: Final = r"^(?!.*\.\.)(?!\.\Z)[A-Za-z0-9._-]{1,128}\Z"

AdapterName = Annotated[str, Meta(pattern=NAME_PATTERN)]
"""A client's name for an adapter, across all its versions."""

AdapterId = Annotated[int, Meta(ge=0, le=2**53)]
"""One version of an adapter: other bytes of the same name have another id. 0: base model."""

REQUEST_PATTERN: Final = r"^[!-~]{1,96}\Z"

RequestId = Annotated[str, Meta(pattern=REQUEST_PATTERN)]
"""Chosen by the client and never used twice; a repeated request gets its first answer again.

A client's own id has at most 64 characters. Inside the controller, in the log and in the engine it
follows the client's name (`scoped`).
"""

OpId = Annotated[int, Meta(ge=0, le=2**53)]
"""One operation of the engine, numbered by the controller; ids only increase."""

Slot = Annotated[int, Meta(ge=-1, le=65_535)]
"""A row of the device directory; -1 means none (the base model)."""

Generation = Annotated[int, Meta(ge=0, le=2**53)]
"""Incremented by every write of a slot, so that a stale command is detected; 0: never written."""

Seq = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""A position in a numbered stream: log records, published events, frames of one link."""

Epoch = Annotated[int, Meta(ge=0, le=2**63 - 1)]
"""Number of a start of the controller; increases with every start. 0: not known yet."""

TimeoutMs = Annotated[int, Meta(ge=0, le=3_600_000)]
"""Time limit of a request, in milliseconds; 0 is the controller's default."""

Path = Annotated[str, Meta(max_length=4096)]
"""An adapter's directory, absolute or relative to an adapter root; empty: the adapter's name."""

Bytes = Annotated[int, Meta(ge=0, le=2**53)]
"""A size in bytes."""

TraceParent = Annotated[str, Meta(max_length=55)]
"""The span that caused a request, as a W3C `traceparent`; empty for none. It is never logged."""

EndClient = Annotated[str, Meta(max_length=64)]
"""The client for which another one, as the gateway, makes a request; empty: it is its own.

Requests of different clients have equal shares of an adapter's turns. It is never logged.
"""

AdapterState = Literal["unregistered", "evicted", "cpu-cached", "pinned", "gpu-slot"]

UNREGISTERED: Final = "unregistered"
EVICTED: Final = "evicted"
CPU_CACHED: Final = "cpu-cached"
PINNED: Final = "pinned"
GPU_SLOT: Final = "gpu-slot"

NO_SLOT: Final = -1
BASE_MODEL: Final = 0

_NAME_BYTES: Final = 12
_USER_BYTES_MAX: Final = blake2b.PERSON_SIZE


def client_name(token: bytes, user: str) -> str:
    """Return the name, 16 characters, of the client with a token; `user` is the user of its key.

    The token is secret: it proves that a frame is of the client. The name is not.
    """
    person = user.encode()
    if len(person) > _USER_BYTES_MAX:
        person = blake2b(person, digest_size=_USER_BYTES_MAX).digest()
    name = blake2b(token, person=person, digest_size=_NAME_BYTES).digest()
    # Without a dash: an id that begins with one would be an option of a command line.
    return b64encode(name, b"._").decode()


def scoped(client: str, request_id: RequestId) -> RequestId:
    """Return the id of a client's request inside the controller."""
    return f"{client}:{request_id}"


def client_of(request_id: RequestId) -> str:
    """Return the client's name; empty for an id that the controller made."""
    client, colon, _ = request_id.partition(":")
    return client if colon else ""


def unscoped(request_id: RequestId) -> RequestId:
    """Return the id that the client chose."""
    client, colon, own = request_id.partition(":")
    return own if colon else client
