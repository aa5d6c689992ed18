"""A small controller without adapters or engine, for tests of its clients.

It has the guarantees that a client relies on: a repeated request gets its first answer, events are
numbered without end, a repeated generation is streamed again from its first token. A test can make
it lose replies, lose chunks, be silent, or restart.
"""

import struct
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

import msgspec
import zmq

from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.prompts import MAX_TOKENS_DEFAULT
from loradock.messages.views import (
    AdapterUse,
    AdapterView,
    EngineStatistics,
    Placement,
    PoolingTask,
    TierView,
    TokenLogprob,
)
from loradock.messages.wire import EVENTS, REPLIES, REQUESTS
from tests.support.waiting import HANG_S

BEAT_S = 0.05
TOKEN = slice(20, 32)
STATISTICS = EngineStatistics(
    kernels="cpu", kv_layout="paged", kv_bytes=1 << 20, kv_bytes_max=4 << 20,
    kv_blocks=64, kv_block_tokens=16, shares_prefixes=True,
)  # fmt: skip


def view(name: str, state: str = "gpu-slot", **changes: Any) -> AdapterView:
    fields: dict[str, Any] = {
        "adapter": name,
        "adapter_id": 1,
        "state": state,
        "goal": state,
        "path": f"adapters/{name}",
        "fingerprint": "ab" * 16,
        "rank": 8,
        "slot": 2 if state == "gpu-slot" else -1,
        "generation": 5,
        "held": False,
        "retired": False,
        "leases": 0,
        "waiting": 0,
        "host_bytes": 0,
        "pinned_bytes": 4096,
        "device_bytes": 4096,
        "uses": 3,
        "loads": 1,
        "hits": 2,
        "evictions": 0,
        "failures": 0,
        "last_used_ns": 1_700_000_000_000_000_000,
    }
    return AdapterView(**(fields | changes))


PROMPT = (97, 98, 99, 100)
"""The tokens of every prompt, as log-probabilities are reported for them."""


def _logprob(token: int, top: int) -> TokenLogprob:
    """Return the entry of a token, which is the second most likely one."""
    best = ((token + 1, -0.25), (token, -1.5), *((200 + at, -2.0 - at) for at in range(top)))
    return TokenLogprob(token, -1.5, 2, best[:top])


Answer = Callable[[Any], rq.Reply | None]
Send = Callable[[rq.Reply], None]
Output = Sequence[tuple[int, str]]


class StandIn:
    """Serves `directory` from a thread; `with` starts and stops it.

    `lose`: final replies to drop before one is sent; `lose_chunks`: the same for chunks of tokens.
    `answers`: request type -> a function of the request that returns the reply, None for silence.
    """

    def __init__(self, directory: Path, output: Output = ((1, "o"), (2, "n"), (3, "e"))) -> None:
        self.directory = Path(directory)
        self.output: Output = output
        self.adapters = {"upper": view("upper"), "reverse": view("reverse", "evicted")}
        self.answers: dict[type, Answer] = {}
        # Fields of the status that differ from the usual ones.
        self.status_changes: dict[str, Any] = {}
        self.lose = 0
        self.lose_chunks = 0
        self.done_first = False
        self.epoch = 1
        self.first_seq = 1
        self.published: list[ev.Published] = []
        self.received: list[Any] = []
        # Replies that precede the next final one.
        self.extra_replies: list[rq.Reply] = []
        self._kept: dict[tuple[bytes, str], rq.Reply] = {}
        self._streamed: dict[tuple[bytes, str], int] = {}
        self._queue: list[tuple[ev.Published, ...]] = []
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stop()

    def start(self) -> None:
        (self.directory / "run").mkdir(parents=True, exist_ok=True)
        self._stop.clear()
        bound = threading.Event()
        self._thread = threading.Thread(target=self._serve, args=(bound,))
        self._thread.start()
        assert bound.wait(HANG_S)

    def stop(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def restart(self) -> None:
        """Start a new epoch: answers and events are kept, routes are not."""
        self.stop()
        self.epoch += 1
        self.start()

    def publish(self, *happened: ev.Event, silently: bool = False) -> None:
        """Number these events and send them in one frame; `silently` loses that frame."""
        batch = []
        for event in happened:
            batch.append(ev.Published(len(self.published) + 1, time.time_ns(), event))
            self.published.append(batch[-1])
        if not silently:
            self._queue.append(tuple(batch))

    @property
    def answered(self) -> int:
        """The number of requests that were answered, repeats not counted."""
        return len(self._kept)

    def requests(self, kind: Any) -> list[Any]:
        """The requests of a type that arrived, each once, although clients repeat slow ones."""
        return list({one.request_id: one for one in self.repeated(kind)}.values())

    def repeated(self, kind: Any) -> list[Any]:
        """The requests of a type that arrived, with each repeat."""
        return [request for request in self.received if isinstance(request, kind)]

    def _serve(self, bound: threading.Event) -> None:
        with zmq.Context() as context:
            router = context.socket(zmq.ROUTER)
            pub = context.socket(zmq.PUB)
            for socket, name in ((router, "requests"), (pub, "events")):
                socket.linger = 0
                socket.bind(f"ipc://{self.directory}/run/{name}.sock")
            bound.set()
            beat = 0.0
            while not self._stop.is_set():
                while self._queue:
                    self._send_events(pub, self._queue.pop(0))
                if time.monotonic() >= beat:
                    beat = time.monotonic() + BEAT_S
                    self._send_events(pub, ())
                if router.poll(5):
                    route, frame = router.recv_multipart()
                    for request in REQUESTS.decode(frame).message:
                        self._on_request(router, route, frame[TOKEN], request)
            router.close()
            pub.close()

    def _send_events(self, pub: Any, batch: tuple[ev.Published, ...]) -> None:
        seq = batch[-1].seq if batch else len(self.published)
        pub.send(EVENTS.encode(batch, self.epoch, seq))

    def _on_request(self, router: Any, route: bytes, token: bytes, request: Any) -> None:
        self.received.append(request)

        def send(reply: rq.Reply) -> None:
            router.send_multipart([route, REPLIES.encode((reply,), self.epoch, 0)])

        key = (token, request.request_id)
        answered = key in self._kept
        if not answered:
            new = self._answer(request)
            if new is None:
                return
            self._kept[key] = new
        reply = self._kept[key]
        done = reply if isinstance(reply, rq.GenerationDone | rq.PoolingDone) else None
        done_first = answered or self.done_first
        if done is not None and not done_first:
            self._stream(send, key, done, request)
        while self.extra_replies:
            send(self.extra_replies.pop(0))
        if self.lose:
            self.lose -= 1
        else:
            send(reply)
        if done is not None and done_first:
            self._stream(send, key, done, request)

    def _stream(
        self,
        send: Send,
        key: tuple[bytes, str],
        done: rq.GenerationDone | rq.PoolingDone,
        request: Any,
    ) -> None:
        # Each repetition is sent in larger chunks than the one before.
        size = self._streamed[key] = self._streamed.get(key, 0) + 1
        if isinstance(done, rq.PoolingDone):
            self._stream_vectors(send, done, size)
            return
        count = request.sampling.n
        for index in range(count):
            output = self.output[: done.output_tokens // count]
            for start in range(0, len(output), size):
                message = self._chunk(request, output, start, size, index)
                reason = done.finish_reason if start + size >= len(output) else None
                if self.lose_chunks:
                    self.lose_chunks -= 1
                else:
                    send(msgspec.structs.replace(message, finish_reason=reason))

    def _chunk(
        self, request: rq.Generate, output: Output, start: int, size: int, index: int
    ) -> rq.TokensStreamed:
        part, sampling = output[start : start + size], request.sampling
        tokens = tuple(token for token, _ in part)
        text = "".join(text for _, text in part)
        message = rq.TokensStreamed(request.request_id, start, tokens, text, index)
        if sampling.logprobs is not None:
            scores = tuple(_logprob(token, sampling.logprobs) for token in tokens)
            message = msgspec.structs.replace(message, logprobs=scores)
        if sampling.prompt_logprobs is not None and start == index == 0:
            scores = tuple(_logprob(token, sampling.prompt_logprobs) for token in PROMPT[1:])
            message = msgspec.structs.replace(message, prompt_logprobs=(None, *scores))
        return message

    def _stream_vectors(self, send: Send, done: rq.PoolingDone, size: int) -> None:
        labels = ("good", "bad") if done.task == "classify" else ()
        for start in reversed(range(0, done.inputs, size)):
            places = range(start, min(start + size, done.inputs))
            vectors = tuple(struct.pack("<2f", place, 1.5) for place in places)
            if self.lose_chunks:
                self.lose_chunks -= 1
            else:
                send(rq.VectorsStreamed(done.request_id, start, vectors, labels))

    def _prefetch(self, request: rq.PrefetchAdapter) -> rq.Reply:
        return rq.PrefetchAccepted(request.request_id, request.adapter, "evicted", request.target)

    def _answer(self, request: Any) -> rq.Reply | None:
        special = self.answers.get(type(request))
        if special is not None:
            return special(request)
        usual: dict[type, Answer] = {
            rq.ListAdapters: self._list,
            rq.ShowStatus: self._status,
            rq.FetchEvents: self._fetch,
            rq.PrefetchAdapter: self._prefetch,
            rq.ActivateBatch: self._place,
            rq.Generate: self._generate,
            rq.Embed: lambda r: self._pool(r, "embed"),
            rq.Classify: lambda r: self._pool(r, "classify"),
            rq.CancelGeneration: lambda r: rq.CancelDone(r.request_id, r.target, True),
        }
        return usual.get(type(request), self._answer_about)(request)

    def _list(self, request: rq.ListAdapters) -> rq.Reply:
        views = tuple(self.adapters[name] for name in sorted(self.adapters))
        return rq.AdaptersListed(request.request_id, views, len(self.published))

    def _place(self, request: rq.ActivateBatch) -> rq.Reply:
        places = tuple(Placement(name, i, 7) for i, name in enumerate(request.adapters))
        return rq.BatchDone(request.request_id, places)

    def _generate(self, request: rq.Generate) -> rq.Reply:
        sampling = request.sampling
        count = min(len(self.output), sampling.max_tokens or MAX_TOKENS_DEFAULT) * sampling.n
        return rq.GenerationDone(request.request_id, request.adapter, "length", 4, count)

    def _pool(self, request: rq.Embed | rq.Classify, task: PoolingTask) -> rq.Reply:
        return rq.PoolingDone(request.request_id, request.adapter, task, len(request.inputs), 5)

    def _answer_about(self, request: Any) -> rq.Reply:
        known = self.adapters.get(request.adapter)
        if known is None:
            text = f"no adapter is called {request.adapter!r}"
            return rq.Refused(request.request_id, ErrorCode.UNKNOWN_ADAPTER, text)
        if isinstance(request, rq.ShowAdapter):
            return rq.AdapterShown(request.request_id, known)
        return rq.AdapterDone(
            request.request_id, known.adapter, known.state, known.slot, known.generation
        )

    def _status(self, request: rq.ShowStatus) -> rq.StatusShown:
        tiers = (
            TierView("host", 2, 64, 0, 1 << 32),
            TierView("pinned", 1, 0, 4096, 1 << 32),
            TierView("device", 1, 8, 4096, 1 << 30),
        )
        views = self.adapters.values()
        uses = tuple(
            AdapterUse(one.adapter, one.slot, one.leases, one.waiting, one.leases, 0, one.waiting)
            for one in views
            if one.slot >= 0 or one.leases or one.waiting
        )
        shown = rq.StatusShown(
            request_id=request.request_id,
            epoch=self.epoch,
            seq=12,
            digest="cd" * 16,
            policy="lru",
            engine_id="e1",
            engine_pid=4242,
            model="tiny",
            adapters=len(self.adapters),
            requests=0,
            operations=0,
            answered=9,
            refused=1,
            tiers=tiers,
            events_seq=len(self.published),
            controller_pid=4241,
            dtype="float32",
            engine=STATISTICS,
            running=sum(one.leases for one in views),
            waiting=sum(one.waiting for one in views),
            states=tuple(Counter(one.state for one in views).items()) if request.uses else (),
            held=sum(one.held for one in views) if request.uses else 0,
            uses=uses if request.uses else (),
        )
        return msgspec.structs.replace(shown, **self.status_changes)

    def _fetch(self, request: rq.FetchEvents) -> rq.Reply:
        first, last = request.first_seq, len(self.published)
        if first < self.first_seq and request.snapshot:
            views = tuple(self.adapters.values())
            return rq.SnapshotFetched(request.request_id, views, last)
        if first < self.first_seq:
            return rq.EventsTooOld(request.request_id, self.first_seq, last)
        found = tuple(self.published[first - 1 : first - 1 + request.count_max])
        return rq.EventsFetched(request.request_id, found, len(self.published))
