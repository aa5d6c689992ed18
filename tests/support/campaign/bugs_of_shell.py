"""Planted bugs of the shell, the engine link and the client library."""

from typing import Any
from unittest import mock

from loradock.client.calls import ClientCall
from loradock.client.streams import EventCursor
from loradock.controller.server import server as server_module
from loradock.controller.server.clients import ClientTable, Payloads
from loradock.controller.server.engine_link import EngineLink
from loradock.controller.server.event_stream import EventStream
from loradock.controller.server.inputs import LogicalClock
from loradock.controller.server.supervision import EngineSupervision
from loradock.engine.worker.controller_link import ControllerLink
from loradock.messages import wire
from tests.support.campaign.bug_registry import Replacement, bug, nothing


@bug
def event_skipped() -> Replacement:
    original = EventStream.take_batch

    def take_batch(self: EventStream) -> Any:
        self._batch[:] = [event for event in self._batch if event.seq % 7]
        return original(self)

    return EventStream, "take_batch", take_batch


@bug
def engine_loss_ignored() -> Replacement:
    return EngineSupervision, "loss", nothing


@bug
def engine_never_restarted() -> Replacement:
    return EngineSupervision, "restart", nothing


@bug
def epoch_used_twice() -> Replacement:
    def first_start(*numbers: int) -> int:
        largest = max(numbers)
        return 1_700_000_000 if largest > 1_000_000_000 else largest

    return server_module, "max", first_start


@bug
def frames_to_earlier_starts_executed() -> Replacement:
    return wire, "_EPOCH", slice(0)


@bug
def recorded_time_jumps() -> Replacement:
    return LogicalClock, "now_ns", LogicalClock.wall_ns


@bug
def prompts_exchanged() -> Replacement:
    original = Payloads.complete

    def complete(self: Payloads, command: Any) -> Any:
        if command.request_id not in self._by_id:
            return None
        another = next(iter(self._by_id.values()))
        with mock.patch.dict(self._by_id, {command.request_id: another}):
            exchanged = original(self, command)
        return exchanged or original(self, command)

    return Payloads, "complete", complete


@bug
def answer_sent_to_another_client() -> Replacement:
    original = ClientTable.route_of

    def route_of(self: ClientTable, name: str) -> bytes | None:
        return original(self, next(iter(self._by_name), name))

    return ClientTable, "route_of", route_of


@bug
def report_acknowledged_before_log() -> Replacement:
    def forget_unlogged(self: EngineLink, _now_ns: int) -> None:
        self._logged = self._delivered

    return EngineLink, "forget_unlogged", forget_unlogged


@bug
def new_epoch_not_adopted() -> Replacement:
    original = ControllerLink.accept

    def accept(self: ControllerLink, frame: Any) -> bool:
        before = self.epoch
        accepted = original(self, frame)
        self.epoch = before or self.epoch
        return accepted

    return ControllerLink, "accept", accept


@bug
def late_command_executed() -> Replacement:
    """A command that arrives again, or after later ones, is executed."""
    original = ControllerLink.accept

    def accept(self: ControllerLink, frame: Any) -> bool:
        return original(self, frame) or frame.epoch == self.epoch

    return ControllerLink, "accept", accept


@bug
def repetition_with_another_id() -> Replacement:
    original = ClientCall.next_body

    def next_body(self: ClientCall, now: float) -> bytes | None:
        was_sent = self.sent
        body = original(self, now)
        if body is None or not was_sent:
            return body
        request_id = self.request_id.encode()
        return body.replace(request_id, b"~" * len(request_id), 1)

    return ClientCall, "next_body", next_body


@bug
def cursor_accepts_gaps() -> Replacement:
    def append(self: EventCursor, batch: Any) -> None:
        for published in batch:
            if published.seq >= self.next_seq:
                self.ready.append(published)
                self.next_seq = published.seq + 1

    return EventCursor, "_append", append
