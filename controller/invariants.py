"""What must always hold, said a second time.

What it is: the design's invariants, computed from scratch. What it is not: used by any decision.
One rule: it shares no account and no index with the code that it checks, and changes nothing.
"""

from collections import Counter

from controller.limits import Limits
from controller.states.table import HEIGHT
from controller.world import RESIDENT, Adapter, World
from messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED


class InvariantError(AssertionError):
    """The world contradicts itself: a defect of ours."""


def check(world: World, limits: Limits) -> None:
    """Raise `InvariantError` for the first invariant that does not hold."""
    _bounds_hold(world, limits)
    for law in (_slots_agree, _accounts_agree, _wishes_agree, _work_agrees):
        law(world)
    _require(world.digest() == world.digest_from_scratch(), "the digest forgot a change")


def _require(holds: bool, what: str) -> None:
    if not holds:
        raise InvariantError(what)


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
        writing = _operation_kind(world, adapter) == "WriteSlot"
        in_slot = adapter.state == GPU_SLOT or writing
        _require(in_slot == (adapter.slot != NO_SLOT), f"{adapter} and its slot differ")
        if adapter.slot != NO_SLOT:
            slot = world.slots[adapter.slot]
            _require(slot.generation == adapter.generation, f"{adapter} is of another generation")


def _operation_kind(world: World, adapter: Adapter) -> str:
    operation = world.operations.get(adapter.op)
    return "" if operation is None else operation.kind


def _expected_charge(world: World, adapter: Adapter) -> tuple[bool, bool, bool, bool]:
    """Whether it is on the host, and pays for pageable, pinned and device memory."""
    kind = _operation_kind(world, adapter)
    loaded, staged = adapter.state == CPU_CACHED, adapter.state in (PINNED, GPU_SLOT)
    return (
        adapter.state in RESIDENT or kind == "LoadWeights",
        loaded or kind in ("LoadWeights", "UnstageWeights"),
        staged or kind == "StageWeights",
        adapter.state == GPU_SLOT or kind == "WriteSlot",
    )


def _accounts_agree(world: World) -> None:
    """What each adapter is charged follows from its state and operation, and adds up."""
    count, slots, sums = 0, 0, [0, 0, 0]
    for adapter in world.adapters.values():
        on_host, host, pinned, device = _expected_charge(world, adapter)
        charges = (adapter.host_bytes, adapter.pinned_bytes, adapter.device_bytes)
        _require(adapter.on_host == on_host, f"{adapter} is on the host or is not")
        _require(host or not charges[0], f"{adapter} pays for pageable memory")
        _require(charges[1] == (adapter.blob_bytes if pinned else 0), f"{adapter} pinned bytes")
        _require(charges[2] == (adapter.blob_bytes if device else 0), f"{adapter} device bytes")
        count += on_host
        slots += device
        sums = [total + part for total, part in zip(sums, charges, strict=True)]
    tiers = world.tiers
    found = [tiers[name].size_bytes for name in ("host", "pinned", "device")]
    _require(found == sums, f"tiers say {found} bytes, adapters {sums}")
    counts = (tiers["host"].count, tiers["device"].count)
    _require(counts == (count, slots), f"tiers say {counts} places, adapters {(count, slots)}")


def _bounds_hold(world: World, limits: Limits) -> None:
    """No tier is over its bound, also during a change."""
    host, pinned, device = (world.tiers[name] for name in ("host", "pinned", "device"))
    _require(host.count <= limits.host_adapters_max, f"{host.count} adapters on the host")
    _require(host.size_bytes <= limits.host_bytes_max, f"{host.size_bytes} bytes on the host")
    _require(pinned.size_bytes <= limits.pinned_bytes_max, f"{pinned.size_bytes} bytes pinned")
    _require(device.count <= limits.slots_max, f"{device.count} slots")
    _require(device.size_bytes <= limits.device_bytes_max, f"{device.size_bytes} device bytes")
    _require(len(world.answers) <= limits.answers_max, f"{len(world.answers)} answers")
    _require(len(world.waiting) <= limits.requests_max, f"{len(world.waiting)} requests")


def _wishes_agree(world: World) -> None:
    """Goals, indexes and order agree; nothing held or leased is on its way out by policy."""
    for adapter in world.adapters.values():
        rise = HEIGHT[adapter.goal] - HEIGHT[adapter.state]
        _require((rise < 0) == (adapter.id in world.leaving), f"{adapter} leaves or not")
        _require((rise > 0) == (adapter.id in world.striving), f"{adapter} strives or not")
        _require(adapter.held == (adapter.id in world.held), f"{adapter} is held or not")
        _require(not (adapter.held and rise < 0), f"held {adapter} is on its way out")
        leased_in_place = adapter.leases == 0 or adapter.state == GPU_SLOT
        _require(leased_in_place, f"leased {adapter} is not in its slot")
        _require(not (adapter.leases and adapter.op), f"leased {adapter} is being moved")
    for state, index in world.recency.items():
        members = [a.id for a in world.adapters.values() if a.state == state]
        by_touch = sorted(members, key=lambda a: world.adapters[a].touched)
        _require(list(index) == by_touch, f"the order of {state} is {list(index)}, not {by_touch}")
    names = {a.name: a.id for a in world.adapters.values() if not (a.retired or a.predecessor)}
    _require(names == world.names, f"names {world.names} are not {names}")


def _work_agrees(world: World) -> None:
    """Operations, requests and adapters name one another; nobody waits for nothing."""
    own = {a.op: a.id for a in world.adapters.values() if a.op}
    operations = {
        op: operation.adapter_id
        for op, operation in world.operations.items()
        if operation.request_id is None
    }
    _require(own == operations, f"operations {operations} are not the adapters' {own}")
    leases = Counter(
        operation.adapter_id
        for operation in world.operations.values()
        if operation.kind == "StartGeneration" and operation.adapter_id
    )
    found = {a.id: a.leases for a in world.adapters.values() if a.leases}
    _require(found == dict(leases), f"leases {found} are not the running generations' {leases}")
    waiting = [r for a in world.adapters.values() for r in a.waiters]
    _require(all(r in world.waiting for r in waiting), "an adapter waits for an ended request")
    for request_id in world.waiting:
        _require(request_id not in world.answers or world.waiting[request_id].told, request_id)
