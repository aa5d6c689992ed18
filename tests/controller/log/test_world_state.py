"""A restored world is the world that was encoded: every field, and every decision after it."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.invariants import check
from loradock.controller.core.limits import Limits
from loradock.controller.core.restore import derive
from loradock.controller.core.world import World
from loradock.controller.log.snapshots import WorldState, encode_world, restore_world
from tests.support.simulation.logged_histories import fold, history

STORED = WorldState.__struct_fields__


def restored(controller: Controller) -> Controller:
    copy = Controller(controller.limits, controller.policy_name)
    restore_world(copy.world, encode_world(controller.world), controller.limits)
    return copy


def test_every_field_of_a_world_is_stored_or_derived() -> None:
    world, forgotten = World(Limits()), object()
    assert set(STORED) <= set(vars(world))
    others = set(vars(world)) - set(STORED)
    for name in others:
        setattr(world, name, forgotten)
    derive(world, Limits())
    assert forgotten not in vars(world).values(), "a new field belongs in WorldState or in derive"


@given(seed=st.integers(0, 400), policy=st.sampled_from(sorted(POLICIES)))
@settings(max_examples=12)
def test_from_every_point_of_a_history_the_same_follows(seed: int, policy: str) -> None:
    limits, records = history(seed)
    whole, actions = fold(limits, records, policy)
    final = encode_world(whole.world)
    controller = Controller(limits, policy)
    for point, record in enumerate(records):
        copy = restored(controller)
        check(copy.world, limits, None)
        assert copy.digest() == controller.digest()
        assert fields_of(copy.world) == fields_of(controller.world)
        # The rest of the history from every seventh point, and the next input from every point.
        is_whole = point % 7 == 0
        for number in range(point, len(records) if is_whole else point + 1):
            later = records[number]
            found = copy.handle(later.input, later.time_ns, later.body, later.report_seq)
            assert found == actions[number], f"after record {point}"
        controller.handle(record.input, record.time_ns, record.body, record.report_seq)
        assert copy.digest() == (whole if is_whole else controller).digest()
        assert not is_whole or encode_world(copy.world) == final


def fields_of(world: World) -> dict[str, Any]:
    """Return the stored fields, and the order of their entries."""
    values = {name: getattr(world, name) for name in STORED}
    values["rankings"] = {tier: ranking.state() for tier, ranking in world.rankings.items()}
    answers = world.answers
    values["answers"] = (
        answers.bounds,
        list(answers.by_id.items()),
        list(answers._windows.items()),
    )
    dicts = {name: dict(value) for name, value in values.items() if isinstance(value, dict)}
    return {**values, **dicts, "order": {name: list(value) for name, value in dicts.items()}}


def test_a_restored_world_shares_nothing_with_the_first() -> None:
    limits, records = history(3)
    controller, _ = fold(limits, records[:40])
    before, copy = encode_world(controller.world), restored(controller)
    for record in records[40:]:
        copy.handle(record.input, record.time_ns, record.body, record.report_seq)
    assert encode_world(controller.world) == before != encode_world(copy.world)
