"""Where clients are received: who asked what, and what may not go into the log.

What it is: decoding of requests, routes back to clients, prompts kept for the engine, queries
answered. What it is not: a socket or a decision. One rule: a prompt (or an embedding's inputs)
leaves this module only towards the engine, and is forgotten with its answer.
"""

from collections.abc import Callable
from typing import Final

import msgspec

from controller.core.context import Refusal
from controller.core.controller import Controller
from controller.core.views import list_adapters, show_adapter, show_status
from controller.shell.default_adapters import DefaultAdapters
from controller.shell.event_stream import EventStream
from messages import requests
from messages.commands import StartGeneration, StartInference, StartPooling
from messages.errors import ErrorCode
from messages.ids import AdapterName, RequestId
from messages.records import GenerationRequested, InferenceRequested, PoolingRequested
from messages.reports import PrivateReport, TokensGenerated
from messages.requests import LifecycleRequest, PrivateRequest
from messages.wire import REPLIES, REQUESTS, WireError

ROUTES_PER_REQUEST: Final = 4
PROMPT_BYTES_MAX: Final = 1 << 30
"""What prompts of requests that are not answered yet may take together.

Those of requests that were taken up before, by an earlier life, may take as much again.
"""

Send = Callable[[bytes, bytes], None]
Asked = tuple[LifecycleRequest | InferenceRequested, bytes]


class Desk:
    """The clients' side of the controller."""

    def __init__(
        self,
        controller: Controller,
        events: EventStream,
        send: Send,
        pid: int,
        defaults: DefaultAdapters,
    ) -> None:
        self._controller = controller
        self._defaults = defaults
        self._events = events
        self._send = send
        self._pid = pid
        self._routes: dict[RequestId, bytes] = {}
        # As they came: decoded, a prompt of token ids takes many times the memory.
        self._prompts: dict[RequestId, bytes] = {}
        self._prompt_bytes = 0
        self._repeated: dict[RequestId, None] = {}
        self._queries: list[tuple[bytes, requests.Query]] = []
        self._routes_max = ROUTES_PER_REQUEST * controller.limits.requests_max

    def receive(self, client: bytes, data: bytes) -> list[Asked]:
        """Inputs for the log; none where the frame was no request, or asks without changing."""
        try:
            message = REQUESTS.decode(data).message
        except WireError as error:
            self._reply_to(client, requests.Refused("", error.code, str(error)))
            return []
        if isinstance(message, requests.Query):
            self._queries.append((client, message))
            return []
        if not isinstance(message, PrivateRequest):
            inputs: list[Asked] = [(message, client)]
        elif self._take_prompt(message.request_id, data):
            inputs = self._inputs_of(message, client)
        else:
            busy = f"prompts of {self._prompt_bytes} bytes wait for answers; try again later"
            refused = requests.Refused(message.request_id, ErrorCode.OVERLOADED, busy)
            self._reply_to(client, refused)
            return []
        self._remember_route(message.request_id, client)
        return inputs

    def _inputs_of(self, message: PrivateRequest, client: bytes) -> list[Asked]:
        """What the log keeps of a request; before it, what makes its default adapter known."""
        default = self._defaults.of(message)
        if default is None:
            return [(_without_payload(message, message.adapter), client)]
        asked: Asked = (_without_payload(message, default.name), client)
        world, request_id = self._controller.world, message.request_id
        is_new = request_id not in world.waiting and request_id not in world.answers
        if is_new and world.current(default.name) is None:
            return [(default.load(), b""), asked]
        return [asked]

    def _take_prompt(self, request_id: RequestId, data: bytes) -> bool:
        """Keep a prompt until its request is answered; False where there is no room for it."""
        world = self._controller.world
        if request_id in world.answers:
            return True
        before = self._prompts.get(request_id, b"")
        known = bool(before) or request_id in world.waiting
        if self._prompt_bytes - len(before) + len(data) > PROMPT_BYTES_MAX * (1 + known):
            # What was taken up goes on with the prompt that was kept, or ends as if it were lost.
            return known
        # The latest sending counts: after a restart it is the only one that is left.
        self._forget_prompt(request_id)
        self._prompts[request_id] = data
        self._prompt_bytes += len(data)
        return True

    def _forget_prompt(self, request_id: RequestId) -> None:
        self._prompt_bytes -= len(self._prompts.pop(request_id, b""))

    def _remember_route(self, request_id: RequestId, client: bytes) -> None:
        # The latest sending is the last to be forgotten.
        self._routes.pop(request_id, None)
        self._routes[request_id] = client
        if len(self._routes) > self._routes_max:
            del self._routes[next(iter(self._routes))]

    def with_payload(self, command: StartInference) -> StartInference | None:
        """The command as the engine needs it; None where the prompt died with an earlier life."""
        data = self._prompts.get(command.request_id)
        match None if data is None else REQUESTS.decode(data).message, command:
            case requests.Generate() as asked, StartGeneration():
                return msgspec.structs.replace(
                    command, prompt=asked.prompt, sampling=asked.sampling
                )
            case (requests.Embed() | requests.Classify()) as asked, StartPooling():
                return msgspec.structs.replace(command, inputs=asked.inputs)
        return None

    def stream(self, part: PrivateReport) -> None:
        """Pass output on to the client that it is for."""
        if isinstance(part, TokensGenerated):
            self.answer(
                requests.TokensStreamed(part.request_id, part.offset, part.tokens, part.text)
            )
        else:
            self.answer(
                requests.VectorsStreamed(part.request_id, part.offset, part.vectors, part.labels)
            )

    def note_repeated(self, request_id: RequestId) -> None:
        """Inference is asked for: if it had started before, its client may lack output."""
        world = self._controller.world
        waiting = world.waiting.get(request_id)
        if request_id in world.answers or (waiting is not None and waiting.op):
            self._repeated[request_id] = None

    def take_repeated(self) -> tuple[RequestId, ...]:
        """The requests whose output is to be sent again, once an engine can be asked."""
        repeated = tuple(self._repeated)
        self._repeated.clear()
        return repeated

    def answer(self, reply: requests.Reply) -> None:
        """Send a reply where its request came from; without a route its client asks again."""
        client = self._routes.get(reply.request_id)
        if client is not None:
            self._send(client, REPLIES.encode(reply, self._controller.world.epoch))
        if not isinstance(reply, requests.TokensStreamed | requests.VectorsStreamed):
            self._forget_prompt(reply.request_id)
            # Repeated output may still follow its account.
            if not isinstance(reply, requests.GenerationDone | requests.PoolingDone):
                self._routes.pop(reply.request_id, None)

    def refuse_unlogged(self, request_id: RequestId, why: str) -> None:
        """Refuse a request that could not be logged; one that was taken up before goes on."""
        world = self._controller.world
        kept = world.answers.get(request_id)
        if kept is not None:
            self.answer(kept)
        elif request_id not in world.waiting:
            self.answer(requests.Refused(request_id, ErrorCode.LOG_UNAVAILABLE, why))

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


def _without_payload(message: PrivateRequest, adapter: AdapterName | None) -> InferenceRequested:
    """What the log keeps of a request that runs under this adapter."""
    who = (message.request_id, adapter)
    if isinstance(message, requests.Generate):
        return GenerationRequested(*who, message.timeout_ms)
    task: requests.PoolingTask = "embed" if isinstance(message, requests.Embed) else "classify"
    return PoolingRequested(*who, task, message.timeout_ms)
