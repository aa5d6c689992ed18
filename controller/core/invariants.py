"""What must always hold, said a second time.

What it is: the design's invariants, computed from scratch. What it is not: used by any decision.
One rule: it shares no account and no index with the code that it checks, and changes nothing.
"""

from collections import Counter

from controller.core.limits import Limits
from controller.core.tier_queues import TIERS
from controller.core.world import NO_CLAIM, RESIDENT, Adapter, World
from controller.states.table import HEIGHT
from messages import commands
from messages.ids import CPU_CACHED, EVICTED, GPU_SLOT, NO_SLOT, PINNED, UNREGISTERED, AdapterId


class InvariantError(AssertionError):
    """The world contradicts itself: a defect of ours."""


def check(world: World, limits: Limits) -> None:
    """Raise `InvariantError` for the first invariant that does not hold."""
    _bounds_hold(world, limits)
    for law in (_slots_agree, _accounts_agree, _indexes_agree, _nobody_is_forced):
        law(world)
    for law in (_operations_agree, _requests_agree, _something_goes_on, _queues_agree):
        law(world)
    _require(world.digest() == world.digest_from_scratch(), "the digest forgot a change")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


def _has_strangers(world: World) -> bool:
    """What an engine brought along may be beyond a bound until it is driven out."""
    return any(a.retired and not a.loads for a in world.adapters.values())


def _bounds_hold(world: World, limits: Limits) -> None:
    """No tier is over its bound, also during a change."""
    _require(len(world.answers) <= limits.answers_max, f"{len(world.answers)} answers")
    _require(len(world.waiting) <= limits.requests_max, f"{len(world.waiting)} requests")
    if _has_strangers(world):
        return
    host, pinned, device = (world.tiers[tier] for tier in TIERS)
    _require(host.count <= limits.host_adapters_max, f"{host.count} adapters on the host")
    _require(host.size_bytes <= limits.host_bytes_max, f"{host.size_bytes} bytes on the host")
    _require(pinned.size_bytes <= limits.pinned_bytes_max, f"{pinned.size_bytes} bytes pinned")
    engine = world.engine
    slots_max, device_bytes_max = limits.slots_max, limits.device_bytes_max
    if engine is not None:
        slots_max = min(slots_max, engine.slots_max)
        device_bytes_max = min(device_bytes_max, engine.device_bytes_max)
    _require(device.count <= slots_max, f"{device.count} slots")
    _require(device.size_bytes <= device_bytes_max, f"{device.size_bytes} device bytes")


def _slots_agree(world: World) -> None:
    """One adapter a slot, one slot an adapter; the table and the records say the same."""
    by_table = {slot.adapter_id: index for index, slot in world.slots.items() if slot.adapter_id}
    by_record = {a.id: a.slot for a in world.adapters.values() if a.slot != NO_SLOT}
    _require(by_table == by_record, f"slot table {by_table} and records {by_record} differ")
    taken = [slot for slot in world.slots.values() if slot.adapter_id]
    _require(len(taken) == len(by_table), "an adapter is in two slots")
    free = sorted(set(world.slots) - set(by_table.values()))
    _require(sorted(world.free_slots) == free, f"free slots {world.free_slots} are not {free}")
    for adapter in world.adapters.values():
        writing = _command_type(world, adapter) is commands.WriteSlot
        in_slot = adapter.state == GPU_SLOT or writing
        _require(in_slot == (adapter.slot != NO_SLOT), f"{adapter} and its slot differ")
        if adapter.slot != NO_SLOT:
            slot = world.slots[adapter.slot]
            _require(slot.generation == adapter.generation, f"{adapter} is of another generation")
    generations = [slot.generation for slot in taken]
    _require(len(generations) == len(set(generations)), f"a generation twice in {generations}")
    _require(max(generations, default=0) < world.next_generation, "a generation is given again")


def _command_type(world: World, adapter: Adapter) -> type | None:
    operation = world.operations.get(adapter.op)
    return None if operation is None else type(operation.command)


def _expected_charge(world: World, adapter: Adapter) -> tuple[bool, bool, bool, bool]:
    """Whether it is on the host, and pays for pageable, pinned and device memory."""
    kind = _command_type(world, adapter)
    loaded, staged = adapter.state == CPU_CACHED, adapter.state in (PINNED, GPU_SLOT)
    return (
        adapter.state in RESIDENT or kind is commands.LoadWeights,
        loaded or kind in (commands.LoadWeights, commands.UnstageWeights),
        staged or kind is commands.StageWeights,
        adapter.state == GPU_SLOT or kind is commands.WriteSlot,
    )


def _accounts_agree(world: World) -> None:
    """What each adapter is charged follows from its state and operation, and adds up."""
    count, slots, sums = 0, 0, [0, 0, 0]
    for adapter in world.adapters.values():
        on_host, host, pinned, device = _expected_charge(world, adapter)
        _require(adapter.on_host == on_host, f"{adapter} is on the host or is not")
        pageable = max(adapter.load_bytes, adapter.blob_bytes)
        expected = (host * pageable, pinned * adapter.blob_bytes, device * adapter.blob_bytes)
        charges = (adapter.host_bytes, adapter.pinned_bytes, adapter.device_bytes)
        _require(charges == expected, f"{adapter} pays {charges}, not {expected}")
        count += on_host
        slots += device
        sums = [total + part for total, part in zip(sums, charges, strict=True)]
    found = [world.tiers[tier].size_bytes for tier in TIERS]
    _require(found == sums, f"tiers say {found} bytes, adapters {sums}")
    counts = (world.tiers["host"].count, world.tiers["device"].count)
    _require(counts == (count, slots), f"tiers say {counts} places, adapters {(count, slots)}")


def _indexes_agree(world: World) -> None:
    """Goals, order and names are what the records say."""
    rises = {a.id: HEIGHT[a.goal] - HEIGHT[a.state] for a in world.adapters.values()}
    _require(set(world.leaving) == {a for a, rise in rises.items() if rise < 0}, "leaving")
    _require(set(world.striving) == {a for a, rise in rises.items() if rise > 0}, "striving")
    _require(set(world.held) == {a.id for a in world.adapters.values() if a.held}, "held")
    for state, index in world.recency.items():
        members = [a.id for a in world.adapters.values() if a.state == state]
        by_touch = sorted(members, key=lambda a: world.adapters[a].touched)
        _require(list(index) == by_touch, f"the order of {state} is {list(index)}, not {by_touch}")
    names = {a.name: a.id for a in world.adapters.values() if not (a.retired or a.predecessor)}
    _require(names == world.names, f"names {world.names} are not {names}")
    _require(list(world.answers) == list(world.answer_order), "the order of answers")
    for adapter in world.adapters.values():
        heir = world.adapters.get(adapter.successor)
        _require(heir is None or heir.predecessor == adapter.id, f"{adapter} and its heir")
        _require(bool(adapter.successor) == (heir is not None), f"the heir of {adapter} is gone")


def _nobody_is_forced(world: World) -> None:
    """Nothing held or leased is on its way out by policy."""
    for adapter in world.adapters.values():
        sinks = HEIGHT[adapter.goal] < HEIGHT[adapter.state]
        _require(not (adapter.held and sinks), f"held {adapter} is on its way out")
        in_place = adapter.leases == 0 or adapter.state == GPU_SLOT
        _require(in_place, f"leased {adapter} is not in its slot")
        _require(not (adapter.leases and adapter.op), f"leased {adapter} is being moved")


def _operations_agree(world: World) -> None:
    """Every operation is one adapter's or one request's, and leases are what runs."""
    _require(world.engine is not None or not world.operations, "operations without an engine")
    own = {a.op: a.id for a in world.adapters.values() if a.op}
    served = {w.op: request_id for request_id, w in world.waiting.items() if w.op}
    operations = world.operations.items()
    moving = {op: operation.adapter_id for op, operation in operations if operation.adapter_id}
    serving = {op: operation.request_id for op, operation in operations if operation.request_id}
    _require(own == moving, f"operations {moving} are not the adapters' {own}")
    _require(served == serving, f"operations {serving} are not the requests' {served}")
    _require(len(own) + len(served) == len(world.operations), "an operation for nobody")
    leases = Counter(a for w in world.waiting.values() if w.op for a in w.adapters)
    found = {a.id: a.leases for a in world.adapters.values() if a.leases}
    _require(found == dict(leases), f"leases {found} are not what runs, {leases}")


def _requests_agree(world: World) -> None:
    """Who waits is waited for; nobody waits for nothing, and nobody is answered twice."""
    expected: dict[AdapterId, dict[str, int]] = {}
    for request_id, waiting in world.waiting.items():
        _require(request_id not in world.answers or waiting.told, f"{request_id} is answered")
        _require(not waiting.told or bool(waiting.op), f"{request_id} is told and does nothing")
        if waiting.op or (request_id in world.batches and request_id != world.driven):
            continue
        is_open = bool(waiting.adapters) or not world.ready
        _require(is_open, f"{request_id} waits for nothing")
        for adapter_id in waiting.adapters:
            expected.setdefault(adapter_id, {})[request_id] = waiting.since
    found = {a.id: a.waiters for a in world.adapters.values() if a.waiters}
    _require(found == expected, f"waiters are {found}, not {expected}")
    for waiters in found.values():
        _require(list(waiters.values()) == sorted(waiters.values()), f"the order of {waiters}")
    _require(world.driven == next(iter(world.batches), "") or bool(world.driven), "no batch driven")
    batches = {r for r, w in world.waiting.items() if w.kind == "batch" and not w.op}
    _require(set(world.batches) == batches, f"batches {list(world.batches)} are not {batches}")


def _something_goes_on(world: World) -> None:
    """With an engine, whoever is not where he should be is being moved, or waits for a reason."""
    for adapter in world.adapters.values():
        still = (UNREGISTERED, EVICTED)
        _require(adapter.goal not in still or not adapter.held, f"{adapter} is held for nothing")
        gone = adapter.state in still and adapter.goal == UNREGISTERED and not adapter.op
        _require(not gone, f"{adapter} should be forgotten")
        if not world.ready or adapter.op or adapter.resting:
            continue
        rise = HEIGHT[adapter.goal] - HEIGHT[adapter.state]
        _require(
            rise <= 0 or adapter.id in world.queues.members,
            f"{adapter} strives and nothing goes on",
        )
        _require(rise >= 0 or adapter.leases > 0, f"{adapter} leaves and nothing goes on")


def _queues_agree(world: World) -> None:
    """Who queues has a reason, and stands where his claim puts him."""
    queued = 0
    for tier in TIERS:
        line = world.queues.lines[tier]
        members = [world.adapters[adapter_id] for _, adapter_id in line]
        by_claim = sorted((adapter.claim, adapter.id) for adapter in members)
        _require(line == by_claim, f"the queue for {tier} is {line}, not {by_claim}")
        for adapter in members:
            _require(adapter.id in world.striving, f"{adapter} queues and strives for nothing")
            _require(not adapter.op, f"{adapter} queues and is in motion")
            _require(adapter.claim != NO_CLAIM, f"{adapter} queues for nobody")
            _require(not adapter.resting, f"{adapter} queues and rests")
        queued += len(members)
    _require(queued == len(world.queues.members), "the queues' index")
    _require(queued == 0 or world.ready, "a queue without an engine")
