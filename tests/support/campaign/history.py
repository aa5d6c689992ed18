"""What the controller promised to its clients and subscribers, observed on the wire.

It is built from frames and from what clients received, and compared with the recovered controller,
with a replay and with the engine. It shares no code with the controller.
"""

from typing import Any, Final

import msgspec

from loradock.client.calls import ClientCall
from loradock.controller.core.world import World
from loradock.messages import events, requests
from loradock.messages.errors import EngineGone, ErrorCode
from loradock.messages.events import Published
from loradock.messages.ids import scoped, unscoped
from loradock.messages.wire import EVENTS, REPLIES
from tests.support.campaign.client_process import (
    GENERATION_TIMEOUT_S,
    TIMEOUT_S,
    is_success,
    output_of,
)
from tests.support.campaign.engine_process import OUTPUT_TOKENS, output_tokens, output_vector
from tests.support.campaign.machine import MACHINE, SECOND

_FINAL: Final = (
    requests.AdapterDone,
    requests.BatchDone,
    requests.GenerationDone,
    requests.PoolingDone,
    requests.CancelDone,
    requests.PrefetchAccepted,
    requests.Refused,
)
_NOT_PROMISED: Final = (ErrorCode.LOG_UNAVAILABLE, ErrorCode.OVERLOADED)
"""Refusals of a state that passes: a repetition of the request may be accepted."""

_WAIT_NS_MAX: Final = int((GENERATION_TIMEOUT_S + 1.0) * SECOND)
"""Bound on the time that any request is pending without an answer; a beat is less than 1 s."""

_USES: Final = (
    requests.ActivateAdapter,
    requests.Generate,
    requests.Embed,
    requests.Classify,
)
"""Requests that increment their adapter's `uses` once."""


class History:
    """Everything that was requested, answered and published."""

    def __init__(self) -> None:
        self.requests: dict[str, Any] = {}
        self.answers: dict[str, Any] = {}
        self.published: dict[int, Published] = {}
        self.epoch = 0
        self.scopes: dict[bytes, str] = {}
        """The name of the client on each connection."""
        # Contents that each name may have, by their fingerprints.
        self.fingerprints: dict[str, set[str]] = {}
        # Requests whose clients know that they were refused.
        self._refused: set[str] = set()
        self._answered_in: dict[str, int] = {}
        self._begun_ns: dict[str, int] = {}
        # When each pending request was first seen since the controller last had a pause.
        self._pending_since: dict[str, int] = {}

    # Observations on the wire.

    def on_request(self, request_id: str, request: requests.Request) -> None:
        """Record a request under its id inside the controller."""
        self.requests[request_id] = request
        self._begun_ns[request_id] = MACHINE.now_ns

    def on_reply(self, route: bytes, frame: bytes) -> None:
        """Process the replies of a frame."""
        epoch, _, replies = REPLIES.decode(frame)
        for reply in replies:
            if isinstance(reply, _FINAL) and reply.request_id:
                self._on_answer(scoped(self.scopes[route], reply.request_id), reply, epoch)

    def _on_answer(self, request_id: str, reply: Any, epoch: int) -> None:
        """Check that an answer fits its request, and that a repeated one is equal."""
        request = self.requests.get(request_id)
        assert request is not None, f"an answer to no request of this client: {reply}"
        first = self.answers.get(request_id)
        is_refused = isinstance(reply, requests.Refused)
        assert is_refused or request_id not in self._refused, f"it was refused: {reply}"
        if first is None or self._may_change(request_id, first, epoch):
            self.answers[request_id] = reply
            self._answered_in[request_id] = epoch
            _check_fits(request, reply)
            self._check_not_early(request_id, reply)
        else:
            assert first == reply, f"{request} is answered differently: {first}, then {reply}"

    def _check_not_early(self, request_id: str, reply: Any) -> None:
        """Check that a request is not refused for its time before that has passed."""
        if isinstance(reply, requests.Refused) and " in time" in reply.message:
            waited = MACHINE.now_ns - self._begun_ns[request_id]
            assert waited >= int(TIMEOUT_S * SECOND), f"{reply} after {waited / SECOND} s"

    def check_deadlines(self, world: World, *, is_continuous: bool) -> None:
        """Check that no request waits for longer than its time while the controller serves."""
        if not is_continuous:
            self._pending_since.clear()
        since = self._pending_since
        for request_id, pending in world.pending_requests.items():
            if not pending.answered:
                assert request_id not in self._refused, f"{request_id} was refused: {pending}"
                waited = MACHINE.now_ns - since.setdefault(request_id, MACHINE.now_ns)
                assert waited <= _WAIT_NS_MAX, f"{request_id} is unanswered: {pending}"

    def _may_change(self, request_id: str, first: Any, epoch: int) -> bool:
        if not isinstance(first, requests.Refused):
            return False
        # A refusal changed nothing and is not logged, so a later controller may accept.
        return first.code in _NOT_PROMISED or epoch > self._answered_in[request_id]

    def on_events(self, frame: bytes) -> None:
        """Check that an event has the same number whenever it is published."""
        epoch, last_seq, batch = EVENTS.decode(frame)
        assert epoch >= self.epoch, f"epoch {epoch} publishes after epoch {self.epoch}"
        self.epoch = epoch
        for published in batch:
            self._note_event(published)
        if batch:
            assert batch[-1].seq == last_seq, "a frame is not numbered by its last event"
            assert [p.seq for p in batch] == list(range(batch[0].seq, last_seq + 1)), "a gap"

    def _note_event(self, published: Published) -> None:
        first = self.published.setdefault(published.seq, published)
        assert first == published, f"event {published.seq} is published as {first} and {published}"

    # Observations of clients.

    def on_settled(self, scope: str, call: ClientCall) -> None:
        """Check the output of a call against the contents that its adapter has had."""
        request, outcome = call.request, call.outcome
        if not is_success(call):
            # A call without an answer ends with the same error as one that waited for an engine,
            # and one that waits for a log that can't be written is told that it continues.
            continues = isinstance(outcome, EngineGone) or "was accepted" in str(outcome)
            if not isinstance(request, requests.Query) and not continues:
                self._refused.add(scoped(scope, call.request_id))
            return
        if isinstance(request, requests.Generate) and isinstance(outcome, requests.GenerationDone):
            if outcome.output_tokens == OUTPUT_TOKENS:
                allowed = [output_tokens(f, str(request.prompt)) for f in self._contents(request)]
                assert output_of(call) in allowed, f"{request} received the tokens of another"
        elif isinstance(outcome, requests.PoolingDone) and outcome.inputs:
            self._check_vectors(call, request)

    def _check_vectors(self, call: ClientCall, request: Any) -> None:
        allowed = [
            tuple(output_vector(fingerprint, str(text)) for text in request.inputs)
            for fingerprint in self._contents(request)
        ]
        assert output_of(call) in allowed, f"{request} received the vectors of another"

    def _contents(self, request: Any) -> set[str]:
        return {""} if request.adapter is None else self.fingerprints.get(request.adapter, set())

    # Comparison with a recovered controller.

    def check_recovered(self, world: World) -> None:
        """Check that a controller that has just recovered knows what was promised."""
        for request_id, answer in self.answers.items():
            if isinstance(answer, requests.Refused):
                continue
            kept = _unscoped(world.answers.get(request_id))
            assert kept == answer, f"{request_id} was answered {answer}; recovered was {kept}"
        last = max(self.published, default=0)
        assert world.events_seq >= last, f"event {last} was published, {world.events_seq} recovered"

    @staticmethod
    def check_events(published: list[Published]) -> None:
        """Check that the events of a whole log are a possible life of each adapter."""
        held: set[str] = set()
        lives = _Lives()
        for event in (entry.event for entry in published):
            match event:
                case events.AdapterHeld(adapter=name):
                    held.add(name)
                case events.AdapterReleased(adapter=name):
                    held.discard(name)
                case events.AdapterDeactivated(adapter=name):
                    assert name not in held, f"{event} of a held adapter"
            lives.on_event(event)

    def check_uses(self, world: World, changed_names: set[str]) -> None:
        """Check that each request counted as one use of its adapter, or none if it was refused."""
        done: dict[str, int] = {}
        open_: dict[str, int] = {}
        for request_id, request in self.requests.items():
            answer = self.answers.get(request_id)
            is_done = answer is not None and not isinstance(answer, requests.Refused)
            counts = done if is_done else open_
            for name in _used_names(request):
                counts[name] = counts.get(name, 0) + 1
        for name, adapter_id in world.names.items():
            if name in changed_names:
                continue
            uses, least = world.adapters[adapter_id].counters.uses, done.get(name, 0)
            most = least + open_.get(name, 0)
            assert least <= uses <= most, f"{name} has {uses} uses; {least} to {most} were due"


_STATES: Final[dict[type, tuple[tuple[str, ...], str]]] = {
    events.AdapterCached: (("evicted",), "cpu-cached"),
    events.AdapterPinned: (("cpu-cached",), "pinned"),
    events.AdapterActivated: (("pinned",), "gpu-slot"),
    events.AdapterDeactivated: (("gpu-slot",), "pinned"),
    events.AdapterUnpinned: (("pinned",), "cpu-cached"),
    events.AdapterEvicted: (("cpu-cached", "pinned", "gpu-slot"), "evicted"),
}
"""The states before and the state after each event."""


class _Lives:
    """The state of each adapter by its events, and the adapter in each slot."""

    def __init__(self) -> None:
        self._states: dict[str, str] = {}
        self._slots: dict[int, str] = {}

    def on_event(self, event: Any) -> None:
        change = _STATES.get(type(event))
        if isinstance(event, events.AdapterReplaced | events.AdapterRemoved):
            # The name stands for another version, whose state later events show.
            self._states.pop(event.adapter, None)
            self._leave(event.adapter)
        elif change is not None:
            allowed, state = change
            before = self._states.get(event.adapter)
            assert before is None or before in allowed, f"{event} of an adapter that is {before}"
            self._states[event.adapter] = state
            self._leave(event.adapter)
        if isinstance(event, events.EngineAttached):
            resident = [name for name, state in self._states.items() if state != "evicted"]
            assert not resident, f"{event}, but {resident} were in the engine before it"
        if isinstance(event, events.AdapterActivated):
            other = self._slots.setdefault(event.slot, event.adapter)
            assert other == event.adapter, f"{event}, but {other} is in the slot"

    def _leave(self, name: str) -> None:
        for slot in [slot for slot, adapter in self._slots.items() if adapter == name]:
            del self._slots[slot]


def _unscoped(kept: Any) -> Any:
    """Return a kept answer as its client receives it."""
    if kept is None:
        return None
    changes = {"request_id": unscoped(kept.reply.request_id)}
    if isinstance(kept.reply, requests.CancelDone):
        changes["target"] = unscoped(kept.reply.target)
    return msgspec.structs.replace(kept.reply, **changes)


def _used_names(request: Any) -> tuple[str, ...]:
    if isinstance(request, requests.ActivateBatch):
        return tuple(dict.fromkeys(request.adapters))
    if isinstance(request, _USES):
        return () if request.adapter is None else (request.adapter,)
    return ()


def _check_fits(request: Any, reply: Any) -> None:
    """Check that a first answer is of the request's kind and names its adapter."""
    if isinstance(reply, requests.Refused):
        assert reply.message
        is_inference = isinstance(request, requests.Generate | requests.Embed)
        is_for_removal = is_inference and "remove" in reply.message
        assert not is_for_removal, f"{request} was refused for a removal after it: {reply}"
    elif isinstance(request, requests.ActivateBatch):
        names = tuple(dict.fromkeys(request.adapters))
        assert tuple(placement.adapter for placement in reply.placements) == names
        slots = [placement.slot for placement in reply.placements]
        assert len(set(slots)) == len(slots), f"a slot serves two adapters: {reply}"
    elif isinstance(request, requests.CancelGeneration):
        assert reply.target == request.target
    else:
        assert reply.adapter == request.adapter, f"{request} is answered with {reply}"
