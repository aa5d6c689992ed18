"""The order of adapters by their stamps, against a plain sorted list."""

from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core.indexes import LruOrder


@given(st.lists(st.integers(1, 12)))
def test_each_stamp_is_in_its_place_until_it_is_removed(stamps: list[int]) -> None:
    order, expected = LruOrder(), dict[int, int]()
    for stamp in stamps:
        if stamp in expected:
            assert order.remove(stamp) == expected.pop(stamp)
        else:
            order.add(stamp, -stamp)
            expected[stamp] = -stamp
        assert list(order) == [expected[stamp] for stamp in sorted(expected)]
