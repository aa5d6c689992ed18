"""Client sessions: requests decoded, routes back to clients, payloads stored, queries answered.

A payload (a prompt, or the inputs of an embedding) leaves this module only for the engine, is never
logged, and is dropped when its request is answered.
"""

import time
from collections.abc import Callable
from typing import Final

import msgspec

from controller.core.context import Refusal
from controller.core.controller import Controller
from controller.core.views import AdapterPages, show_adapter, show_status
from controller.shell.default_adapters import DefaultAdapters
from controller.shell.event_stream import EventStream
from controller.shell.query_queue import QUERIES_PER_CLIENT_MAX, QueryQueue
from controller.shell.snapshot_process import LogFacts
from messages import requests
from messages.commands import StartGeneration, StartInference, StartPooling
from messages.errors import ErrorCode
from messages.ids import AdapterName, RequestId
from messages.records import GenerationRequested, InferenceRequested, PoolingRequested
from messages.reports import PrivateReport
from messages.requests import LifecycleRequest, PrivateRequest
from messages.wire import REPLIES, REQUESTS, WireError

ROUTES_PER_REQUEST: Final = 4
PAYLOAD_BYTES_MAX: Final = 1 << 30
"""Bound on the payloads of unanswered requests, in bytes together.

Payloads of requests that are pending already, which clients resend after a restart, may take the
same number of bytes again.
"""

QUERIES_NS_MAX: Final = 2_000_000
"""Bound on the time for queries per iteration of the main loop; the last one may exceed it."""

Send = Callable[[bytes, bytes], None]
"""Sends a frame to a client."""

CanReply = Callable[[bytes], bool]
"""Whether a client has read enough earlier replies to be sent a long one."""

ClientInput = tuple[LifecycleRequest | InferenceRequested, bytes]
"""An input for the log, and the client that it came from."""


class ClientSessions:
    """Requests of clients, and the replies to them."""

    def __init__(
        self,
        controller: Controller,
        events: EventStream,
        send: Send,
        pid: int,
        defaults: DefaultAdapters,
        can_reply: CanReply = lambda _: True,
    ) -> None:
        self.log_facts: Callable[[], LogFacts] = LogFacts
        self._controller = controller
        self._can_reply = can_reply
        self._pages = AdapterPages(controller.world)
        self._defaults = defaults
        self._events = events
        self._send = send
        self._pid = pid
        self._routes: dict[RequestId, bytes] = {}
        # Frames as received: decoded, a prompt of token ids takes many times the memory.
        self._payloads: dict[RequestId, bytes] = {}
        self._payload_bytes = 0
        self._resends: dict[RequestId, None] = {}
        self._queries: QueryQueue[requests.Query] = QueryQueue()
        self._routes_max = ROUTES_PER_REQUEST * controller.limits.requests_max

    def receive(self, client: bytes, data: bytes) -> list[ClientInput]:
        """Return inputs for the log: none for a malformed frame, a refused request or a query."""
        try:
            received = REQUESTS.decode_each(data)
        except WireError as error:
            self._reply_to(client, requests.Refused(error.request_id, error.code, str(error)))
            return []
        for refused in received.refused:
            self._reply_to(client, refused)
        return [each for message in received.requests for each in self._receive(client, message)]

    def _receive(self, client: bytes, message: requests.Request) -> list[ClientInput]:
        if isinstance(message, requests.Query):
            self._add_query(client, message)
            return []
        if not isinstance(message, PrivateRequest):
            inputs: list[ClientInput] = [(message, client)]
        elif self._store_payload(message.request_id, REQUESTS.encode_body(message)):
            inputs = self._inputs_of(message, client)
        else:
            busy = (
                f"prompts of {self._payload_bytes} bytes wait for answers; at most "
                f"{PAYLOAD_BYTES_MAX} may; try again later"
            )
            refused = requests.Refused(message.request_id, ErrorCode.OVERLOADED, busy)
            self._reply_to(client, refused)
            return []
        self._remember_route(message.request_id, client)
        return inputs

    def _add_query(self, client: bytes, message: requests.Query) -> None:
        if not self._can_reply(client):
            busy = "earlier answers wait to be read; read them and try again"
        elif not self._queries.add(client, message.request_id, message):
            busy = f"at most {QUERIES_PER_CLIENT_MAX} queries of a client wait; try again later"
        else:
            return
        self._reply_to(client, requests.Refused(message.request_id, ErrorCode.OVERLOADED, busy))

    def _inputs_of(self, message: PrivateRequest, client: bytes) -> list[ClientInput]:
        """The request as it is logged, after a request that loads its default adapter if new."""
        default = self._defaults.adapter_of(message)
        if default is None:
            return [(_without_payload(message, message.adapter), client)]
        logged: ClientInput = (_without_payload(message, default.name), client)
        world, request_id = self._controller.world, message.request_id
        is_new = request_id not in world.pending_requests and request_id not in world.answers
        if is_new and world.current(default.name) is None:
            return [(default.load(), b""), logged]
        return [logged]

    def _store_payload(self, request_id: RequestId, data: bytes) -> bool:
        """Keep a payload until its request is answered; False if the bound does not allow it."""
        world = self._controller.world
        if request_id in world.answers:
            return True
        before = self._payloads.get(request_id, b"")
        known = bool(before) or request_id in world.pending_requests
        if self._payload_bytes - len(before) + len(data) > PAYLOAD_BYTES_MAX * (1 + known):
            # A pending request continues with the payload it has, or ends as if that were lost.
            return known
        # The latest payload counts: after a restart it is the only one.
        self._drop_payload(request_id)
        self._payloads[request_id] = data
        self._payload_bytes += len(data)
        return True

    def _drop_payload(self, request_id: RequestId) -> None:
        self._payload_bytes -= len(self._payloads.pop(request_id, b""))

    def _remember_route(self, request_id: RequestId, client: bytes) -> None:
        # Reinserted at the end: the route that was used least recently is dropped first.
        self._routes.pop(request_id, None)
        self._routes[request_id] = client
        if len(self._routes) > self._routes_max:
            del self._routes[next(iter(self._routes))]

    def with_payload(self, command: StartInference) -> StartInference | None:
        """Return the command with its payload; None where an earlier process had the payload."""
        data = self._payloads.get(command.request_id)
        match None if data is None else REQUESTS.decode_body(data), command:
            case requests.Generate() as request, StartGeneration():
                return msgspec.structs.replace(
                    command, prompt=request.prompt, sampling=request.sampling
                )
            case (requests.Embed() | requests.Classify()) as request, StartPooling():
                return msgspec.structs.replace(command, inputs=request.inputs)
        return None

    def forward(self, output: PrivateReport) -> None:
        """Send output of the engine to the client that it is for."""
        self.answer(output)

    def note_resend(self, request_id: RequestId) -> None:
        """Note a request whose client may lack output: it is repeated after inference started."""
        world = self._controller.world
        waiting = world.pending_requests.get(request_id)
        if request_id in world.answers or (waiting is not None and waiting.op):
            self._resends[request_id] = None

    def take_resends(self) -> tuple[RequestId, ...]:
        """Return and clear the requests whose output the engine has to send again."""
        resends = tuple(self._resends)
        self._resends.clear()
        return resends

    def answer(self, reply: requests.Reply) -> None:
        """Send a reply to its request's client; without a route, the client has to repeat it."""
        client = self._routes.get(reply.request_id)
        if client is not None:
            self._send(client, REPLIES.encode((reply,), self._controller.world.epoch))
        if not isinstance(reply, requests.TokensStreamed | requests.VectorsStreamed):
            self._drop_payload(reply.request_id)
            # Output that is sent again may follow the final reply.
            if not isinstance(reply, requests.GenerationDone | requests.PoolingDone):
                self._routes.pop(reply.request_id, None)

    def refuse_unlogged(
        self, request_id: RequestId, why: str, code: ErrorCode = ErrorCode.LOG_UNAVAILABLE
    ) -> None:
        """Refuse a request that could not be logged or handled, unless an earlier copy is known."""
        world = self._controller.world
        kept = world.answers.get(request_id)
        if kept is not None:
            self.answer(kept.reply)
        elif request_id not in world.pending_requests:
            self.answer(requests.Refused(request_id, code, why))

    def answer_queries(self) -> None:
        """Answer queries of the clients in turn, until their time in this iteration has passed.

        Called after an iteration's inputs, so a client reads its own writes.
        """
        until = time.monotonic_ns() + QUERIES_NS_MAX
        while self._queries:
            self._answer_query(*self._queries.take())
            if time.monotonic_ns() >= until:
                return

    @property
    def has_queries(self) -> bool:
        """Whether queries wait for the next iteration."""
        return bool(self._queries)

    def _answer_query(self, client: bytes, message: requests.Query) -> None:
        world = self._controller.world
        try:
            match message:
                case requests.ListAdapters():
                    self._reply_to(client, self._pages.answer(message))
                case requests.ShowAdapter():
                    self._reply_to(client, show_adapter(world, message))
                case requests.ShowStatus():
                    status = show_status(self._controller, message)
                    self._reply_to(client, self._with_process_facts(status))
                case requests.FetchEvents():
                    self._fetch_events(client, message)
        except Refusal as refusal:
            refused = requests.Refused(message.request_id, refusal.code, refusal.message)
            self._reply_to(client, refused)

    def _fetch_events(self, client: bytes, message: requests.FetchEvents) -> None:
        def answer(reply: requests.Reply) -> None:
            if message.snapshot and isinstance(reply, requests.EventsTooOld):
                reply = self._pages.snapshot(message)
            self._reply_to(client, reply)

        self._events.fetch(client, message, self._controller.world.events_seq, answer)

    def _with_process_facts(self, status: requests.StatusShown) -> requests.StatusShown:
        """Return a status with what only the process knows."""
        facts, world = self.log_facts(), self._controller.world
        age_ns = world.time_ns - facts.snapshot_time_ns if facts.snapshot_seq else 0
        return msgspec.structs.replace(
            status,
            controller_pid=self._pid,
            snapshot_seq=facts.snapshot_seq,
            snapshot_age_ms=age_ns // 1_000_000,
            log_bytes=facts.log_bytes,
        )

    def _reply_to(self, client: bytes, reply: requests.Reply) -> None:
        self._send(client, REPLIES.encode((reply,), self._controller.world.epoch))


def _without_payload(message: PrivateRequest, adapter: AdapterName | None) -> InferenceRequested:
    """The request as it is logged, with the adapter that it runs with."""
    request_id, timeout_ms = message.request_id, message.timeout_ms
    if isinstance(message, requests.Generate):
        return GenerationRequested(request_id, adapter, timeout_ms)
    task: requests.PoolingTask = "embed" if isinstance(message, requests.Embed) else "classify"
    return PoolingRequested(request_id, adapter, task, timeout_ms)
