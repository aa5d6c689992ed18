"""The client library: `Client` blocks, `AsyncClient` is for asyncio.

Both have one method per request, streams of tokens and of events, and typed errors. A call ends
with its answer or a `LoradockError`, also if the controller or the engine restarts in between, and
never waits beyond its time limit.

    with Client(".loradock") as client:
        client.activate("upper", path="adapters/upper")
        print(client.generate("hello", adapter="upper", max_tokens=16).text())
        print(client.generate("what is <image>?", images=["cat.png"]).text())

A client is not thread-safe: use one per thread. Several generations of one client can be read
alternately; reading one also receives the chunks of the others.
"""

from typing import TYPE_CHECKING

from loradock.client.arguments import ImageSource
from loradock.client.calls import Classification, Embedding, Timing
from loradock.client.streams import AsyncEventStream, Gap, Snapshot
from loradock.messages.errors import (
    ERRORS,
    AdapterConfigRefused,
    AdapterDoesNotFit,
    AdapterNotFound,
    Conflict,
    DeviceOutOfMemory,
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
from loradock.messages.prompts import Structure

if TYPE_CHECKING:
    from loradock.client.async_client import AsyncClient
    from loradock.client.client import Client, EventStream, Generation
    from loradock.client.methods import AsyncGeneration

__all__ = [
    "ERRORS",
    "AdapterConfigRefused",
    "AdapterDoesNotFit",
    "AdapterNotFound",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncGeneration",
    "Classification",
    "Client",
    "Conflict",
    "DeviceOutOfMemory",
    "Embedding",
    "EngineGone",
    "EventStream",
    "Gap",
    "Generation",
    "HandlingFailed",
    "ImageSource",
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
    "Snapshot",
    "Structure",
    "Timing",
    "UnknownAdapter",
]


def __getattr__(name: str) -> object:
    """Import a client class on first use: it loads ZeroMQ, which `loradock --help` avoids.

    Raises AttributeError for any other name.
    """
    if name == "AsyncClient":
        from loradock.client.async_client import AsyncClient  # noqa: PLC0415 - see above

        return AsyncClient
    if name in ("AsyncGeneration", "Client", "EventStream", "Generation"):
        from loradock.client import client  # noqa: PLC0415 - see above

        return getattr(client, name)
    raise AttributeError(f"module 'loradock.client' has no attribute {name!r}")
