"""Stored states of prompts: their ends, the prompts that begin with them, and eviction."""

import torch

from loradock.engine.models.row_cache import SingleRows
from loradock.engine.serving.blocks import BLOCK_TOKENS, block_keys
from loradock.engine.serving.prefix_states import STORED_TOKENS_MIN, PrefixStates

BLOCKS_MIN = STORED_TOKENS_MIN // BLOCK_TOKENS
STATES_BYTES = 64


def keys_of(*parts: tuple[int, int]) -> list[bytes]:
    """Return the keys of a prompt of (value, blocks) parts."""
    return list(block_keys(b"", [value for value, n in parts for _ in range(n * BLOCK_TOKENS)]))


def rows_with(number: int) -> SingleRows:
    rows = SingleRows([0])
    rows._rows[0].state["state"] = torch.full((STATES_BYTES // 4,), float(number))
    return rows


def prefill(prefixes: PrefixStates, keys: list[bytes]) -> tuple[int, list[int]]:
    """Prefill a prompt; return the blocks that it begins with, and those after which it stored."""
    begun = prefixes.find(keys)
    prefixes.record(keys)
    for tokens, key in begun.stored.items():
        prefixes.store(key, rows_with(tokens), 0)
    if begun.tokens:
        assert (begun.states.state["state"] == begun.tokens).all()
    return begun.tokens // BLOCK_TOKENS, [tokens // BLOCK_TOKENS for tokens in begun.stored]


def test_a_shared_beginning_is_stored_by_the_second_prompt_and_used_by_the_third() -> None:
    prefixes, shared, own = PrefixStates(1 << 20), (1, 10), BLOCKS_MIN
    assert prefill(prefixes, keys_of(shared, (2, own))) == (0, [10 + own])
    assert prefill(prefixes, keys_of(shared, (3, own))) == (0, [10, 10 + own])
    assert prefill(prefixes, keys_of(shared, (4, own))) == (10, [10 + own])
    assert prefill(prefixes, keys_of((5, 10), (4, own))) == (0, [10 + own])


def test_a_prompt_begins_with_the_whole_of_an_earlier_one() -> None:
    prefixes = PrefixStates(1 << 20)
    assert prefill(prefixes, keys_of((1, 10))) == (0, [10])
    assert prefill(prefixes, keys_of((1, 10))) == (10, [])
    assert prefill(prefixes, keys_of((1, 10), (2, BLOCKS_MIN))) == (10, [10 + BLOCKS_MIN])
    assert prefill(prefixes, keys_of((1, 9))) == (0, [9])


def test_ends_that_are_near_to_one_another_are_not_stored() -> None:
    prefixes, little = PrefixStates(1 << 20), BLOCKS_MIN - 1
    assert prefill(prefixes, keys_of((1, little))) == (0, [])
    assert prefill(prefixes, keys_of((1, 10))) == (0, [10])
    assert prefill(prefixes, keys_of((1, 10), (2, little))) == (10, [])
    assert prefill(prefixes, keys_of((1, 8), (2, little))) == (0, [8])


def test_the_least_recently_used_states_are_dropped() -> None:
    prefixes = PrefixStates(3 * STATES_BYTES)
    for number in (1, 2, 3):
        prefill(prefixes, keys_of((number, 10)))
    assert prefill(prefixes, keys_of((1, 10))) == (10, [])
    prefill(prefixes, keys_of((4, 10)))
    found = [prefixes.find(keys_of((number, 10))).tokens for number in (1, 2, 3, 4)]
    assert found == [160, 0, 160, 160]
    prefixes.clear()
    assert prefixes.find(keys_of((1, 10))).tokens == 0


def test_states_larger_than_the_budget_are_not_stored() -> None:
    prefixes = PrefixStates(STATES_BYTES - 1)
    assert prefill(prefixes, keys_of((1, 10))) == (0, [10])
    assert prefill(prefixes, keys_of((1, 10))) == (0, [10])


def test_stored_states_are_copies() -> None:
    prefixes, keys, rows = PrefixStates(1 << 20), keys_of((1, 10)), rows_with(7)
    prefixes.store(keys[-1], rows, 0)
    rows._rows[0].state["state"].zero_()
    other = SingleRows([0])
    other.restore(0, prefixes.find(keys).states, 160)
    assert (other._rows[0].state["state"] == 7).all()
    assert other.lengths == other.done == [160]
    other._rows[0].state["state"].zero_()
    assert (prefixes.find(keys).states.state["state"] == 7).all()
