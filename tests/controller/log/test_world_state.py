"""A restored world is the world that was encoded: every field, and every decision after it."""

from hypothesis import given, settings
from hypothesis import strategies as st

from controller.core.controller import Controller
from controller.core.invariants import check
from controller.core.limits import Limits
from controller.core.world import World
from controller.log.world_state import DERIVED, WorldState, encode_world, restore_world
from tests.support.simulation.logged_histories import fold, history


def restored(controller: Controller) -> Controller:
    copy = Controller(controller.limits, controller.policy_name)
    restore_world(copy.world, encode_world(controller.world))
    return copy


def test_every_field_of_a_world_is_stored_or_derived() -> None:
    stored, fields = set(WorldState.__struct_fields__), set(vars(World(Limits())))
    assert stored | set(DERIVED) == fields, "a new field belongs in WorldState or in DERIVED"
    assert not stored & set(DERIVED)


@given(seed=st.integers(0, 400))
@settings(max_examples=12, deadline=None)
def test_from_every_point_of_a_history_the_same_follows(seed: int) -> None:
    limits, records = history(seed)
    whole, actions = fold(limits, records)
    final = encode_world(whole.world)
    controller = Controller(limits)
    for point, record in enumerate(records):
        copy = restored(controller)
        check(copy.world, limits)
        assert copy.digest() == controller.digest()
        assert fields_of(copy.world) == fields_of(controller.world)
        # The rest of the history from every seventh point, and the next input from every point.
        rest = records[point : None if point % 7 == 0 else point + 1]
        later = [copy.handle(later.input, later.time_ns) for later in rest]
        assert later == actions[point : point + len(rest)], f"other actions after record {point}"
        controller.handle(record.input, record.time_ns)
        if point % 7 == 0:
            assert encode_world(copy.world) == final
        else:
            assert copy.digest() == controller.digest()


def fields_of(world: World) -> dict[str, object]:
    """Return all fields in a form that is equal for equal worlds, with the order of entries."""
    fields = {name: value for name, value in vars(world).items() if name != "queues"}
    for name in ("adapters", "slots", "answers", "names"):
        fields[name] = dict(fields[name])
    for name in ("free_slots", "deadlines"):
        # Heaps of equal entries, which may be arranged differently.
        fields[name] = sorted(fields[name])
    orders = {state: list(order) for state, order in world.lru_order.items()}
    keys = {name: list(fields[name]) for name in ("adapters", "answers", "held", "promoting")}
    queues = (world.queues.by_tier, world.queues.members)
    return {**fields, "lru_order": orders, "keys": keys, "queues": queues}


def test_a_restored_world_shares_nothing_with_the_first() -> None:
    limits, records = history(3)
    controller, _ = fold(limits, records[:40])
    before, copy = encode_world(controller.world), restored(controller)
    for record in records[40:]:
        copy.handle(record.input, record.time_ns)
    assert encode_world(controller.world) == before != encode_world(copy.world)
