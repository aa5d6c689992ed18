"""A digest is a function of the entries, and what is remembered for it is bounded by them."""

from hypothesis import given
from hypothesis import strategies as st

from loradock.controller.core.indexes import DigestDict

KEYS = st.integers(0, 5)
steps = st.lists(st.tuples(st.sampled_from(("set", "change", "delete", "digest")), KEYS))


@given(steps)
def test_a_digest_is_that_of_the_entries_from_scratch(history: list[tuple[str, int]]) -> None:
    found: DigestDict[int, list[int]] = DigestDict()
    for number, (step, key) in enumerate(history):
        if step == "set":
            found[key] = [number]
        elif step == "digest":
            assert found.digest() == found.digest_from_scratch()
        elif key not in found:
            continue
        elif step == "delete":
            del found[key]
        else:
            found[key].append(number)
            found.mark_changed(key)
        # In the last digest, or in the next one.
        assert found._changed <= {*found, *found._hashes}
    assert found.digest() == found.digest_from_scratch()
    assert found._hashes.keys() == found.keys()


def test_entries_that_no_digest_has_leave_nothing() -> None:
    found: DigestDict[int, int] = DigestDict()
    for key in range(1000):
        found[key] = key
        del found[key]
    assert not found._changed
