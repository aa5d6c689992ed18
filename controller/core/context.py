"""One input's handling: the world, the actions gathered so far, and the adapters to look at after.

What it is: the small vocabulary in which the core speaks (answer, publish, issue, move, aim). What
it is not: any decision. One rule: a change of the world that others count on (state, goal, answers,
operations) is made here and nowhere else, so accounts and indexes can't be forgotten.
"""

from typing import Final

from msgspec import Struct

from controller.core.actions import Action, Command, Publish, Reply
from controller.core.eviction import Policy
from controller.core.limits import Limits
from controller.core.world import Adapter, Operation, World
from controller.states.table import HEIGHT, move
from messages import commands, events, requests
from messages.errors import ErrorCode
from messages.ids import AdapterId, AdapterState, OpId, RequestId

NANOS_PER_MS: Final = 1_000_000


class Refusal(Exception):  # noqa: N818 - it is an answer, not a fault of ours
    """A request that can't be done; raised before anything was changed for it."""

    def __init__(self, code: ErrorCode, message: str) -> None:
        super().__init__(message)
        self.code = code
        self.message = message


class Turn(Struct, gc=False):
    """What one input may use.

    `due` are the adapters whose facts or wishes changed: `drive` follows up on them when the input
    itself is done, so that nobody acts on half of what it says.
    """

    world: World
    limits: Limits
    policy: Policy
    actions: list[Action]
    due: dict[AdapterId, None] = {}

    def answer(self, reply: requests.Reply) -> None:
        """Answer a request for good, and remember the answer for whoever asks again."""
        world = self.world
        world.answers[reply.request_id] = reply
        world.answer_order.append(reply.request_id)
        if len(world.answer_order) > self.limits.answers_max:
            self.forget_answer()
        world.answered += 1
        if type(reply) is requests.Refused:
            world.refused += 1
        self.actions.append(Reply(reply))

    def forget_answer(self) -> None:
        """Drop the oldest answer: its request would be taken for a new one."""
        del self.world.answers[self.world.answer_order.popleft()]

    def refuse(self, request_id: RequestId, code: ErrorCode, message: str) -> None:
        """Answer that it was not done."""
        self.answer(requests.Refused(request_id, code, message))

    def publish(self, event: events.Event) -> None:
        """Tell subscribers, with the next number of the stream."""
        world = self.world
        world.events_seq += 1
        self.actions.append(Publish(events.Published(world.events_seq, world.time_ns, event)))

    def next_op(self) -> OpId:
        """A fresh operation id."""
        op = self.world.next_op
        self.world.next_op = op + 1
        return op

    def issue(self, command: commands.Operation, adapter: Adapter) -> None:
        """Send the operation that moves an adapter, and keep it until its report."""
        world, op = self.world, command.op
        deadline_ns = world.time_ns + self.limits.operation_timeout_ms * NANOS_PER_MS
        world.add_deadline(deadline_ns, "operation", op)
        world.operations[op] = Operation(command, adapter.id, deadline_ns)
        adapter.op = op
        world.adapters.touch(adapter.id)
        self.actions.append(Command(command))

    def issue_for(self, request_id: RequestId, command: commands.Operation) -> None:
        """Send the operation that a request waits for; the request's own deadline bounds it."""
        world = self.world
        world.operations[command.op] = Operation(command, 0, 0, request_id)
        world.waiting[request_id].op = command.op
        self.actions.append(Command(command))

    def touch(self, adapter: Adapter) -> None:
        """The record was changed in place."""
        self.world.adapters.touch(adapter.id)

    def move(self, adapter: Adapter, trigger: str) -> None:
        """Follow a report: the state becomes what the table says; illegal ones change nothing."""
        recency = self.world.recency
        target = move(adapter.name, adapter.state, trigger)
        if adapter.state in recency:
            del recency[adapter.state][adapter.id]
        adapter.state = target
        if target in recency:
            self.mark_recent(adapter)
        self.aim(adapter, adapter.goal)

    def mark_recent(self, adapter: Adapter) -> None:
        """Put a resident adapter last in the order in which victims are looked for."""
        world = self.world
        world.clock += 1
        adapter.touched = world.clock
        order = world.recency[adapter.state]
        order[adapter.id] = None
        order.move_to_end(adapter.id)
        world.adapters.touch(adapter.id)

    def aim(self, adapter: Adapter, goal: AdapterState) -> None:
        """Set the goal; an adapter that no longer strives leaves its queue."""
        world, adapter_id = self.world, adapter.id
        adapter.goal = goal
        rise = HEIGHT[goal] - HEIGHT[adapter.state]
        if rise > 0:
            world.striving[adapter_id] = None
            world.leaving.pop(adapter_id, None)
        else:
            world.striving.pop(adapter_id, None)
            if adapter_id in world.queues.members:
                world.queues.leave(adapter_id)
            if rise < 0:
                world.leaving[adapter_id] = None
            else:
                world.leaving.pop(adapter_id, None)
        world.adapters.touch(adapter_id)
