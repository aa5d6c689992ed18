"""The batch's cache, compared with rows stored one by one: any joins and drops leave rows whole."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.layout import next_power_of_two
from loradock.engine.models.kv_cache import (
    IDLE_CAPACITY_MAX,
    BatchKVCache,
    left_padding_mask,
)

LAYERS, HEADS, WIDTH = 2, 3, 4


def fill(rows: BatchKVCache, states: torch.Tensor) -> None:
    """Append [rows, heads, tokens, dim] to every layer, as a forward does."""
    for layer in range(LAYERS):
        rows.cache.update(states + layer, -states - layer, layer)


def prefilled(random: Random, lengths: list[int]) -> tuple[BatchKVCache, list[torch.Tensor]]:
    """Return a cache after a prefill of rows of these lengths, and each row's states."""
    width = max(lengths)
    own = [torch.randn(HEADS, length, WIDTH) for length in lengths]
    padded = torch.full((len(lengths), HEADS, width, WIDTH), torch.nan)
    for row, states in enumerate(own):
        padded[row, :, width - states.shape[1] :] = states
    rows = BatchKVCache(lengths)
    fill(rows, padded)
    return rows, own


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60)
def test_every_row_is_whole_after_any_history(seed: int) -> None:
    random = Random(seed)
    rows, own = prefilled(random, [random.randint(1, 9) for _ in range(random.randint(1, 4))])
    for _ in range(random.randint(1, 8)):
        if random.random() < 0.4:
            more, states_of_more = prefilled(random, [random.randint(1, 9) for _ in range(2)])
            rows.join(more)
            own += states_of_more
        if random.random() < 0.5:
            kept = sorted(random.sample(range(len(own)), random.randint(1, len(own))))
            rows.keep(kept)
            own = [own[row] for row in kept]
            assert rows.width == max(states.shape[1] for states in own)
        rows.grow(1)
        step = torch.randn(len(own), HEADS, 1, WIDTH)
        fill(rows, step)
        own = [torch.cat([states, new], 1) for states, new in zip(own, step, strict=True)]
        assert rows.lengths == [states.shape[1] for states in own]
        for number, layer in enumerate(rows.cache.layers):
            assert layer.keys.shape == (len(own), HEADS, rows.width, WIDTH)
            for row, states in enumerate(own):
                first = rows.width - rows.lengths[row]
                assert torch.equal(layer.keys[row, :, first:], states + number)
                assert torch.equal(layer.values[row, :, first:], -states - number)
            capacity = layer.capacity[0] * layer.capacity[1]
            needed = next_power_of_two(len(own)) * next_power_of_two(rows.width + 1)
            assert capacity <= IDLE_CAPACITY_MAX * needed


def storages(rows: BatchKVCache) -> set[int]:
    return {layer.keys.untyped_storage().data_ptr() for layer in rows.layers}


def test_steps_joins_and_drops_move_nothing_within_the_capacity() -> None:
    random = Random(1)
    rows, _ = prefilled(random, [5, 3, 4])
    fill(rows, torch.zeros(3, HEADS, 1, WIDTH))
    before = storages(rows)
    assert [layer.capacity for layer in rows.layers] == [(4, 8)] * LAYERS
    fill(rows, torch.zeros(3, HEADS, 1, WIDTH))
    rows.grow(2)
    rows.keep([1, 2])
    rows.join(prefilled(random, [5, 2])[0])
    for _ in range(2):
        fill(rows, torch.zeros(4, HEADS, 1, WIDTH))
    assert storages(rows) == before
    # The oldest row's ninth column exceeds the capacity, which grows to the next power of two.
    rows.grow(2)
    fill(rows, torch.zeros(4, HEADS, 1, WIDTH))
    assert [layer.capacity for layer in rows.layers] == [(4, 16)] * LAYERS
    grown = set()
    for _ in range(200):
        fill(rows, torch.zeros(4, HEADS, 1, WIDTH))
        grown |= storages(rows)
    assert len(grown) <= 5 * LAYERS


def test_a_rows_states_are_never_in_another_row() -> None:
    random = Random(2)
    rows, _ = prefilled(random, [9, 9, 9])
    fill(rows, torch.full((3, HEADS, 1, WIDTH), torch.nan))
    rows.grow(1)
    for layer in rows.layers:
        layer.keys[1:] = layer.values[1:] = torch.nan
    rows.keep([0])
    for length in (2, 1):
        rows.join(prefilled(random, [length])[0])
    for layer in rows.layers:
        assert layer.capacity == (4, 16)
        for states in (layer.keys, layer.values):
            assert not states[1, :, :-2].any()
            assert not states[2, :, :-1].any()
            assert states[1:].isfinite().all()


def test_a_cache_filled_in_inference_mode_is_kept_outside_of_it() -> None:
    random = Random(3)
    with torch.inference_mode():
        rows, own = prefilled(random, [2, 3])
        fill(rows, torch.ones(2, HEADS, 1, WIDTH))
    rows.grow(1)
    rows.join(prefilled(random, [7])[0])
    rows.keep([1, 2])
    fill(rows, torch.ones(2, HEADS, 1, WIDTH))
    assert torch.equal(rows.layers[0].keys[0, :, -5:-2], own[1])


def test_a_reset_layer_is_empty_and_accepts_other_sizes() -> None:
    rows, _ = prefilled(Random(4), [2, 2])
    rows.cache.reset()
    assert rows.layers == []
    fill(rows, torch.zeros(5, HEADS, 3, WIDTH))
    assert rows.layers[1].keys.shape == (5, HEADS, 3, WIDTH)


def test_the_mask_is_each_rows_last_columns() -> None:
    mask = left_padding_mask(torch.tensor([1, 3, 0]), 3)
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1], [0, 0, 0]]


def test_a_layer_without_a_cache_of_its_own_stays_uninitialized() -> None:
    rows, more = BatchKVCache([1]), BatchKVCache([2])
    for cache, length in ((rows, 1), (more, 2)):
        cache.cache.update(*(2 * [torch.ones(1, HEADS, length, WIDTH)]), 1)
    rows.join(more)
    assert rows.width == 2
    rows.keep([1])
    assert not rows.cache.layers[0].is_initialized
    assert rows.cache.layers[1].keys.shape == (1, HEADS, 2, WIDTH)
