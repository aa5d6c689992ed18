"""Where clients are received: who asked what, and what may not go into the log.

What it is: decoding of requests, routes back to clients, prompts kept for the engine, queries
answered. What it is not: a socket or a decision. One rule: a prompt leaves this module only towards
the engine, and is forgotten with its answer.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from controller.core import Controller
from controller.shell.stream import EventStream
from controller.turn import Refusal
from controller.views import list_adapters, show_adapter, show_status
from messages import requests
from messages.commands import StartGeneration
from messages.errors import ErrorCode
from messages.ids import RequestId
from messages.records import GenerationRequested
from messages.requests import LifecycleRequest
from messages.wire import REPLIES, REQUESTS, WireError

ROUTES_PER_REQUEST: Final = 4

Send = Callable[[bytes, bytes], None]
Asked = tuple[LifecycleRequest | GenerationRequested, bytes]


class Desk:
    """The clients' side of the controller."""

    def __init__(self, controller: Controller, events: EventStream, send: Send, pid: int) -> None:
        self._controller = controller
        self._events = events
        self._send = send
        self._pid = pid
        self._routes: dict[RequestId, bytes] = {}
        self._prompts: dict[RequestId, requests.Generate] = {}
        self._repeated: dict[RequestId, None] = {}
        self._queries: list[tuple[bytes, requests.Query]] = []
        self._routes_max = ROUTES_PER_REQUEST * controller.limits.requests_max

    def receive(self, client: bytes, data: bytes) -> Asked | None:
        """An input for the log; None where the frame was none, or asks without changing."""
        try:
            message = REQUESTS.decode(data).message
        except WireError as error:
            self._reply_to(client, requests.Refused("", error.code, str(error)))
            return None
        if isinstance(message, requests.Query):
            self._queries.append((client, message))
            return None
        self._remember_route(message.request_id, client)
        if isinstance(message, requests.Generate):
            return self._take_prompt(message), client
        return message, client

    def _take_prompt(self, message: requests.Generate) -> GenerationRequested:
        # The latest sending counts: after a restart it is the only one that is left.
        if message.request_id not in self._controller.world.answers:
            self._prompts[message.request_id] = message
        return GenerationRequested(message.request_id, message.adapter, message.timeout_ms)

    def _remember_route(self, request_id: RequestId, client: bytes) -> None:
        self._routes[request_id] = client
        if len(self._routes) > self._routes_max:
            del self._routes[next(iter(self._routes))]

    def with_prompt(self, command: StartGeneration) -> StartGeneration | None:
        """The command as the engine needs it; None where the prompt died with an earlier life."""
        asked = self._prompts.get(command.request_id)
        if asked is None:
            return None
        return msgspec.structs.replace(command, prompt=asked.prompt, sampling=asked.sampling)

    def note_repeated(self, request_id: RequestId) -> None:
        """A generation is asked for: if it had started before, its client may lack output."""
        world = self._controller.world
        waiting = world.waiting.get(request_id)
        if request_id in world.answers or (waiting is not None and waiting.op):
            self._repeated[request_id] = None

    def take_repeated(self) -> tuple[RequestId, ...]:
        """The generations whose output is to be sent again, once an engine can be asked."""
        repeated = tuple(self._repeated)
        self._repeated.clear()
        return repeated

    def answer(self, reply: requests.Reply) -> None:
        """Send a reply where its request came from; without a route its client asks again."""
        client = self._routes.get(reply.request_id)
        if client is not None:
            self._send(client, REPLIES.encode(reply, self._controller.world.epoch))
        if type(reply) is not requests.TokensStreamed:
            self._prompts.pop(reply.request_id, None)
            # A generation's repeated output may still follow its answer.
            if type(reply) is not requests.GenerationDone:
                self._routes.pop(reply.request_id, None)

    def refuse(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        """Refuse a request that could not be logged; nothing remembers it."""
        self.answer(requests.Refused(request_id, code, message))

    def answer_queries(self) -> None:
        """Answer who only looks, after the turn's inputs, so that one sees what one did."""
        queries, self._queries = self._queries, []
        for client, message in queries:
            self._answer_query(client, message)

    def _answer_query(self, client: bytes, message: requests.Query) -> None:
        world = self._controller.world
        try:
            match message:
                case requests.ListAdapters():
                    self._reply_to(client, list_adapters(world, message))
                case requests.ShowAdapter():
                    self._reply_to(client, show_adapter(world, message))
                case requests.ShowStatus():
                    status = show_status(self._controller, message)
                    status = msgspec.structs.replace(status, controller_pid=self._pid)
                    self._reply_to(client, status)
                case requests.FetchEvents():
                    self._events.fetch(
                        message, world.events_seq, lambda reply: self._reply_to(client, reply)
                    )
        except Refusal as refusal:
            refused = requests.Refused(message.request_id, refusal.code, refusal.message)
            self._reply_to(client, refused)

    def _reply_to(self, client: bytes, reply: requests.Reply) -> None:
        self._send(client, REPLIES.encode(reply, self._controller.world.epoch))
