"""The core with its engine in the same thread: a request in, its answer out.

What it is: the loop that the shell runs for processes, for a program that embeds both. What it is
not: the shell; there is no log, socket, client or clock, and no second opinion on any rule. One
rule: time passes only when nothing else can happen, so a request ends when its fact is there, or
when no waiting would bring it.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from controller.core import capacity
from controller.core.actions import Action, Command, Publish, Reply, SetTimer
from controller.core.context import Refusal, Turn
from controller.core.controller import Controller
from controller.core.limits import Limits
from controller.core.world import Adapter, World
from messages import commands, events, records, reports, requests
from messages.errors import ErrorCode
from messages.ids import UNREGISTERED

Execute = Callable[[commands.Command], Iterable[reports.LoggedReport]]
"""Does a command to its end, and returns what there is to report."""


class LocalController:
    """A `Controller` and the engine that does each of its commands at once.

    `observe` is called with every event, in order. `world` is for reading only.
    """

    def __init__(
        self,
        limits: Limits,
        policy: str,
        execute: Execute,
        observe: Callable[[events.Event], None] = lambda _: None,
        *,
        checked: bool = False,
    ) -> None:
        """`checked` verifies every invariant after every input; for tests, and when in doubt."""
        self._core = Controller(limits, policy, checked=checked)
        self._execute = execute
        self._observe = observe
        self._asked = 0
        self._inputs: deque[records.Input] = deque()
        self._replies: dict[str, requests.Reply] = {}

    @property
    def world(self) -> World:
        """All that the core knows."""
        return self._core.world

    def attach(self, inventory: reports.EngineInventory) -> None:
        """Introduce the engine; before that, nothing can be asked of it."""
        self._handle(inventory)

    def ask(
        self, kind: Callable[..., requests.LifecycleRequest], *fields: Any, **named: Any
    ) -> None:
        """Have a request done, and all that follows from it; raises `Refusal`.

        `kind` is called with a fresh request id and `fields`.
        """
        self._asked += 1
        request_id = f"r{self._asked}"
        self._handle(kind(request_id, *fields, **named))
        stalled = False
        while request_id not in self._replies:
            stalled = True
            self._let_time_pass()
        reply = self._replies.pop(request_id)
        if isinstance(reply, requests.Refused):
            raise Refusal(reply.code, self._why(reply, stalled))

    def find(self, name: str) -> Adapter | None:
        """The adapter under a name, if it has been loaded."""
        adapter = self.world.current(name)
        return None if adapter is None or adapter.state == UNREGISTERED else adapter

    def oldest(self) -> str | None:
        """The name of the least recently touched adapter that nobody holds; None without any."""
        adapters = self.world.adapters
        free = [
            next((adapters[a] for a in order if not adapters[a].held), None)
            for order in self.world.recency.values()
        ]
        found = min((a for a in free if a is not None), key=lambda a: a.touched, default=None)
        return None if found is None else found.name

    def why_never_together(self, sizes: Mapping[str, int | None]) -> str | None:
        """Why adapters of these names can't all be in slots; None where they can.

        None as a size takes the one that is known; another stands for a blob that is new, also
        where it will replace a known one. Otherwise the answer that an `ActivateBatch` would get.
        """
        adapters = tuple([self._as_if(name, size_bytes) for name, size_bytes in sizes.items()])
        turn = Turn(self.world, self._core.limits, self._core.policy, [])
        return capacity.why_never_together(turn, adapters)

    def _as_if(self, name: str, size_bytes: int | None) -> Adapter:
        known = self.world.current(name)
        if known is not None and size_bytes is None:
            return known
        return Adapter(0 if known is None else known.id, name, "", blob_bytes=size_bytes or 0)

    def _handle(self, message: records.Input, time_ns: int = 0) -> None:
        """One input, and the reports of every command that follows from it, all at one time."""
        self._inputs.append(message)
        while self._inputs:
            for action in self._core.handle(self._inputs.popleft(), time_ns):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case Command(message):
                self._inputs.extend(self._execute(message))
            case Reply(message):
                self._replies[message.request_id] = message
            case Publish(message):
                self._observe(message.event)
            case SetTimer():
                # The world knows its next deadline; it is looked up when nothing else is left.
                pass

    def _let_time_pass(self) -> None:
        """Nothing is under way: go on to the next deadline, if need be to the request's own."""
        if not self.world.timer_ns:
            raise RuntimeError("a request waits, nothing is under way and no deadline is set")
        self._handle(records.TimerFired(), self.world.timer_ns)

    def _why(self, reply: requests.Refused, stalled: bool) -> str:
        """The core's words, but where they speak of a time that nobody had."""
        if not stalled or reply.code is not ErrorCode.NO_ROOM:
            return reply.message
        host, device = self.world.tiers["host"], self.world.tiers["device"]
        return (
            f"there is no room, and nothing may leave to make some: {host.count} of "
            f"{host.count_max} adapters are on the host, {device.count} of {device.count_max} "
            f"slots are taken with {device.size_bytes} of {device.size_bytes_max} bytes, "
            f"{len(self.world.held)} adapters are held; deactivate, remove or release one"
        )
