"""The controller's core: one pure function from an input to actions.

Clients, replays and tests all call this same `handle`, which is the only writer of its `World`. It
uses no socket, file, clock or randomness.
"""

from collections.abc import Callable, Mapping
from typing import Any, Final, cast

from loradock.controller.core import deadlines, engine, reports, requests, waiting
from loradock.controller.core.actions import Action
from loradock.controller.core.context import Checked, Context
from loradock.controller.core.eviction import POLICIES, Policy, choose_lru, ranking_of
from loradock.controller.core.invariants import Excess, check, excess
from loradock.controller.core.limits import FIXED, Limits, check_limits, window_bounds
from loradock.controller.core.rankings import Ranking
from loradock.controller.core.reconcile import reconcile
from loradock.controller.core.requests import Pending, Request
from loradock.controller.core.world import World
from loradock.messages import records
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import Seq
from loradock.messages.reports import EngineInventory
from loradock.messages.requests import Reply


class Controller:
    """A world, and the function that applies inputs to it."""

    def __init__(
        self,
        limits: Limits,
        policy: str = "lru",
        *,
        checked: bool = False,
        policies: Mapping[str, Policy | type[Ranking]] = POLICIES,
    ) -> None:
        """`policy` names one of `policies`.

        `checked` verifies every invariant after every input; raises `InvariantError`.
        """
        self.world = World(limits)
        self._policies = policies
        self._configure(check_limits(limits), policy)
        self.world.rank_by(ranking_of(policies[policy]))
        self._checked = checked
        # What `check` allows after the current input; None if its state is not known before it.
        self._allowed: Excess | None = None

    def check(self, message: Request, body: int) -> Reply | Pending | Checked:
        """Return how a request is answered at once, without changing anything.

        That is its answer if it is a repetition, `PENDING` if it is a repetition of a request that
        waits, and a refusal if handling it would refuse it. `Checked`: it has to be handled.
        """
        return requests.check(self._context, message, body)

    def handle(
        self,
        message: records.Input,
        time_ns: int,
        body: int = 0,
        report_seq: Seq = 0,
        checked: Checked | None = None,
    ) -> list[Action]:
        """Handle one input at `time_ns`; returns the actions to perform.

        A time before the last time counts as the last time, so that the log's time never decreases.
        `body` is the hash of a request's body, by which its repetitions are known, `report_seq` the
        number of a report's frame. `checked`: what `check` returned for the request; it is checked
        again if another input came in between. After an exception the state is undefined.
        """
        world, context = self.world, self._context
        world.seq += 1
        if time_ns > world.time_ns:  # noqa: PLR1730 - a call of `max` takes twice as long
            world.time_ns = time_ns
        actions: list[Action] = []
        context.actions, context.body, context.departed = actions, body, 0
        context.checked = checked
        kind = type(message)
        if kind is EngineInventory:
            self._allowed = None
        _HANDLERS[kind](context, message)
        if report_seq and (attached := world.engine) is not None and report_seq > attached.reported:
            attached.reported = report_seq
        self._finish(context)
        return actions

    def skip(self, time_ns: int) -> None:
        """Count an input whose handling fails, and change nothing else for it."""
        self.world.seq += 1
        self.world.time_ns = max(self.world.time_ns, time_ns)

    def adopt(self, other: "Controller") -> None:
        """Continue with the state of another controller, in the objects of this controller.

        For a state that an exception has left half changed: views of the world stay valid.
        """
        # What was computed from the former adapters must not pass for computed from these.
        other.world.adapters.membership += self.world.adapters.membership + 1
        vars(self.world).update(vars(other.world))
        self._allowed = None
        self._configure(*other.settings)

    def reconfigure(self, limits: Limits, policy: str) -> list[Action]:
        """Continue under other settings; the attached engine counts as lost if they exclude it."""
        excludes = self.change_refusal(check_limits(limits))
        if policy != self.policy_name:
            self.world.rank_by(ranking_of(self._policies[policy]))
        self._configure(limits, policy)
        context, self._allowed = self._context, None
        if excludes:
            engine.lose(context, "the limits were changed")
            self.world.free_slots = list(range(limits.max_loras))
        self.world.set_bounds(limits)
        for request_id in tuple(self.world.pending_requests)[limits.requests_max :]:
            fewer = f"requests_max was lowered to {limits.requests_max}; try again later"
            waiting.refuse_request(context, request_id, ErrorCode.OVERLOADED, fewer)
        self.world.answers.set_bounds(window_bounds(limits))
        # What waits can have room now.
        context.dirty_adapters.update(dict.fromkeys(self.world.queues.members))
        self._finish(context)
        return context.actions

    def _configure(self, limits: Limits, policy: str) -> None:
        self.limits, self.policy_name = limits, policy
        chosen = self._policies[policy]
        # Whose turn ends is no choice of a ranking.
        function = choose_lru if ranking_of(chosen) else cast("Policy", chosen)
        self._context = Context(self.world, limits, function, [], policy)

    @property
    def settings(self) -> tuple[Limits, str]:
        """Limits and policy: what it decides by, besides its inputs."""
        return self.limits, self.policy_name

    def change_refusal(self, limits: Limits) -> str:
        """Return why the limits can't change while the engine stays attached; empty if they can."""
        for name in limits.__struct_fields__:
            before, after = getattr(self.limits, name), getattr(limits, name)
            if before != after and name in FIXED:
                return f"{name} is fixed while an engine runs; restart the server to change it"
            used = self._used(name)
            if before != after < used:
                return f"{name} can't be {after}: {used} are in use; evict or remove adapters first"
        return ""

    def _used(self, limit: str) -> int:
        """Return how much of a limit is in use; 0 for a limit that excludes nothing."""
        world = self.world
        host, pinned = world.tiers["host"], world.tiers["pinned"]
        match limit:
            case "max_cpu_loras":
                return max(host.count, pinned.count)
            case "host_bytes_max":
                return host.size_bytes
            case "pinned_bytes_max":
                return pinned.size_bytes
            case "known_adapters_max":
                return len(world.adapters)
            case _:
                return 0

    def digest(self) -> str:
        """Return the world's digest."""
        return self.world.digest()

    def _finish(self, context: Context) -> None:
        world = self.world
        if context.ready or context.dirty_adapters or world.batches:
            reconcile(context)
        if world.deadlines and not 0 < world.timer_ns <= world.deadlines[0][0]:
            deadlines.set_timer(context)
        if self._checked:
            check(world, self.limits, self._allowed)
            self._allowed = excess(world, self.limits)


_HANDLERS: Final[dict[type, Callable[[Context, Any], None]]] = {
    **dict.fromkeys(requests.REQUESTS, requests.on_request),
    **dict.fromkeys(reports.REPORTS, reports.on_report),
    EngineInventory: engine.on_inventory,
    records.EngineLost: engine.on_lost,
    records.PayloadLost: engine.on_payload_lost,
    records.ControllerStarted: engine.on_started,
    records.TimerFired: deadlines.on_timer,
    # The input that it names was skipped in its own place.
    records.InputSkipped: lambda _context, _message: None,
}
