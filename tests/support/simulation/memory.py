"""What clients and subscribers know, and what they were promised.

What it is: a second set of records, built from inputs and actions alone, against which every reply,
command and event is held. What it is not: the controller's own invariants; those are checked there.
One rule: it is a function of the log, so that a restarted controller can be judged anew.
"""

from typing import Any

from controller.core.world import World
from messages import commands, events, records, requests

_STATE_AFTER: dict[type, str] = {
    events.AdapterCached: "cpu-cached",
    events.AdapterPinned: "pinned",
    events.AdapterActivated: "gpu-slot",
    events.AdapterDeactivated: "pinned",
    events.AdapterUnpinned: "cpu-cached",
    events.AdapterEvicted: "evicted",
}

Place = tuple[int, int, str]
"""Slot, generation, and the fingerprint of the content that must be there."""


class Memory:
    """All that was said since the log began."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.asked: dict[str, Any] = {}
        self.replies: dict[str, Any] = {}
        self.forgotten: set[str] = set()
        self.states: dict[str, str] = {}
        self.holds: set[str] = set()
        self.events_seq = 0
        # What each generation and batch was bound to when it was first sent.
        self.bound: dict[int, list[Place]] = {}

    def on_input(self, message: Any) -> None:
        """A request is asked, or its prompt is lost and it will be asked again."""
        if isinstance(message, records.InferenceRequested | requests.LifecycleRequest):
            self.asked.setdefault(message.request_id, message)
            self.forgotten.discard(message.request_id)
        elif isinstance(message, records.PayloadLost):
            self.forgotten.add(message.request_id)

    def on_reply(self, reply: Any) -> None:
        """The first answer fits its request; every later one is the first."""
        first = self.replies.get(reply.request_id)
        if first is not None:
            assert first == reply, f"{reply.request_id} is answered twice: {first}, {reply}"
            return
        self.replies[reply.request_id] = reply
        asked = self.asked[reply.request_id]
        if isinstance(reply, requests.Refused):
            assert reply.message
        elif isinstance(asked, requests.ActivateBatch):
            names = tuple(dict.fromkeys(asked.adapters))
            assert tuple(placement.adapter for placement in reply.placements) == names
        elif isinstance(asked, requests.HoldAdapter):
            assert asked.adapter == reply.adapter
            assert asked.adapter in self.holds
        elif not isinstance(asked, requests.CancelGeneration):
            assert asked.adapter == reply.adapter

    def on_event(self, published: events.Published) -> None:
        """Events are numbered without gaps and tell where every adapter is."""
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
                assert self.states.pop(name) == "evicted"
                assert name not in self.holds
            case _ if type(event) in _STATE_AFTER:
                self.states[event.adapter] = _STATE_AFTER[type(event)]

    def on_command(self, command: Any) -> None:
        """Nobody held or leased leaves a slot; whoever generates does it with its own adapter."""
        match command:
            case commands.ResetSlot():
                self._check_leaving(command)
            case commands.StartGeneration() | commands.StartPooling():
                self._bind_inference(command)
            case commands.SetMapping():
                self._bind_batch(command)

    def _check_leaving(self, command: commands.ResetSlot) -> None:
        adapter = self.world.adapters[self.world.slots[command.slot].adapter_id]
        assert adapter.generation == command.generation
        if self.world.names.get(adapter.name) == adapter.id:
            assert adapter.name not in self.holds, f"{command} takes {adapter}, which is held"
        for op, operation in self.world.operations.items():
            if operation.request_id:
                places = [place[:2] for place in self.bound.get(op, [])]
                assert (command.slot, command.generation) not in places, f"{command} under {op}"

    def _bind_inference(self, command: commands.StartInference) -> None:
        asked = self.asked[command.request_id]
        assert getattr(asked, "task", None) == getattr(command, "task", None)
        assert (asked.adapter is None) == (command.adapter_id == 0)
        places = []
        if asked.adapter is not None:
            places.append(self._place(command, asked.adapter, command))
            assert self.world.slots[command.slot].adapter_id == command.adapter_id
        assert self.bound.setdefault(command.op, places) == places

    def _bind_batch(self, command: commands.SetMapping) -> None:
        asked = self.asked[self.world.operations[command.op].request_id]
        names = tuple(dict.fromkeys(asked.adapters))
        places = [
            self._place(command, name, ref) for name, ref in zip(names, command.active, strict=True)
        ]
        assert self.bound.setdefault(command.op, places) == places

    def _place(self, command: Any, name: str, ref: Any) -> Place:
        adapter = self.world.adapters[self.world.slots[ref.slot].adapter_id]
        assert adapter.name == name, f"{command} of {name} meets {adapter}"
        if command.op not in self.bound:
            assert self.world.names[name] == adapter.id, f"{command} is of an old version"
        return ref.slot, ref.generation, adapter.fingerprint

    def check(self) -> None:
        """Every accepted request is answered or waits; subscribers know what is the case."""
        world = self.world
        for request_id in self.asked:
            if request_id not in self.replies and request_id not in self.forgotten:
                assert request_id in world.waiting, f"{request_id} was dropped"
        for request_id, waiting in world.waiting.items():
            assert (request_id in self.replies) == waiting.told
        states = {name: world.adapters[a].state for name, a in world.names.items()}
        found = {name: state for name, state in states.items() if state != "unregistered"}
        assert found == self.states, f"it is {found}, told was {self.states}"
        assert self.holds == {a.name for a in world.adapters.values() if a.held}
