"""The limits of a log's header: what is stored is read again, and everything else is refused."""

import pytest

from loradock.controller.core.limits import Limits, LimitsError, limits_from, limits_to


def test_stored_limits_are_read_again() -> None:
    limits = Limits(max_loras=3, turn_tokens=7)
    assert limits_from(limits_to(limits)) == limits


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"slots": 1}, "slots"),
        ({"slots_max": 0}, "slots_max"),
        ({"slots_max": 9, "host_adapters_max": 8}, "max-cpu-loras"),
    ],
)
def test_unknown_invalid_and_contradictory_limits_are_refused(
    values: dict[str, int], text: str
) -> None:
    with pytest.raises(LimitsError, match=text):
        limits_from(values)
