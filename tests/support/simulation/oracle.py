"""An oracle of what clients and subscribers know, and of what the controller promised them.

It is built from inputs and actions alone, so that a restarted controller can be checked anew. Every
reply, command and event is compared with it. The controller's own invariants are not checked here.
"""

from typing import Any

from loradock.controller.core.world import Adapter, World
from loradock.messages import commands, events, records, requests

_STATE_AFTER: dict[type, str] = {
    events.AdapterCached: "cpu-cached",
    events.AdapterPinned: "pinned",
    events.AdapterActivated: "gpu-slot",
    events.AdapterDeactivated: "pinned",
    events.AdapterUnpinned: "cpu-cached",
    events.AdapterEvicted: "evicted",
}

SlotContent = tuple[int, int, str]
"""Slot, generation, and the fingerprint of the content that must be in it."""


class Oracle:
    """Requests, replies and events since the start of the log."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.requests: dict[str, Any] = {}
        self.replies: dict[str, Any] = {}
        self.replied_ns: dict[str, int] = {}
        self.forgotten: set[str] = set()
        self.states: dict[str, str] = {}
        self.holds: set[str] = set()
        # The number of each request, and that of each name's last removal by force.
        self.numbers: dict[str, int] = {}
        self.removed_at: dict[str, int] = {}
        self.events_seq = 0
        # What each inference was bound to when it was first sent.
        self.bound: dict[int, list[SlotContent]] = {}
        # The operations of generations that have no slot now.
        self.suspended: set[int] = set()

    def on_input(self, message: Any) -> None:
        """Record a request, or the loss of its prompt, after which its client sends it again."""
        if isinstance(message, records.InferenceRequested | requests.LifecycleRequest):
            if self._is_out_of_window(message.request_id):
                del self.replies[message.request_id]
            self.requests.setdefault(message.request_id, message)
            self.numbers.setdefault(message.request_id, len(self.numbers))
            if isinstance(message, requests.RemoveAdapter) and message.force:
                self.removed_at[message.adapter] = self.numbers[message.request_id]
            self.forgotten.discard(message.request_id)
        elif isinstance(message, records.PayloadLost):
            self.forgotten.add(message.request_id)

    def _is_out_of_window(self, request_id: str) -> bool:
        """Whether a request's answer is dropped for its age, so that it is executed again."""
        world = self.world
        if request_id not in self.replies or request_id in world.pending_requests:
            return False
        age_ns = world.time_ns - self.replied_ns[request_id]
        return request_id not in world.answers and age_ns > world.answers.bounds.kept_ns

    def on_reply(self, reply: Any) -> None:
        """Check that the first reply fits its request, and that later ones repeat it."""
        first = self.replies.get(reply.request_id)
        if first is not None:
            assert first == reply, f"{reply.request_id} is answered twice: {first}, {reply}"
            return
        self.replies[reply.request_id] = reply
        self.replied_ns[reply.request_id] = self.world.time_ns
        request = self.requests[reply.request_id]
        if isinstance(reply, requests.Refused):
            assert reply.message
            is_inference = isinstance(request, records.InferenceRequested)
            assert not (is_inference and "remove" in reply.message), f"{request} got {reply}"
        elif isinstance(request, requests.ActivateBatch):
            names = tuple(dict.fromkeys(request.adapters))
            assert tuple(placement.adapter for placement in reply.placements) == names
            for placement in reply.placements:
                adapter = self._in_slot(placement.slot)
                assert adapter.name == placement.adapter
                assert (adapter.state, adapter.generation) == ("gpu-slot", placement.generation)
        elif isinstance(request, requests.HoldAdapter):
            assert request.adapter == reply.adapter
            assert request.adapter in self.holds
        elif not isinstance(request, requests.CancelGeneration):
            assert request.adapter == reply.adapter

    def on_event(self, published: events.Published) -> None:
        """Record an event: they are numbered without gaps and report every adapter's state."""
        event = published.event
        self.events_seq += 1
        assert published.seq == self.events_seq, "a gap in the events"
        match event:
            case events.AdapterHeld(adapter=name):
                assert name not in self.holds
                self.holds.add(name)
            case events.AdapterReleased(adapter=name):
                self.holds.remove(name)
            case events.AdapterRemoved(adapter=name):
                assert self.states.pop(name) == "evicted" or name in self.removed_at
                assert name not in self.holds
            case _ if type(event) in _STATE_AFTER:
                self.states[event.adapter] = _STATE_AFTER[type(event)]

    def on_command(self, command: Any) -> None:
        """Check that held and leased adapters stay, and that each request uses its own adapter."""
        match command:
            case commands.ResetSlot() | commands.PreemptSlot():
                self._check_leaving(command)
            case commands.WriteSlot():
                self._bind_again(command)
            case commands.StartGeneration() | commands.StartPooling():
                self._bind_inference(command)

    def _check_leaving(self, command: commands.ResetSlot | commands.PreemptSlot) -> None:
        adapter = self._in_slot(command.slot)
        assert adapter.generation == command.generation
        if self.world.names.get(adapter.name) == adapter.id:
            assert adapter.name not in self.holds, f"{command} takes {adapter}, which is held"
        for op, operation in self.world.operations.items():
            if operation.request_id and op not in self.suspended:
                leased = [(slot, generation) for slot, generation, _ in self.bound.get(op, [])]
                if (command.slot, command.generation) in leased:
                    assert isinstance(command, commands.PreemptSlot), f"{command} under {op}"
                    assert operation.kind == "StartGeneration"
                    self.suspended.add(op)

    def _bind_again(self, command: commands.WriteSlot) -> None:
        """Check that suspended generations continue with the content that they began with."""
        adapter = self.world.adapters[command.adapter_id]
        assert (adapter.slot, adapter.generation) == (command.slot, command.generation)
        for op in sorted(self.suspended & self.world.operations.keys()):
            request_id = self.world.operations[op].request_id
            [(_, _, fingerprint)] = self.bound[op]
            if self.world.pending_requests[request_id].adapters == (command.adapter_id,):
                assert adapter.fingerprint == fingerprint, f"{command} continues on other content"
                self.bound[op] = [(command.slot, command.generation, fingerprint)]
                self.suspended.discard(op)

    def _bind_inference(self, command: commands.StartInference) -> None:
        request = self.requests[command.request_id]
        assert getattr(request, "task", None) == getattr(command, "task", None)
        assert (request.adapter is None) == (command.adapter_id == 0)
        slots = []
        if request.adapter is not None:
            slots.append(self._slot_content(command, request.adapter, command))
            assert self._in_slot(command.slot).id == command.adapter_id
        assert self.bound.setdefault(command.op, slots) == slots

    def _slot_content(self, command: Any, name: str, ref: Any) -> SlotContent:
        adapter = self._in_slot(ref.slot)
        assert adapter.name == name, f"{command} of {name} meets {adapter}"
        if command.op not in self.bound and self.world.names.get(name) != adapter.id:
            request_id = self.world.operations[command.op].request_id
            is_before = self.numbers[request_id] < self.removed_at.get(name, -1)
            assert adapter.retired, f"{command} is of no version of the name"
            assert is_before, f"{command} is of an old version"
        return ref.slot, ref.generation, adapter.fingerprint

    def _in_slot(self, slot: int) -> Adapter:
        [adapter] = [one for one in self.world.adapters.values() if one.slot == slot]
        return adapter

    def check(self) -> None:
        """Check that each accepted request is answered or pending, and that events are complete."""
        world = self.world
        for request_id in self.requests:
            if request_id not in self.replies and request_id not in self.forgotten:
                assert request_id in world.pending_requests, f"{request_id} was dropped"
        for request_id, pending in world.pending_requests.items():
            assert (request_id in self.replies) == pending.answered
        states = {name: world.adapters[a].state for name, a in world.names.items()}
        known = {name: state for name, state in states.items() if state != "unregistered"}
        assert known == self.states, f"the world has {known}, published was {self.states}"
        assert self.holds == {a.name for a in world.adapters.values() if a.held}
