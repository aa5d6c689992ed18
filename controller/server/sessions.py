"""Client sessions: the client of a request, what is answered at once, the inputs for the log.

A request that repeats an earlier one, or that would be refused, is answered without an input.
Inside the controller, ids of requests carry the client's name (`loradock.messages.ids`).
"""

import time
from collections.abc import Iterable, Set
from typing import Final, get_args

from msgspec.structs import replace

from loradock.controller.core.answers import Answer, AnswerWindows, WindowBounds
from loradock.controller.core.context import Checked
from loradock.controller.core.controller import Controller
from loradock.controller.core.requests import Pending, id_conflict
from loradock.controller.server.access import LOCAL_USER, Access
from loradock.controller.server.admin import Admin
from loradock.controller.server.clients import (
    PAYLOAD_BYTES_MAX,
    Client,
    ClientTable,
    Outbox,
    Payloads,
    hash_public,
)
from loradock.controller.server.diagnostics import Diagnostics, outcome_of
from loradock.controller.server.inputs import GroupInput
from loradock.controller.server.preloads import DefaultAdapters
from loradock.controller.server.queries import Queries
from loradock.messages import requests
from loradock.messages.commands import StartInference
from loradock.messages.control import PRELOAD, CancelRequest, ChangeSettings, StopServer
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import AdapterName, Epoch, OpId, RequestId, client_of, scoped, unscoped
from loradock.messages.records import GenerationRequested, InferenceRequested, PoolingRequested
from loradock.messages.reports import PrivateReport
from loradock.messages.requests import LifecycleRequest, PrivateRequest
from loradock.messages.views import PoolingTask
from loradock.messages.wire import REQUESTS, Body, WireError

REFUSALS: Final = WindowBounds(65_536, 256, 3_600_000_000_000)
"""Bounds on the unlogged refusals that are repeated: in all, per client, and nanoseconds."""

PAYLOAD_RETRY_MS: Final = 1000

LOG_RETRY_MS: Final = 1000

_QUERIES: Final = frozenset(get_args(requests.Query))

_PRIVATE: Final = frozenset(get_args(PrivateRequest))

_CANCELS: Final = frozenset({CancelRequest, requests.CancelGeneration})

_STREAMED: Final = frozenset(get_args(PrivateReport))


class ClientSessions:
    """Requests of clients, and the replies to them."""

    def __init__(  # noqa: PLR0913, PLR0917 - one per collaborator
        self,
        controller: Controller,
        queries: Queries,
        admin: Admin,
        diagnostics: Diagnostics,
        outbox: Outbox,
        defaults: DefaultAdapters,
        access: Access,
    ) -> None:
        self._controller = controller
        self._queries = queries
        self._admin = admin
        self._diagnostics = diagnostics
        self._outbox = outbox
        self.defaults: Final = defaults
        self._access = access
        self._clients = ClientTable()
        self._payloads = Payloads()
        self._refusals = AnswerWindows(REFUSALS)
        self._resends: dict[RequestId, None] = {}
        # Inputs and changes of settings that wait to be taken; for reading only.
        self.group: list[GroupInput] = []
        self.changes: list[tuple[bytes, ChangeSettings]] = []
        self._group_clients: set[str] = set()
        self._later_queries: list[tuple[bytes, str, requests.Query]] = []

    def receive_all(self, frames: Iterable[tuple[bytes, str, bytes]]) -> None:
        """Process frames, each after its connection and the user of its key."""
        for route, user, data in frames:
            self.receive(route, data, user)

    def receive(self, route: bytes, data: bytes, user: str = "") -> None:
        """Process a frame that arrived over a connection; `user` is that of its key."""
        try:
            frame = REQUESTS.decode_each(data)
        except WireError as error:
            self._refuse_at(route, requests.Refused(error.request_id, error.code, str(error)))
            return
        client = self._clients.admit(route, frame.token, user)
        if 0 < frame.epoch < self._controller.world.epoch:
            self._outbox.add(route, _of_earlier_start(frame.epoch))
            return
        for refused in frame.refused:
            self._refuse_at(route, refused)
        # Most requests are local, and a local user may send all of them.
        refusal_of = self._access.refusal if user != LOCAL_USER else None
        for message, body in zip(frame.requests, frame.bodies, strict=True):
            refusal = refusal_of and refusal_of(user, message)
            if refusal is not None:
                self._refuse_at(route, refusal.reply(message.request_id))
            elif type(message) in _QUERIES:
                query = (route, user, message)
                if client.name in self._group_clients:
                    # A client reads its own writes.
                    self._later_queries.append(query)  # type: ignore[arg-type]
                else:
                    self._queries.add(*query)  # type: ignore[arg-type]
            elif type(message) is StopServer:
                self._outbox.add(route, self._admin.stop(message))
            elif type(message) is ChangeSettings:
                self.changes.append((route, message))
            else:
                own = message if refusal_of is None else self._confined(user, message)
                self._receive(client, own, body)  # type: ignore[arg-type]

    def _confined(self, user: str, message: requests.Request) -> requests.Request:
        adapter = self._controller.world.current(getattr(message, "adapter", None) or "")
        return self._access.confined(user, message, "" if adapter is None else adapter.path)

    def _refuse_at(self, route: bytes, refused: requests.Refused) -> None:
        """Refuse a request that has no place in the tables of requests."""
        self._diagnostics.refusals.record(refused, time.monotonic_ns())
        self._outbox.add(route, refused)

    def take_changes(self) -> list[tuple[bytes, ChangeSettings]]:
        """Return and clear the changes of settings, each with the connection of its client."""
        changes, self.changes = self.changes, []
        return changes

    def take_group(self) -> list[GroupInput]:
        """Return and clear the inputs for the log; call it once per group, before logging it."""
        group, self.group = self.group, []
        self._group_clients.clear()
        queries, self._later_queries = self._later_queries, []
        for query in queries:
            self._queries.add(*query)
        if group:
            self._queries.on_request(time.monotonic_ns())
        return group

    def _receive(
        self,
        client: Client,
        message: LifecycleRequest | PrivateRequest | CancelRequest,
        body: Body,
    ) -> None:
        is_private = type(message) in _PRIVATE
        body_hash = client.hash_private(body) if is_private else hash_public(body)
        request_id = scoped(client.name, message.request_id)
        refused = self._refusals.by_id.get(request_id)
        if refused is not None:
            is_same = refused.body == body_hash
            self.answer(refused.reply if is_same else id_conflict(request_id))
            return
        load: requests.LoadAdapter | None = None
        checked: Checked | None = None
        logged: LifecycleRequest | InferenceRequested
        if is_private:
            load, logged = self._inputs_of(message, request_id)  # type: ignore[arg-type]
        elif type(message) in _CANCELS:
            logged = _scoped_cancel(message, request_id)  # type: ignore[arg-type]
        else:
            logged = replace(message, request_id=request_id)  # type: ignore[assignment]
        # What an earlier input of this group does for its client is not known yet.
        if load is None and client.name not in self._group_clients:
            known = self._controller.check(logged, body_hash)
            if not isinstance(known, Checked):
                self._answer_known(logged, known, body, body_hash)
                return
            checked = known
        if self._admin.is_stopping and type(message) not in _CANCELS:
            self.answer(self._admin.refuse(request_id))
            return
        if is_private and not self._store_payload(request_id, body, body_hash):
            busy = (
                f"prompts of {self._payloads.size_bytes} bytes wait for answers; at most "
                f"{PAYLOAD_BYTES_MAX} may; try again later"
            )
            self._refuse(request_id, ErrorCode.OVERLOADED, busy, PAYLOAD_RETRY_MS, body_hash)
            return
        self._group_clients.add(client.name)
        if load is not None:
            self.group.append(GroupInput(load))
        self.group.append(GroupInput(logged, body_hash, checked=checked))

    def _answer_known(
        self,
        message: LifecycleRequest | InferenceRequested,
        known: requests.Reply | Pending,
        body: Body,
        body_hash: int,
    ) -> None:
        """Answer a request that needs no input, or let it wait again."""
        world, request_id = self._controller.world, message.request_id
        answer = world.answers.get(request_id)
        if isinstance(known, Pending):
            if isinstance(message, InferenceRequested):
                self._store_payload(request_id, body, body_hash)
        else:
            if answer is None and request_id not in world.pending_requests:
                self._refusals.add(Answer(known, body_hash, world.time_ns))
            self.answer(known)
        is_repeated = isinstance(known, Pending) or (answer is not None and answer.reply is known)
        if is_repeated and isinstance(message, InferenceRequested):
            self.record_resend(request_id)

    def _refuse(
        self, request_id: RequestId, code: ErrorCode, why: str, retry_ms: int, body_hash: int
    ) -> None:
        """Refuse a request without an input; a repetition is refused likewise."""
        refused = requests.Refused(request_id, code, why, retry_ms)
        self._refusals.add(Answer(refused, body_hash, self._controller.world.time_ns))
        self.answer(refused)

    def _inputs_of(
        self, message: PrivateRequest, request_id: RequestId
    ) -> tuple[requests.LoadAdapter | None, InferenceRequested]:
        """Return the request as it is logged, after one that loads its default adapter if new."""
        default = self.defaults.adapter_of(message)
        if default is None:
            return None, _without_payload(message, request_id, message.adapter)
        logged = _without_payload(message, request_id, default.name)
        world = self._controller.world
        is_new = request_id not in world.pending_requests and request_id not in world.answers
        if is_new and world.current(default.name) is None:
            return default.load(), logged
        return None, logged

    def _store_payload(self, request_id: RequestId, body: Body, body_hash: int) -> bool:
        """Keep a payload until its request is answered; False if the bound does not allow it."""
        world = self._controller.world
        pending = world.pending_requests.get(request_id)
        if request_id in world.answers or (pending is not None and pending.body != body_hash):
            # The core answers it, without its payload.
            return True
        return self._payloads.store(request_id, body, pending is not None)

    def with_payload(self, command: StartInference) -> StartInference | None:
        """Return the command with its payload; None if an earlier process had it."""
        return self._payloads.complete(command)

    def forward(self, output: PrivateReport) -> None:
        """Send output of the engine to the client that it is for."""
        if type(output) is requests.TokensStreamed:
            tokens = output.offset + len(output.tokens)
            self._diagnostics.times.count_tokens(output.request_id, tokens)
        self.answer(output)

    def record_resend(self, request_id: RequestId) -> None:
        """Record a request whose client can lack output: it is repeated after inference started."""
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
        request_id, diagnostics = reply.request_id, self._diagnostics
        client, _, own_id = request_id.partition(":")
        route = self._clients.route_of(client)
        if type(reply) is requests.Refused:
            reply = diagnostics.failures.complete(reply)
            reply = self._access.shown(self._clients.user_of(client), reply)
        if route is not None:
            self._outbox.add(route, _unscoped(reply, own_id))
        if type(reply) in _STREAMED:
            return
        if type(reply) is requests.Refused:
            diagnostics.refusals.record(reply, time.monotonic_ns())
        if request_id in diagnostics.times.requests:
            diagnostics.times.end_request(request_id, outcome_of(reply), time.monotonic_ns())
        if self._payloads.has(request_id):
            waiting = self._controller.world.pending_requests.get(request_id)
            # Another request under a waiting one's id is refused, and the waiting one keeps it.
            if waiting is None or waiting.answered:
                self._payloads.drop(request_id)

    def refuse_unlogged(
        self,
        message: LifecycleRequest | InferenceRequested,
        body_hash: int,
        why: str,
        code: ErrorCode = ErrorCode.LOG_UNAVAILABLE,
    ) -> None:
        """Refuse a request that could not be logged or handled, unless an earlier copy is known."""
        world, request_id = self._controller.world, message.request_id
        kept = world.answers.get(request_id)
        if kept is not None:
            self.answer(kept.reply)
        elif request_id not in world.pending_requests and request_id not in self._refusals:
            retry_ms = LOG_RETRY_MS if code is ErrorCode.LOG_UNAVAILABLE else 0
            self._refuse(request_id, code, why, retry_ms, body_hash)

    def refuse_waiting(self, why: str, ended: Set[OpId]) -> None:
        """Refuse the requests whose next step waits for the log, and tell that they continue.

        `ended`: operations whose reports could not be logged. An inference that runs needs no log
        until it ends.
        """
        text = f"{why}; the request was accepted, and continues when the log can be written again"
        for request_id, waiting in tuple(self._controller.world.pending_requests.items()):
            is_stuck = not waiting.op or waiting.op in ended
            is_known = waiting.answered or request_id in self._refusals
            if is_stuck and not is_known and not request_id.startswith(PRELOAD):
                code = ErrorCode.LOG_UNAVAILABLE
                self._refuse(request_id, code, text, LOG_RETRY_MS, waiting.body)


def _of_earlier_start(epoch: Epoch) -> requests.Refused:
    """Return the answer to a frame that was sent to an earlier start.

    That process can have refused its requests, and such a refusal is in no log. So nothing of the
    frame is executed. The reply's own frame has the current epoch, for which a client sends again
    what is unanswered: a request that was refused is not.
    """
    earlier = f"the frame is for epoch {epoch}, an earlier start; send unanswered requests again"
    return requests.Refused("", ErrorCode.CONFLICT, earlier)


def _scoped_cancel(
    message: requests.CancelGeneration | CancelRequest, request_id: RequestId
) -> requests.CancelGeneration:
    """Return a cancellation as it is logged, with ids inside the controller."""
    if isinstance(message, CancelRequest):
        return requests.CancelGeneration(request_id, message.target)
    return requests.CancelGeneration(request_id, scoped(client_of(request_id), message.target))


def _without_payload(
    message: PrivateRequest, request_id: RequestId, adapter: AdapterName | None
) -> InferenceRequested:
    """Return the request as it is logged, with the adapter that it runs with."""
    timeout_ms = message.timeout_ms
    if isinstance(message, requests.Generate):
        return GenerationRequested(request_id, adapter, timeout_ms)
    task: PoolingTask = "embed" if isinstance(message, requests.Embed) else "classify"
    return PoolingRequested(request_id, adapter, task, timeout_ms)


def _unscoped(reply: requests.Reply, own_id: RequestId) -> requests.Reply:
    """Return a reply with the ids that the client chose."""
    if type(reply) is requests.CancelDone:
        # An operator can name anything as the target, also what no client chose.
        target = unscoped(reply.target) or reply.target
        return requests.CancelDone(own_id, target, reply.found)
    return replace(reply, request_id=own_id)
