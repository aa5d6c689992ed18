"""The client with the largest window, and the memory that finding it takes."""

from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.core.answers import WindowSizes

CLIENTS = "abcdefgh"

# Of each step: the client, its window's new size, and whether the largest is looked up then.
steps = st.lists(st.tuples(st.sampled_from(CLIENTS), st.integers(0, 4), st.booleans()), max_size=80)


def largest(sizes: dict[str, int]) -> str:
    return min(sizes, key=lambda client: (-sizes[client], client))


def entries(found: WindowSizes) -> int:
    return sum(map(len, found._clients.values())) + sum(map(len, found._heaps.values()))


@given(st.dictionaries(st.sampled_from(CLIENTS), st.integers(1, 4)), steps)
@settings(max_examples=300)
def test_the_largest_window_is_found_after_any_changes(
    first: dict[str, int], history: list[tuple[str, int, bool]]
) -> None:
    sizes = dict(first)
    found = WindowSizes(sizes.items())
    for client, size, looks in history:
        found.change(client, sizes.pop(client, 0), size)
        if size:
            sizes[client] = size
        assert found.largest == max(sizes.values(), default=0)
        if looks and sizes:
            assert found.largest_client() == largest(sizes)
        assert entries(found) <= 3 * len(sizes)
