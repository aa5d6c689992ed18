"""A controller without log and engine, which answers at once: for figures of the gateway.

`python -m benchmarks.standin_controller DIRECTORY ADAPTERS`. A generation whose prompt is `idle` is
never answered; any other one ends after one token. An input's vector has 4,096 numbers.
"""

import math
import struct
import sys
from pathlib import Path
from typing import Final

import zmq

from loradock.messages.ids import NO_SLOT
from loradock.messages.requests import (
    AdapterShown,
    AdaptersPage,
    Embed,
    EventsFetched,
    FetchEvents,
    Generate,
    GenerationDone,
    ListAdapters,
    PoolingDone,
    Reply,
    Request,
    ShowAdapter,
    ShowStatus,
    StatusShown,
    TokensStreamed,
    VectorsStreamed,
)
from loradock.messages.views import AdapterView, TierView
from loradock.messages.wire import EVENTS, REPLIES, REQUESTS

IDLE: Final = "idle"
_VECTOR: Final = struct.pack("<4096f", *(math.sin(number) for number in range(4096)))
_VECTORS: Final = 32
"""The most vectors of a message."""
_BEAT_MS: Final = 200
_EPOCH: Final = 1


def main() -> None:
    """Serve until the process is ended."""
    directory, adapters = Path(sys.argv[1]), int(sys.argv[2])
    views = tuple(_view(number) for number in range(adapters))
    with zmq.Context() as context:
        router, pub = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        for socket, name in ((router, "requests"), (pub, "events")):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.bind(f"ipc://{directory}/run/{name}.sock")
        while True:
            if not router.poll(_BEAT_MS):
                pub.send(EVENTS.encode((), _EPOCH, 0))
                continue
            route, frame = router.recv_multipart()
            for request in REQUESTS.decode(frame).message:
                if replies := _replies(request, views):
                    router.send_multipart([route, REPLIES.encode(replies, _EPOCH)])


def _view(number: int) -> AdapterView:
    name = f"adapter-{number:06}"
    return AdapterView(
        adapter=name,
        adapter_id=number + 1,
        state="pinned",
        goal="pinned",
        path=name,
        fingerprint="ab" * 16,
        rank=16,
        slot=NO_SLOT,
        generation=0,
        held=False,
        retired=False,
        leases=0,
        waiting=0,
        host_bytes=0,
        pinned_bytes=1 << 20,
        device_bytes=0,
        uses=1,
        loads=1,
        hits=0,
        evictions=0,
        failures=0,
        last_used_ns=1,
    )


def _replies(request: Request, views: tuple[AdapterView, ...]) -> tuple[Reply, ...]:
    request_id = request.request_id
    reply: Reply
    match request:
        case Generate(prompt=prompt) if prompt == IDLE:
            return ()
        case Generate(adapter=adapter):
            done = GenerationDone(request_id, adapter, "stop", 5, 1)
            return TokensStreamed(request_id, 0, (1,), "ok", finish_reason="stop"), done
        case Embed(adapter=adapter, inputs=inputs):
            count = len(inputs)
            return (
                *(
                    VectorsStreamed(request_id, at, (_VECTOR,) * min(_VECTORS, count - at))
                    for at in range(0, count, _VECTORS)
                ),
                PoolingDone(request_id, adapter, "embed", count, count),
            )
        case ListAdapters(after=after, limit=limit):
            later = [view for view in views if view.adapter > after]
            reply = AdaptersPage(request_id, tuple(later[:limit]), 0, len(later) > limit)
        case ShowAdapter():
            reply = AdapterShown(request_id, views[0])
        case FetchEvents():
            reply = EventsFetched(request_id, (), 0)
        case ShowStatus():
            reply = _status(request_id, len(views))
        case _:
            return ()
    return (reply,)


def _status(request_id: str, adapters: int) -> StatusShown:
    return StatusShown(
        request_id,
        epoch=_EPOCH,
        seq=1,
        digest="",
        policy="lru",
        engine_id="stand-in",
        engine_pid=0,
        model="stand-in",
        adapters=adapters,
        requests=0,
        operations=0,
        answered=0,
        refused=0,
        tiers=(TierView("device", 0, 8, 0, 1 << 30),),
        events_seq=0,
    )


if __name__ == "__main__":
    main()
