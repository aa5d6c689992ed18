"""The client library: `Client` for programs that wait, `AsyncClient` for asyncio.

What it is: one method a request, streams of tokens and of events, typed errors. What it is not: a
part of the controller; it knows the messages and ZeroMQ and nothing else of ours. One rule: a call
ends in its answer or in a `LoradockError`, whatever restarts in between, and never waits for ever.

    with Client(".loradock") as client:
        client.activate("upper", path="adapters/upper")
        print(client.generate("hello", adapter="upper", max_tokens=16).text())
        print(client.generate("what is <image>?", images=["cat.png"]).text())

A client is not thread-safe: use one a thread. Several generations of one client may be read in
turns; each reads on for all.
"""

from controller.client_async import AsyncClient, AsyncEventStream, AsyncGeneration
from controller.client_blocking import Client, EventStream, Generation
from controller.client_calls import Timing
from controller.client_errors import (
    ERRORS,
    AdapterNotFound,
    ConfigRefused,
    Conflict,
    DeviceOutOfMemory,
    DoesNotFit,
    EngineGone,
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
    UnknownAdapter,
)
from controller.client_images import ImageSource
from controller.client_pooling import Classification, Embedding
from controller.client_streams import Gap

__all__ = [
    "ERRORS",
    "AdapterNotFound",
    "AsyncClient",
    "AsyncEventStream",
    "AsyncGeneration",
    "Classification",
    "Client",
    "ConfigRefused",
    "Conflict",
    "DeviceOutOfMemory",
    "DoesNotFit",
    "Embedding",
    "EngineGone",
    "EventStream",
    "Gap",
    "Generation",
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
    "Timing",
    "UnknownAdapter",
]
