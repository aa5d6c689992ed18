"""The controller's core and a real engine in one thread, without processes, log and sockets.

Every invariant of the core is checked after every input. The test decides when the engine steps.
"""

from collections import defaultdict
from typing import Any

from msgspec import structs

from loradock.controller.core.actions import PublishEvent, SendCommand, SendReply
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import Limits
from loradock.engine.worker.engine import Engine
from loradock.messages import commands, events, records, reports, requests
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_bench import PROMPT, EngineBench
from tests.support.waiting import PAUSE_S, wait_until

LIMITS = Limits(
    max_loras=4,
    max_cpu_loras=8,
    host_bytes_max=1 << 24,
    pinned_bytes_max=1 << 24,
    device_bytes_max=1 << 20,
)


class ServedBench:
    """A core and an engine; `tokens` are those of each request, `replies` its final answer."""

    def __init__(self, bench: EngineBench, limits: Limits = LIMITS) -> None:
        self.engine: Engine = bench.engine
        self.woken = bench.woken
        self.core = Controller(limits, checked=True)
        self.tokens: dict[str, list[int]] = defaultdict(list)
        self.replies: dict[str, Any] = {}
        self.events: list[events.Event] = []
        self.steps = self._requests = self._now_ns = 0
        self._payloads: dict[str, tuple[tuple[int, ...], Sampling]] = {}
        self.handle(records.ControllerStarted(1))
        self.handle(self.engine.inventory())

    @property
    def world(self) -> Any:
        """The core's state, for reading only."""
        return self.core.world

    def handle(self, message: Any) -> None:
        """Handle an input and perform its actions."""
        self._now_ns += 1000
        for action in self.core.handle(message, self._now_ns):
            match action:
                case SendCommand(message=commands.RequestInventory()):
                    self.handle(self.engine.inventory())
                case SendCommand(message=command):
                    self.engine.submit(self._with_payload(command))
                case SendReply(message=reply):
                    self.replies[reply.request_id] = reply
                case PublishEvent(message=published):
                    self.events.append(published.event)

    def send(self, kind: type, *fields: Any, **named: Any) -> str:
        """Send a request under a fresh id, which is returned."""
        self._requests += 1
        request_id = f"s{self._requests}"
        self.handle(kind(request_id, *fields, **named))
        return request_id

    def generate(
        self, name: str | None, max_tokens: int = 12, prompt: tuple[int, ...] = PROMPT
    ) -> str:
        """Send a generation, of the common prompt by default."""
        request_id = f"s{self._requests + 1}"
        self._payloads[request_id] = (prompt, Sampling(max_tokens=max_tokens))
        return self.send(records.GenerationRequested, name)

    def step(self) -> None:
        """Run one step of the engine, and handle its reports."""
        if self.engine.is_idle:
            self.woken.wait(PAUSE_S)
            self.woken.clear()
        self.engine.step()
        self.steps += 1
        for report in self.engine.poll():
            if isinstance(report, requests.TokensStreamed):
                self.tokens[report.request_id] += report.tokens
            elif not isinstance(report, reports.EngineBeat):
                self.handle(report)

    def wait(self, *request_ids: str) -> list[Any]:
        """Step until all requests are answered, and return the answers."""

        def answered() -> bool:
            self.step()
            return all(request_id in self.replies for request_id in request_ids)

        progress = lambda: (self.world.seq, sum(map(len, self.tokens.values())))  # noqa: E731
        wait_until(answered, progress, f"answers of {request_ids}", pause_s=0.0)
        return [self.replies[request_id] for request_id in request_ids]

    def request(self, kind: type, *fields: Any, **named: Any) -> Any:
        """Send a request and return its answer, which must not be a refusal."""
        [reply] = self.wait(self.send(kind, *fields, **named))
        assert not isinstance(reply, requests.Refused), reply
        return reply

    def alone(self, name: str | None, max_tokens: int = 12) -> list[int]:
        """Return the tokens of a generation that runs alone."""
        request_id = self.generate(name, max_tokens)
        self.wait(request_id)
        return self.tokens[request_id]

    def _with_payload(self, command: Any) -> Any:
        if not isinstance(command, commands.StartGeneration):
            return command
        prompt, sampling = self._payloads[command.request_id]
        return structs.replace(command, prompt=prompt, sampling=sampling)
