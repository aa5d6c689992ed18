"""Client sessions over a core with an engine, without sockets, for tests."""

from pathlib import Path
from typing import Any

from loradock.controller.core.context import Checked
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.controller.log.retention import Retention
from loradock.controller.log.storage import DISK
from loradock.controller.server.access import Access
from loradock.controller.server.admin import Admin
from loradock.controller.server.clients import Outbox
from loradock.controller.server.diagnostics import Diagnostics
from loradock.controller.server.engine_link import EngineLink
from loradock.controller.server.inputs import LogHealth
from loradock.controller.server.preloads import DefaultAdapters
from loradock.controller.server.queries import Queries
from loradock.controller.server.sessions import ClientSessions
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.messages import commands, records, reports
from loradock.messages import requests as rq
from loradock.messages.ids import client_name, scoped
from loradock.messages.views import PoolingTask
from loradock.messages.wire import REPLIES, REQUESTS, TOKEN_BYTES

LIMITS = Limits(requests_max=4)
ENGINE = reports.EngineInventory("e", 1, "m", 8, 1 << 30)
TOKEN = b"t" * TOKEN_BYTES


def id_of(request_id: str, token: bytes = TOKEN) -> str:
    """Return a client's request id as it is inside the controller."""
    return scoped(client_name(token, ""), request_id)


class SessionBench:
    """Client sessions, the core that handles their inputs, and the replies that were sent."""

    def __init__(self, default_path: str = "", limits: Limits = LIMITS) -> None:
        self.controller = Controller(limits, checked=True)
        self.controller.handle(records.ControllerStarted(1), 1)
        self.controller.handle(ENGINE, 1)
        self.defaults = DefaultAdapters({"image": default_path} if default_path else {})
        self.sent: list[tuple[bytes, Any]] = []
        self.commands: list[commands.Command] = []
        self.frames = 0
        self.restart()

    def restart(self) -> None:
        """Continue with sessions that know no client and no payload."""
        diagnostics = Diagnostics(self.controller.world)
        link = EngineLink(lambda _peer, _frame: None, 0)
        snapshots = SnapshotProcess(Path(__file__).parent, 0, Retention())
        health = LogHealth(Path(__file__).parent, DISK)
        admin = Admin(self.controller, diagnostics, link, snapshots, health, lambda _: True, str)
        access = Access()
        self.outbox = Outbox(self._send)
        no_events: Any = None
        self.queries = Queries(
            self.controller, no_events, admin, self.outbox, access, lambda _: True
        )
        self.sessions = ClientSessions(
            self.controller, self.queries, admin, diagnostics, self.outbox, self.defaults, access
        )

    def _send(self, route: bytes, frame: bytes) -> None:
        self.frames += 1
        self.sent += [(route, reply) for reply in REPLIES.decode(frame).message]

    def take_sent(self) -> list[tuple[bytes, Any]]:
        """Send the replies of the iteration, and return and clear what was sent."""
        self.outbox.flush(self.controller.world.epoch)
        sent, self.sent = self.sent, []
        return sent

    def group(self, *messages: rq.Request, route: bytes = b"c", token: bytes = TOKEN) -> list[Any]:
        """Handle requests of one frame as one group; return its inputs."""
        self.sessions.receive(route, REQUESTS.encode(messages, token=token))
        inputs = self.sessions.take_group()
        for received in inputs:
            self.handle(received.message, received.body, received.checked)
        return [received.message for received in inputs]

    def receive(self, message: rq.Request, route: bytes = b"c", token: bytes = TOKEN) -> Any:
        """Handle all inputs of the message, and return the last one; None if there is none."""
        inputs = self.group(message, route=route, token=token)
        return inputs[-1] if inputs else None

    def handle(self, message: Any, body: int = 0, checked: Checked | None = None) -> None:
        """Handle an input, and send its replies."""
        for action in self.controller.handle(message, 1, body, 0, checked):
            if isinstance(getattr(action, "message", None), rq.Reply):
                self.sessions.answer(action.message)
            if isinstance(getattr(action, "message", None), commands.Command):
                self.commands.append(action.message)

    def end(self, request_id: str, token: bytes = TOKEN) -> None:
        """Let the engine end a running inference."""
        pending = self.controller.world.pending_requests[id_of(request_id, token)]
        if pending.kind == "generate":
            self.handle(reports.GenerationEnded(pending.op, "stop", 1, 1))
        else:
            self.handle(reports.PoolingEnded(pending.op, 1, 1))

    def start(self, request_id: str, op: int = 1) -> commands.StartGeneration | None:
        """Return a generation's command with its payload."""
        scoped_id = id_of(request_id)
        return self.sessions.with_payload(commands.StartGeneration(op, scoped_id, 0, -1, 0))

    def pool(self, request_id: str, task: PoolingTask) -> commands.StartPooling | None:
        """Return a pooling's command with its payload."""
        scoped_id = id_of(request_id)
        return self.sessions.with_payload(commands.StartPooling(1, scoped_id, 0, -1, 0, task))
