"""The context that every handler receives, with the changes that must keep indexes consistent.

State, goal, answers and operations are changed by these methods only.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

from loradock.controller.core.actions import Action, PublishEvent, SendReply
from loradock.controller.core.answers import Answer
from loradock.controller.core.counters import COUNTS_OF_TRANSITION, DURATION_OF, TIME_IN
from loradock.controller.core.eviction import STATE_BY_STATE, Policy, choose_lru
from loradock.controller.core.limits import Limits
from loradock.controller.core.world import Adapter, PendingRequest, World
from loradock.controller.states.machine import next_state
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages import events, requests
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import AdapterId, AdapterState, OpId, RequestId, Seq

NANOS_PER_MS: Final = 1_000_000


class Refusal(Exception):  # noqa: N818 - an answer to a client, not an error of the controller
    """A request that can't be done; raised before anything was changed for it.

    Clients and the digest receive the message, so another wording needs another `RULES` number.
    """

    def __init__(self, code: ErrorCode, message: str, retry_after_ms: int = 0) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self.retry_after_ms = retry_after_ms

    def reply(self, request_id: RequestId) -> requests.Refused:
        """Return the answer to the refused request."""
        return requests.Refused(request_id, self.code, self.message, self.retry_after_ms)


def unknown_adapter(name: str) -> Refusal:
    """Return the refusal of a request for a name that no adapter has."""
    return Refusal(ErrorCode.UNKNOWN_ADAPTER, f"adapter {name!r} is not known; load it first")


class Checked(NamedTuple):
    """A request that passed its check, at one state of one world: before the input `seq + 1`.

    `needed` is what its handler needs.
    """

    context: "Context"
    seq: Seq
    needed: Any


@dataclass(slots=True)
class Context:
    """The world, its limits and policy, and the actions collected for the current input.

    `dirty_adapters` are those whose state, goal
    or requests changed, and `ready` are new requests whose adapters can be in their slots. Both are
    reconciled when the input is handled completely, so that no decision sees a part of it. `body`
    is the hash of the current request's body.
    """

    world: World
    limits: Limits
    policy: Policy
    actions: list[Action]
    policy_name: str = "lru"
    dirty_adapters: dict[AdapterId, None] = field(default_factory=dict)
    ready: list[tuple[RequestId, PendingRequest]] = field(default_factory=list)
    body: int = 0
    # The earlier check of the current request, if there was one.
    checked: Checked | None = None
    # The adapter that was the last to free room in this input; 0 for none.
    departed: AdapterId = 0

    @property
    def current_policy(self) -> Policy:
        """The policy, or `lru` if it has failed."""
        return choose_lru if self.world.policy_failure else self.policy

    @property
    def is_state_by_state(self) -> bool:
        """True if the current policy is one of `STATE_BY_STATE`."""
        return self.policy_name in STATE_BY_STATE and not self.world.policy_failure

    def answer(self, reply: requests.Reply) -> None:
        """Send a request's final answer, and store it for repetitions of the request."""
        world = self.world
        # A request that is not pending is answered by the input that it arrived with.
        pending = world.pending_requests.get(reply.request_id)
        body = self.body if pending is None else pending.body
        world.add_answer(Answer(reply, body, world.time_ns))
        world.answered += 1
        if type(reply) is requests.Refused:
            world.refused += 1
        self.actions.append(SendReply(reply))

    def publish(self, event: events.Event) -> None:
        """Publish an event under the next number of the stream."""
        world = self.world
        number = world.events_seq = world.events_seq + 1
        wall_ns = world.time_ns + world.wall_offset_ns
        self.actions.append(PublishEvent(events.Published(number, wall_ns, event)))

    def publish_if_current(self, adapter: Adapter, event: events.Event) -> None:
        """Publish an event of an adapter if its name stands for this version, not for another."""
        if self.world.names.get(adapter.name) == adapter.id:
            self.publish(event)

    def next_op(self) -> OpId:
        """Return a fresh operation id."""
        op = self.world.next_op
        self.world.next_op = op + 1
        return op

    def bound_operation(self, op: OpId) -> None:
        """Set the time at which the engine must have reported on an operation."""
        world = self.world
        deadline_ns = world.time_ns + self.limits.operation_timeout_ms * NANOS_PER_MS
        world.operations[op].deadline_ns = deadline_ns
        world.add_deadline(deadline_ns, "operation", op)

    def mark_changed(self, adapter: Adapter) -> None:
        """Record for the digest that the adapter was changed in place."""
        self.world.adapters.mark_changed(adapter.id)

    def apply_transition(self, adapter: Adapter, trigger: str) -> None:
        """Set the state that follows `trigger`.

        Raises `IllegalTransitionError` and changes nothing if the table has no such transition.
        """
        lru_order = self.world.lru_order
        target = next_state(adapter.name, adapter.state, trigger)
        if adapter.state in lru_order:
            lru_order[adapter.state].remove(adapter.lru_stamp)
        self._count_transition(adapter, target)
        before, adapter.state = adapter.state, target
        if target in lru_order:
            if not adapter.lru_stamp:
                self._stamp(adapter)
            lru_order[target].add(adapter.lru_stamp, adapter.id)
        if self.world.rankings:
            self._tell_rankings(self.world.rank, adapter, before)
        if adapter.prefetched:
            # Wherever its prefetch ends, it stays.
            self.keep(adapter, target)
        self.set_goal(adapter, adapter.goal)

    def _count_transition(self, adapter: Adapter, target: AdapterState) -> None:
        self.count_time_in_state(adapter)
        for name in COUNTS_OF_TRANSITION.get((adapter.state, target), ()):
            self.count(adapter, name)

    def count_time_in_state(self, adapter: Adapter) -> None:
        """Count the time that the adapter has been in its state."""
        now_ns = self.world.time_ns
        self.count(adapter, TIME_IN[adapter.state], now_ns - adapter.state_since_ns)
        adapter.state_since_ns = now_ns

    def count(self, adapter: Adapter, name: str, amount: int = 1) -> None:
        """Add to a field of the adapter's counters and of the totals."""
        for counters in (adapter.counters, self.world.totals):
            setattr(counters, name, getattr(counters, name) + amount)
        self.world.adapters.mark_changed(adapter.id)

    def step_ns(self, adapter: Adapter) -> int:
        """Return the time since the adapter's operation was sent, or since it waits for room."""
        return self.world.time_ns - adapter.step_since_ns

    def count_duration(self, adapter: Adapter, kind: str) -> None:
        """Count how long an operation towards a slot took."""
        name = DURATION_OF.get(kind)
        if name is not None:
            self.count(adapter, name, self.step_ns(adapter))

    def count_served(
        self, adapter: Adapter | None, prompt_tokens: int, output_tokens: int = 0, reused: int = 0
    ) -> None:
        """Count the end of an inference; `reused` of its prompt's tokens were in the KV cache.

        `adapter` is None for the base model.
        """
        world = self.world
        own = world.base_counters if adapter is None else adapter.counters
        for counters in (own, world.totals):
            counters.served += 1
            counters.prompt_tokens += prompt_tokens
            counters.output_tokens += output_tokens
            if reused:
                counters.prefix_hits += 1
                counters.prefix_tokens += reused

    def leave_queue(self, adapter: Adapter, cause: Adapter | None = None) -> None:
        """Remove an adapter from its queue; `cause` left the room that it enters."""
        self.world.queues.leave(adapter.id)
        self._count_stall(adapter, cause)

    def clear_queues(self) -> None:
        """Remove every adapter from its queue."""
        world = self.world
        waiting = [world.adapters[adapter_id] for adapter_id in world.queues.members]
        world.queues.clear()
        for adapter in waiting:
            self._count_stall(adapter, None)

    def _count_stall(self, adapter: Adapter, cause: Adapter | None) -> None:
        """Count a wait for room, to its cause too; without one, to removed adapters."""
        world = self.world
        stall_ns = self.step_ns(adapter)
        self.count(adapter, "stalls")
        self.count(adapter, "stall_ns", stall_ns)
        if cause is not None:
            self.count(cause, "stall_caused_ns", stall_ns)
        else:
            world.past_counters.stall_caused_ns += stall_ns
            world.totals.stall_caused_ns += stall_ns

    def touch_lru(self, adapter: Adapter) -> None:
        """Make an adapter the most recently used one."""
        order = self.world.lru_order.get(adapter.state)
        if order is not None:
            order.remove(adapter.lru_stamp)
            self._stamp(adapter)
            order.add(adapter.lru_stamp, adapter.id)
        else:
            self._stamp(adapter)

    def rank_use(self, adapter: Adapter) -> None:
        """Record a request for an adapter in the rankings."""
        self._tell_rankings(self.world.rank_use, adapter)

    def _tell_rankings(self, record: Callable[..., None], *facts: Any) -> None:
        try:
            record(*facts)
        # Any exception: nothing is known about a policy of another package.
        except Exception as error:
            self.replace_policy(f"raised {type(error).__name__}")

    def replace_policy(self, reason: str) -> None:
        """Let `lru` decide from now on, because the policy is wrong; publish it."""
        self.world.rank_by(None)
        self.world.policy_failure = reason
        self.publish(events.PolicyFailed(self.policy_name, reason))

    def _stamp(self, adapter: Adapter) -> None:
        world = self.world
        adapter.lru_stamp = world.lru_counter = world.lru_counter + 1
        world.adapters.mark_changed(adapter.id)

    def keep(self, adapter: Adapter, state: AdapterState) -> None:
        """Record that a request was granted `state`: later refusals do not lower it."""
        if RESIDENCY_LEVEL[state] > RESIDENCY_LEVEL[adapter.kept]:
            adapter.kept = state
            self.world.adapters.mark_changed(adapter.id)

    def set_goal(self, adapter: Adapter, goal: AdapterState) -> None:
        """Set the goal; an adapter whose goal is not above its state leaves its queue."""
        world, adapter_id = self.world, adapter.id
        adapter.goal = goal
        if RESIDENCY_LEVEL[goal] < RESIDENCY_LEVEL[adapter.kept]:
            adapter.kept = goal
        rise = RESIDENCY_LEVEL[goal] - RESIDENCY_LEVEL[adapter.state]
        if rise > 0:
            world.promoting[adapter_id] = None
            world.demoting.pop(adapter_id, None)
        else:
            adapter.prefetched = False
            world.promoting.pop(adapter_id, None)
            if adapter_id in world.queues.members:
                self.leave_queue(adapter)
            if rise < 0:
                world.demoting[adapter_id] = None
            else:
                world.demoting.pop(adapter_id, None)
        world.adapters.mark_changed(adapter_id)
