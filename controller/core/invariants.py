"""The invariants of the world, computed from scratch; for tests and `Controller(checked=True)`.

They share no counter and no index with the code that they check, and change nothing.
"""

from collections import Counter
from operator import le
from typing import Final

from msgspec.structs import astuple

from loradock.controller.core.counters import Counters
from loradock.controller.core.indexes import TIERS, TierName
from loradock.controller.core.limits import Limits, window_bounds
from loradock.controller.core.world import NO_PRIORITY, RESIDENT, STATES_HOLDING, Adapter, World
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.messages.ids import (
    CPU_CACHED,
    EVICTED,
    GPU_SLOT,
    NO_SLOT,
    PINNED,
    UNREGISTERED,
    AdapterId,
    client_of,
)


class InvariantError(AssertionError):
    """The world contradicts itself: a defect of the controller."""


Excess = tuple[int, ...]
"""By how much each bound of the tiers is exceeded."""

NO_EXCESS: Excess = (0,) * 5


def check(world: World, limits: Limits, allowed: Excess | None = NO_EXCESS) -> None:
    """Raise `InvariantError` for the first invariant that does not hold.

    An engine can hold more than the limits allow, if they were lowered or the log's tail is lost.
    `allowed` is the excess before the last input, which only an inventory can increase (None).
    """
    _check_bounds(world, limits)
    found = excess(world, limits)
    is_allowed = allowed is None or all(map(le, found, allowed))
    _require(is_allowed, f"the tiers exceed their bounds by {found}, before by {allowed}")
    _check_slots(world, limits)
    for check_one in (_check_usage, _check_indexes, _check_rankings):
        check_one(world)
    for check_one in (_check_exemptions, _check_operations, _check_suspended, _check_requests):
        check_one(world)
    for check_one in (_check_progress, _check_queues):
        check_one(world)
    _check_counters(world)
    _require(world.digest() == world.digest_from_scratch(), "the digest forgot a change")


def excess(world: World, limits: Limits) -> Excess:
    """Return by how much the tiers exceed the limits and the engine's capacity, also in motion."""
    host, pinned, device = (world.tiers[tier] for tier in TIERS)
    max_loras, device_bytes_max = limits.max_loras, limits.device_bytes_max
    if world.engine is not None:
        max_loras = min(max_loras, world.engine.max_loras)
        device_bytes_max = min(device_bytes_max, world.engine.device_bytes_max)
    used_and_allowed = (
        (host.count, limits.max_cpu_loras),
        (host.size_bytes, limits.host_bytes_max),
        (pinned.size_bytes, limits.pinned_bytes_max),
        (device.count, max_loras),
        (device.size_bytes, device_bytes_max),
    )
    return tuple([max(0, used - most) for used, most in used_and_allowed])


def _require(holds: bool, problem: str) -> None:
    if not holds:
        raise InvariantError(problem)


def _check_bounds(world: World, limits: Limits) -> None:
    """Answers and unanswered requests do not exceed their bounds.

    A running request stays pending if it was refused because its bound was lowered.
    """
    answers = len(world.answers)
    pending = sum(1 for one in world.pending_requests.values() if not one.answered)
    _require(answers <= limits.answers_max, f"{answers} answers")
    _require(world.answers.bounds == window_bounds(limits), "the bounds of answers")
    _require(pending <= limits.requests_max, f"{pending} requests")


def _check_slots(world: World, limits: Limits) -> None:
    """One adapter per slot, and the other slots are free."""
    taken = {a.id: a.slot for a in world.adapters.values() if a.slot != NO_SLOT}
    _require(len(taken) == len(set(taken.values())), f"two adapters are in a slot: {taken}")
    free = sorted({*range(limits.max_loras)} - {*taken.values()})
    _require(sorted(world.free_slots) == free, f"free slots {world.free_slots} are not {free}")
    for adapter in world.adapters.values():
        writing = _kind_of_operation(world, adapter) == "WriteSlot"
        in_slot = adapter.state == GPU_SLOT or writing
        _require(in_slot == (adapter.slot != NO_SLOT), f"{adapter} and its slot differ")
    generations = [world.adapters[adapter_id].generation for adapter_id in taken]
    _require(len(generations) == len(set(generations)), f"a generation twice in {generations}")
    _require(max(generations, default=0) < world.next_generation, "a generation is used again")


def _kind_of_operation(world: World, adapter: Adapter) -> str:
    return world.operations[adapter.op].kind if adapter.op in world.operations else ""


def _expected_usage(world: World, adapter: Adapter) -> tuple[bool, bool, bool, bool]:
    """Return whether it counts on the host and for pageable, pinned and device memory."""
    kind = _kind_of_operation(world, adapter)
    loaded, staged = adapter.state == CPU_CACHED, adapter.state in (PINNED, GPU_SLOT)
    return (
        adapter.state in RESIDENT or kind == "LoadWeights",
        loaded or kind in ("LoadWeights", "UnstageWeights"),
        staged or kind == "StageWeights",
        adapter.state == GPU_SLOT or kind == "WriteSlot",
    )


def _check_usage(world: World) -> None:
    """Each adapter is charged by its state and operation, and the tiers are charged the sums."""
    counts, sums = [0, 0, 0], [0, 0, 0]
    for adapter in world.adapters.values():
        on_host, host, pinned, device = _expected_usage(world, adapter)
        _require(adapter.on_host == on_host, f"{adapter} is on the host or is not")
        pageable = max(adapter.load_bytes, adapter.blob_bytes)
        expected = (host * pageable, pinned * adapter.blob_bytes, device * adapter.blob_bytes)
        charges = (adapter.host_bytes, adapter.pinned_bytes, adapter.device_bytes)
        _require(charges == expected, f"{adapter} is charged {charges}, not {expected}")
        _require(adapter.is_staged == pinned, f"{adapter} is staged or is not")
        places = (on_host, pinned, device)
        counts = [total + part for total, part in zip(counts, places, strict=True)]
        sums = [total + part for total, part in zip(sums, charges, strict=True)]
    found = [world.tiers[tier].size_bytes for tier in TIERS]
    _require(found == sums, f"the tiers count {found} bytes, the adapters {sums}")
    found = [world.tiers[tier].count for tier in TIERS]
    _require(found == counts, f"the tiers count {found} adapters, it is {counts}")


def _check_indexes(world: World) -> None:
    """Every index equals the index that is built from the records."""
    rises = {
        a.id: RESIDENCY_LEVEL[a.goal] - RESIDENCY_LEVEL[a.state] for a in world.adapters.values()
    }
    _require(set(world.demoting) == {a for a, rise in rises.items() if rise < 0}, "demoting")
    _require(set(world.promoting) == {a for a, rise in rises.items() if rise > 0}, "promoting")
    _require(set(world.held) == {a.id for a in world.adapters.values() if a.held}, "held")
    for state, index in world.lru_order.items():
        members = [a.id for a in world.adapters.values() if a.state == state]
        by_stamp = sorted(members, key=lambda a: world.adapters[a].lru_stamp)
        _require(list(index) == by_stamp, f"the order of {state} is {list(index)}, not {by_stamp}")
    for adapter in world.adapters.values():
        is_above = RESIDENCY_LEVEL[adapter.kept] > RESIDENCY_LEVEL[adapter.goal]
        _require(not is_above, f"the goal of {adapter} is below what it keeps")
    are_of_adapters = set(world.warnings) <= set(world.adapters) and all(world.warnings.values())
    _require(are_of_adapters, f"warnings of no adapter, or none of one: {world.warnings}")
    names = {a.name: a.id for a in world.adapters.values() if not (a.retired or a.predecessor)}
    _require(names == world.names, f"names {world.names} are not {names}")
    windows: dict[str, list[str]] = {}
    for request_id in world.answers:
        windows.setdefault(client_of(request_id), []).append(request_id)
    for client, window in windows.items():
        is_bounded = len(window) <= world.answers.bounds.client_max
        _require(is_bounded, f"{len(window)} answers of {client}")
        _require(window == list(world.answers.window(client)), f"the window of {client}")
    for adapter in world.adapters.values():
        successor = world.adapters.get(adapter.successor)
        is_mutual = successor is None or successor.predecessor == adapter.id
        _require(is_mutual, f"{adapter} and its successor differ")
        is_known = bool(adapter.successor) == (successor is not None)
        _require(is_known, f"the successor of {adapter} is unknown")


def _check_rankings(world: World) -> None:
    """Each ranking has the adapters of its tier, in the order that its entries state."""
    for tier, ranking in world.rankings.items():
        members = {a.id for a in world.adapters.values() if a.state in STATES_HOLDING[tier]}
        _require(
            set(ranking) == members, f"the ranking of {tier} is {list(ranking)}, not {members}"
        )
        _require(ranking.is_consistent(), f"the order of the ranking of {tier}")


def _check_exemptions(world: World) -> None:
    """No held adapter is demoted, and no leased adapter leaves its slot."""
    for adapter in world.adapters.values():
        is_demoted = RESIDENCY_LEVEL[adapter.goal] < RESIDENCY_LEVEL[adapter.state]
        _require(not (adapter.held and is_demoted), f"held {adapter} is demoted")
        in_place = adapter.leases == 0 or adapter.state == GPU_SLOT
        _require(in_place, f"leased {adapter} is not in its slot")
        _require(not (adapter.leases and adapter.op), f"leased {adapter} is being moved")


def _check_operations(world: World) -> None:
    """Each operation belongs to one adapter or one request, and running requests lease."""
    _require(world.engine is not None or not world.operations, "operations without an engine")
    own = {a.op: a.id for a in world.adapters.values() if a.op}
    served = {w.op: request_id for request_id, w in world.pending_requests.items() if w.op}
    operations = world.operations.items()
    moving = {op: operation.adapter_id for op, operation in operations if operation.adapter_id}
    serving = {op: operation.request_id for op, operation in operations if operation.request_id}
    _require(own == moving, f"operations {moving} are not the adapters' {own}")
    _require(served == serving, f"operations {serving} are not the requests' {served}")
    _require(
        len(own) + len(served) == len(world.operations),
        "an operation without an adapter or a request",
    )
    leases = Counter(
        adapter_id
        for request_id, pending in world.pending_requests.items()
        for adapter_id in pending.adapters
        if pending.op and request_id not in world.adapters[adapter_id].waiters
    )
    found = {a.id: a.leases for a in world.adapters.values() if a.leases}
    _require(found == dict(leases), f"leases {found} are not those of running requests, {leases}")


def _suspended(world: World, adapter: Adapter) -> dict[str, int]:
    """Return the waiters for which the engine has an open operation."""
    waiters = adapter.waiters.items()
    return {one: since for one, since in waiters if world.pending_requests[one].op}


def _check_suspended(world: World) -> None:
    """Suspended requests are generations without a lease that wait since after their arrival."""
    for adapter in world.adapters.values():
        suspended = _suspended(world, adapter)
        _require(not (suspended and adapter.leases), f"{adapter} runs some and suspends others")
        for request_id, since in suspended.items():
            pending = world.pending_requests[request_id]
            is_generation = world.operations[pending.op].kind == "StartGeneration"
            _require(is_generation, f"{request_id} is suspended and no generation")
            _require(pending.adapters == (adapter.id,), f"{request_id} waits for {adapter}")
            is_due = pending.arrived_seq < since <= world.seq + len(world.adapters)
            _require(is_due, f"{request_id} waits since {since}")
            is_kept = bool(adapter.op) or adapter.state != GPU_SLOT or not world.engine_ready
            _require(is_kept, f"{request_id} is suspended although {adapter} is in its slot")


def _check_requests(world: World) -> None:
    """Pending requests and adapters' waiters agree; no request is answered twice."""
    expected: dict[AdapterId, dict[str, int]] = {
        adapter.id: suspended
        for adapter in world.adapters.values()
        if (suspended := _suspended(world, adapter))
    }
    for request_id, pending in world.pending_requests.items():
        is_open = request_id not in world.answers or pending.answered
        _require(is_open, f"{request_id} is pending and has an answer")
        _require(not pending.answered or bool(pending.op), f"{request_id} is answered and idle")
        if pending.op or (request_id in world.batches and request_id != world.current_batch):
            continue
        has_reason = bool(pending.adapters) or not world.engine_ready
        _require(has_reason, f"{request_id} waits for nothing")
        for adapter_id in pending.adapters:
            expected.setdefault(adapter_id, {})[request_id] = pending.arrived_seq
    found = {a.id: a.waiters for a in world.adapters.values() if a.waiters}
    _require(found == expected, f"waiters are {found}, not {expected}")
    for waiters in found.values():
        _require(list(waiters.values()) == sorted(waiters.values()), f"the order of {waiters}")
    batches = [r for r, w in world.pending_requests.items() if w.kind == "batch"]
    _require(list(world.batches) == batches, f"batches {list(world.batches)} are not {batches}")
    _require(world.current_batch == next(iter(batches), ""), f"the batch {world.current_batch}")


def _check_progress(world: World) -> None:
    """With an engine, an adapter that is not at its goal is in motion or waits for a reason."""
    for adapter in world.adapters.values():
        no_weights = (UNREGISTERED, EVICTED)
        keeps = adapter.goal not in no_weights or not adapter.held
        _require(keeps, f"{adapter} is held without a goal")
        gone = adapter.state in no_weights and adapter.goal == UNREGISTERED and not adapter.op
        has_suspended = bool(_suspended(world, adapter))
        _require(not gone or has_suspended, f"{adapter} should be removed")
        if not world.engine_ready or adapter.op or adapter.backing_off:
            continue
        rise = RESIDENCY_LEVEL[adapter.goal] - RESIDENCY_LEVEL[adapter.state]
        is_queued = adapter.id in world.queues.members
        _require(rise <= 0 or is_queued, f"{adapter} is promoted without progress")
        is_used = adapter.leases > 0 or has_suspended
        _require(rise >= 0 or is_used, f"{adapter} is demoted without progress")


def _check_queues(world: World) -> None:
    """Each queued adapter is promoted, has a priority and stands where the priority puts it."""
    queued = 0
    for tier in TIERS:
        queue = world.queues.by_tier[tier]
        members = [world.adapters[adapter_id] for _, adapter_id in queue]
        by_priority = sorted((adapter.priority, adapter.id) for adapter in members)
        _require(queue == by_priority, f"the queue for {tier} is {queue}, not {by_priority}")
        for adapter in members:
            _require(adapter.id in world.promoting, f"{adapter} is queued and not promoted")
            _require(not adapter.op, f"{adapter} is queued and in motion")
            _require(adapter.priority != NO_PRIORITY, f"{adapter} is queued without priority")
            _require(not adapter.backing_off, f"{adapter} is queued and backing off")
        queued += len(members)
    _require(queued == len(world.queues.members), "the queues' index")
    _require(queued == 0 or world.engine_ready, "a queue without an engine")


_RESERVING: Final[dict[str, TierName]] = {
    "LoadWeights": "host",
    "StageWeights": "pinned",
    "WriteSlot": "device",
}
_ENTRIES: Final[dict[TierName, tuple[str, str]]] = {
    "host": ("loads", "unloads"),
    "pinned": ("stagings", "unstagings"),
    "device": ("activations", "deactivations"),
}


def _check_counters(world: World) -> None:
    """The totals are the sum of all counters, and agree with the tiers' and the slots' counts."""
    totals = world.totals
    all_counters = [
        world.past_counters,
        world.base_counters,
        *(a.counters for a in world.adapters.values()),
    ]
    expected = tuple(map(sum, zip(*map(astuple, all_counters), strict=True)))
    _require(astuple(totals) == expected, f"{totals} are not the sums {Counters(*expected)}")
    reserved = Counter(_RESERVING.get(o.kind) for o in world.operations.values())
    for tier, (entered, left) in _ENTRIES.items():
        inside, count = getattr(totals, entered) - getattr(totals, left), world.tiers[tier].count
        is_equal = inside + reserved[tier] == count
        _require(is_equal, f"the counters have {inside} adapters in {tier}, the tier {count}")
    taken = sum(1 for adapter in world.adapters.values() if adapter.slot != NO_SLOT)
    used = totals.activations - totals.deactivations + reserved["device"]
    _require(used == taken, f"the counters have {used} slots in use, there are {taken}")
    evictions = (totals.evictions, totals.evictions_caused)
    _require(evictions[0] == evictions[1], f"evictions suffered and caused are {evictions}")
    stalls = (totals.stall_ns, totals.stall_caused_ns)
    _require(stalls[0] == stalls[1], f"stalls suffered and caused are {stalls}")
    for adapter in world.adapters.values():
        latest = max(adapter.state_since_ns, adapter.step_since_ns)
        _require(latest <= world.time_ns, f"{adapter} has a time in the future")
