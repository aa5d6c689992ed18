"""The core with its engine in the same thread: a request is answered before its call returns.

The shell does the same for processes; here there is no log, socket, client or clock. Time passes
only when nothing else can happen, so that a request ends when its adapter is ready, or when no
waiting could make it ready.
"""

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from loradock.controller.core import capacity
from loradock.controller.core.actions import (
    Action,
    PublishEvent,
    SendCommand,
    SendReply,
)
from loradock.controller.core.context import Context, Refusal
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import choose_none
from loradock.controller.core.limits import Limits
from loradock.controller.core.world import Adapter, World
from loradock.messages import commands, events, records, reports, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import UNREGISTERED

Execute = Callable[[commands.Command], Iterable[reports.LoggedReport]]
"""Completes a command and returns its reports."""


class InProcessController:
    """A `Controller` and an engine that completes each command at once.

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
        """`checked` verifies every invariant after every input; raises `InvariantError`."""
        self._core = Controller(limits, policy, checked=checked)
        self._execute = execute
        self._observe = observe
        self._request_count = 0
        self._inputs: deque[records.Input] = deque()
        self._replies: dict[str, requests.Reply] = {}

    @property
    def world(self) -> World:
        """The core's state."""
        return self._core.world

    def attach(self, inventory: reports.EngineInventory) -> None:
        """Attach the engine; before that, it is sent no commands."""
        self._handle(inventory)

    def request(
        self, kind: Callable[..., requests.LifecycleRequest], *fields: Any, **named: Any
    ) -> None:
        """Complete a request and everything that follows from it; raises `Refusal`.

        `kind` is called with a fresh request id and `fields`.
        """
        self._request_count += 1
        request_id = f"r{self._request_count}"
        self._handle(kind(request_id, *fields, **named))
        stalled = False
        while request_id not in self._replies:
            stalled = True
            self._let_time_pass()
        reply = self._replies.pop(request_id)
        if isinstance(reply, requests.Refused):
            raise Refusal(reply.code, self._refusal_text(reply, stalled))

    def find(self, name: str) -> Adapter | None:
        """Return the adapter under a name, None unless it was loaded once."""
        adapter = self.world.current(name)
        return None if adapter is None or adapter.state == UNREGISTERED else adapter

    def least_recently_used(self) -> str | None:
        """Return the name of the least recently used resident adapter that is not held, or None."""
        adapters = self.world.adapters
        candidates = [
            next((adapters[a] for a in order if not adapters[a].held), None)
            for order in self.world.lru_order.values()
        ]
        evictable = (adapter for adapter in candidates if adapter is not None)
        oldest = min(evictable, key=lambda adapter: adapter.lru_stamp, default=None)
        return None if oldest is None else oldest.name

    def permanent_shortage_of_batch(self, sizes: Mapping[str, int | None]) -> str | None:
        """Return why adapters of these names can't all be in slots; None if they can.

        The text is an `ActivateBatch` refusal's. `sizes` are the blobs' bytes by name: None
        means the known adapter's size, a number a new blob, which can replace the known adapter's.
        """
        adapters = tuple(
            [self._with_blob_size(name, size_bytes) for name, size_bytes in sizes.items()]
        )
        context = Context(self.world, self._core.limits, choose_none, [])
        return capacity.permanent_shortage_of_batch(context, adapters)

    def _with_blob_size(self, name: str, size_bytes: int | None) -> Adapter:
        known = self.world.current(name)
        if known is not None and size_bytes is None:
            return known
        return Adapter(0 if known is None else known.id, name, "", blob_bytes=size_bytes or 0)

    def _handle(self, message: records.Input, time_ns: int = 0) -> None:
        """Handle one input and the reports of every command that follows from it, at one time."""
        self._inputs.append(message)
        while self._inputs:
            for action in self._core.handle(self._inputs.popleft(), time_ns):
                self._perform(action)

    def _perform(self, action: Action) -> None:
        match action:
            case SendCommand(message):
                # As on the link to an engine, no command is sent before an inventory that was
                # requested is handled: the core sends what it lacks.
                if not any(isinstance(one, reports.EngineInventory) for one in self._inputs):
                    self._inputs.extend(self._execute(message))
            case SendReply(message):
                self._replies[message.request_id] = message
            case PublishEvent(message):
                self._observe(message.event)
            case _:
                raise RuntimeError(f"the engine did not complete its commands: {action.reason}")

    def _let_time_pass(self) -> None:
        """Advance to the next deadline, at the latest the waiting request's own."""
        if not self.world.timer_ns:
            raise RuntimeError("a request waits, no operation is in flight and no deadline is set")
        self._handle(records.TimerFired(), self.world.timer_ns)

    def _refusal_text(self, reply: requests.Refused, stalled: bool) -> str:
        """Return the core's text, or a text without waiting times if time was skipped."""
        if not stalled or reply.code is not ErrorCode.NO_ROOM:
            return reply.message
        host, device = self.world.tiers["host"], self.world.tiers["device"]
        return (
            f"there is no room, and nothing may leave to make some: {host.count} of "
            f"{host.count_max} adapters are on the host, {device.count} of {device.count_max} "
            f"slots are taken with {device.size_bytes} of {device.size_bytes_max} bytes, "
            f"{len(self.world.held)} adapters are held; deactivate, remove or release one"
        )
