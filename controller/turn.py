"""One input's handling: the world, and the actions gathered so far.

What it is: the small vocabulary in which the core speaks (answer, publish, issue, move, aim). What
it is not: any decision. One rule: a change of the world that others count on (state, goal, answers,
operations) is made here and nowhere else, so accounts and indexes can't be forgotten.
"""

from typing import Final

from msgspec import Struct

from controller.actions import Action, Command, Publish, Reply
from controller.limits import Limits
from controller.policies import Policy
from controller.states.table import HEIGHT, move
from controller.world import Adapter, Operation, World
from messages import commands, events, requests
from messages.errors import ErrorCode
from messages.ids import NO_SLOT, AdapterState, OpId, RequestId

NANOS_PER_MS: Final = 1_000_000


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault of ours
    """A request that can't be done; raised before anything was changed for it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Turn(Struct, gc=False):
    """What one input may use."""

    world: World
    limits: Limits
    policy: Policy
    actions: list[Action]

    def answer(self, reply: requests.Reply) -> None:
        """Answer a request for good, and remember the answer for whoever asks again."""
        world = self.world
        answers = world.answers
        answers[reply.request_id] = reply
        if len(answers) > self.limits.answers_max:
            del answers[answers.first()]
        world.answered += 1
        if type(reply) is requests.Refused:
            world.refused += 1
        self.actions.append(Reply(reply))

    def refuse(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        """Answer that it was not done."""
        self.answer(requests.Refused(request_id, code, message))

    def publish(self, event: events.Event) -> None:
        """Tell subscribers, with the next number of the stream."""
        world = self.world
        world.events_seq += 1
        self.actions.append(
            Publish(events.Published(world.events_seq, world.time_ns, event)),
        )

    def next_op(self) -> OpId:
        """A fresh operation id."""
        op = self.world.next_op
        self.world.next_op += 1
        return op

    def issue(
        self, command: commands.Operation, adapter: Adapter | None, request_id: RequestId | None
    ) -> None:
        """Send an operation and keep it until its report.

        It is the adapter's own one unless it serves a request: a generation or a batch leaves its
        adapters free to be asked for.
        """
        deadline_ns = 0
        if request_id is None:
            deadline_ns = self.world.time_ns + self.limits.operation_timeout_ms * NANOS_PER_MS
            self.world.add_deadline(deadline_ns, "op", command.op)
        self.world.operations[command.op] = Operation(
            kind=type(command).__name__,
            adapter_id=0 if adapter is None else adapter.id,
            slot=getattr(command, "slot", NO_SLOT),
            generation=getattr(command, "generation", 0),
            deadline_ns=deadline_ns,
            request_id=request_id,
        )
        if adapter is not None and request_id is None:
            adapter.op = command.op
            self.touch(adapter)
        self.actions.append(Command(command))

    def touch(self, adapter: Adapter) -> None:
        """The record was changed in place."""
        self.world.adapters.touch(adapter.id)

    def move(self, adapter: Adapter, trigger: str) -> None:
        """Follow a report: the state becomes what the table says; illegal ones change nothing."""
        world = self.world
        target = move(adapter.name, adapter.state, trigger)
        world.recency.get(adapter.state, {}).pop(adapter.id, None)
        adapter.state = target
        if target in world.recency:
            self.mark_recent(adapter)
        self.aim(adapter, adapter.goal)

    def mark_recent(self, adapter: Adapter) -> None:
        """Put it last in the order in which victims are looked for."""
        world = self.world
        world.clock += 1
        adapter.touched = world.clock
        order = world.recency[adapter.state]
        order.pop(adapter.id, None)
        order[adapter.id] = None
        world.adapters.touch(adapter.id)

    def aim(self, adapter: Adapter, goal: AdapterState) -> None:
        """Set the goal; an adapter that no longer strives leaves its queue."""
        world = self.world
        adapter.goal = goal
        rise = HEIGHT[goal] - HEIGHT[adapter.state]
        if rise > 0:
            world.striving[adapter.id] = None
        else:
            world.striving.pop(adapter.id, None)
        if rise < 0:
            world.leaving[adapter.id] = None
        else:
            world.leaving.pop(adapter.id, None)
        if rise <= 0 and adapter.id in world.queued:
            del world.queues[world.queued.pop(adapter.id)][adapter.id]
        world.adapters.touch(adapter.id)
