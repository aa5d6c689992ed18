"""What the core changes in place is assigned by the interpreter, and is still a struct."""

import msgspec
import pytest
from msgspec import Struct

from loradock.controller.core import world
from loradock.controller.core.counters import Counters, fast_assignment

CHANGED = [
    kind
    for kind in vars(world).values()
    if isinstance(kind, type) and issubclass(kind, Struct) and kind is not Struct
]
MUTABLE = [kind for kind in CHANGED if not kind.__struct_config__.frozen]


@fast_assignment
class Point(Struct, array_like=True, gc=False):
    x: int
    y: int = 0


def test_its_fields_can_be_assigned_and_no_others() -> None:
    point = Point(1)
    point.x, point.y = 2, 3
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(point), type=Point) == Point(2, 3)
    with pytest.raises(AttributeError):
        point.z = 4  # type: ignore[attr-defined]


def test_one_without_it_is_assigned_by_msgspec() -> None:
    class Plain(Struct, gc=False):
        x: int

    assert Plain.__setattr__ is not object.__setattr__
    assert Point.__setattr__ is object.__setattr__


@pytest.mark.parametrize("kind", MUTABLE)
def test_all_that_a_world_consists_of_has_it(kind: type[Struct]) -> None:
    assert Counters in MUTABLE
    assert not kind.__struct_config__.gc
    assert kind.__setattr__ is object.__setattr__
