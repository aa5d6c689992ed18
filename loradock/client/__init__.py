"""The client library: `Client` blocks, `AsyncClient` is for asyncio.

Both have one method per request, streams of tokens and of events, and typed errors. A call ends
with its answer or a `LoradockError`, also if the controller or the engine restarts in between, and
never waits beyond its time limit.

    with Client(".loradock") as client:
        client.activate("upper", path="adapters/upper")
        print(client.generate("hello", adapter="upper", max_tokens=16).text())
        print(client.generate("what is <image>?", images=["cat.png"]).text())

A client is not thread-safe: use one per thread. Several generations of one client may be read
alternately; reading one also receives the chunks of the others.
"""

from typing import TYPE_CHECKING

from loradock.client.errors import (
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
from loradock.client.images import ImageSource
from loradock.client.pooling import Classification, Embedding
from loradock.client.streams import Gap, Snapshot
from loradock.messages.prompts import Structure

if TYPE_CHECKING:
    from loradock.client.async_client import AsyncClient, AsyncEventStream
    from loradock.client.async_generation import AsyncGeneration
    from loradock.client.calls import Timing
    from loradock.client.sync_client import Client, EventStream, Generation

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
    if name in ("AsyncClient", "AsyncEventStream", "AsyncGeneration"):
        from loradock.client import async_client  # noqa: PLC0415 - see above

        return getattr(async_client, name)
    if name in ("Client", "EventStream", "Generation"):
        from loradock.client import sync_client  # noqa: PLC0415 - see above

        return getattr(sync_client, name)
    if name == "Timing":
        from loradock.client.calls import Timing  # noqa: PLC0415 - see above

        return Timing
    raise AttributeError(f"module 'loradock.client' has no attribute {name!r}")
