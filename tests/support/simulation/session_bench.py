"""Client sessions over a core with an engine, without sockets, for tests."""

from typing import Any

from controller.core.controller import Controller
from controller.core.limits import Limits
from controller.shell.client_sessions import ClientSessions
from controller.shell.default_adapters import DefaultAdapters
from messages import commands, records, reports
from messages import requests as rq
from messages.wire import REPLIES, REQUESTS

LIMITS = Limits(requests_max=4)
ENGINE = reports.EngineInventory("e", 1, "m", 8, 1 << 30)


class SessionBench:
    """Client sessions, the core that handles their inputs, and the replies that were sent."""

    def __init__(self, default_path: str = "") -> None:
        self.controller = Controller(LIMITS, checked=True)
        self.controller.handle(records.ControllerStarted(1), 1)
        self.controller.handle(ENGINE, 1)
        self.sent: list[tuple[bytes, Any]] = []
        defaults = DefaultAdapters({"image": default_path} if default_path else {})
        self.sessions = ClientSessions(
            self.controller,
            None,  # type: ignore[arg-type]
            self._send,
            1,
            defaults,
        )

    def _send(self, client: bytes, frame: bytes) -> None:
        self.sent += [(client, reply) for reply in REPLIES.decode(frame).message]

    def take_sent(self) -> list[tuple[bytes, Any]]:
        sent, self.sent = self.sent, []
        return sent

    def receive(self, message: rq.Request, client: bytes = b"c") -> Any:
        """Handle all inputs of the message, send their replies, return the last input."""
        inputs = self.sessions.receive(client, REQUESTS.encode((message,)))
        assert [sender for _, sender in inputs] in ([], [client], [b"", client])
        for received, _ in inputs:
            self.handle(received)
        return inputs[-1][0] if inputs else None

    def handle(self, message: Any) -> None:
        """Handle an input, and send its replies."""
        for action in self.controller.handle(message, 1):
            if isinstance(getattr(action, "message", None), rq.Reply):
                self.sessions.answer(action.message)

    def start(self, request_id: str, op: int = 1) -> commands.StartGeneration | None:
        return self.sessions.with_payload(commands.StartGeneration(op, request_id, 0, -1, 0))

    def pool(self, request_id: str, task: rq.PoolingTask) -> commands.StartPooling | None:
        return self.sessions.with_payload(commands.StartPooling(1, request_id, 0, -1, 0, task))
