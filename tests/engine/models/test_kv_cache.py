"""The batch's cache against rows kept one by one: whatever joins and leaves, each row is whole."""

from random import Random

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.layout import power_of_two
from engine.models.kv_cache import RowCache, left_padding_mask
from engine.models.kv_cache_layer import IDLE_ROOM_MAX

LAYERS, HEADS, WIDTH = 2, 3, 4


def fill(rows: RowCache, states: torch.Tensor) -> None:
    """What a forward does: append [rows, heads, tokens, dim] to every layer."""
    for layer in range(LAYERS):
        rows.cache.update(states + layer, -states - layer, layer)


def brought(random: Random, lengths: list[int]) -> tuple[RowCache, list[torch.Tensor]]:
    """A cache after a prefill of rows of these lengths, and the rows by themselves."""
    width = max(lengths)
    own = [torch.randn(HEADS, length, WIDTH) for length in lengths]
    padded = torch.full((len(lengths), HEADS, width, WIDTH), torch.nan)
    for row, states in enumerate(own):
        padded[row, :, width - states.shape[1] :] = states
    rows = RowCache(lengths)
    fill(rows, padded)
    return rows, own


@given(seed=st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_every_row_is_whole_after_any_history(seed: int) -> None:
    random = Random(seed)
    rows, own = brought(random, [random.randint(1, 9) for _ in range(random.randint(1, 4))])
    for _ in range(random.randint(1, 8)):
        if random.random() < 0.4:
            more, theirs = brought(random, [random.randint(1, 9) for _ in range(2)])
            rows.join(more)
            own += theirs
        if random.random() < 0.5:
            places = sorted(random.sample(range(len(own)), random.randint(1, len(own))))
            rows.keep(places)
            own = [own[place] for place in places]
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
            room, needed = layer.room, power_of_two(len(own)) * power_of_two(rows.width + 1)
            assert room[0] * room[1] <= IDLE_ROOM_MAX * needed


def storages(rows: RowCache) -> set[int]:
    return {layer.keys.untyped_storage().data_ptr() for layer in rows.layers}


def test_steps_joins_and_leaves_move_nothing_while_there_is_room() -> None:
    random = Random(1)
    rows, _ = brought(random, [5, 3, 4])
    fill(rows, torch.zeros(3, HEADS, 1, WIDTH))
    before = storages(rows)
    assert [layer.room for layer in rows.layers] == [(4, 8)] * LAYERS
    fill(rows, torch.zeros(3, HEADS, 1, WIDTH))
    rows.grow(2)
    rows.keep([1, 2])
    rows.join(brought(random, [5, 2])[0])
    for _ in range(2):
        fill(rows, torch.zeros(4, HEADS, 1, WIDTH))
    assert storages(rows) == before
    # The ninth column of the oldest is one too many, and room grows to the next power of two.
    rows.grow(2)
    fill(rows, torch.zeros(4, HEADS, 1, WIDTH))
    assert [layer.room for layer in rows.layers] == [(4, 16)] * LAYERS
    grown = set()
    for _ in range(200):
        fill(rows, torch.zeros(4, HEADS, 1, WIDTH))
        grown |= storages(rows)
    assert len(grown) <= 5 * LAYERS


def test_what_a_row_left_never_lies_in_another() -> None:
    random = Random(2)
    rows, _ = brought(random, [9, 9, 9])
    fill(rows, torch.full((3, HEADS, 1, WIDTH), torch.nan))
    rows.grow(1)
    for layer in rows.layers:
        layer.keys[1:] = layer.values[1:] = torch.nan
    rows.keep([0])
    for length in (2, 1):
        rows.join(brought(random, [length])[0])
    for layer in rows.layers:
        assert layer.room == (4, 16)
        for states in (layer.keys, layer.values):
            assert not states[1, :, :-2].any()
            assert not states[2, :, :-1].any()
            assert states[1:].isfinite().all()


def test_a_cache_filled_in_inference_mode_is_kept_outside_of_it() -> None:
    random = Random(3)
    with torch.inference_mode():
        rows, own = brought(random, [2, 3])
        fill(rows, torch.ones(2, HEADS, 1, WIDTH))
    rows.grow(1)
    rows.join(brought(random, [7])[0])
    rows.keep([1, 2])
    fill(rows, torch.ones(2, HEADS, 1, WIDTH))
    assert torch.equal(rows.layers[0].keys[0, :, -5:-2], own[1])


def test_a_layer_takes_rows_in_any_order_or_forgets_them() -> None:
    rows, own = brought(Random(4), [2, 2])
    rows.cache.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(rows.layers[0].values[0], -own[1])
    rows.cache.reset()
    assert rows.layers == []
    fill(rows, torch.zeros(5, HEADS, 3, WIDTH))
    assert rows.layers[1].keys.shape == (5, HEADS, 3, WIDTH)


def test_the_mask_is_each_rows_last_columns() -> None:
    mask = left_padding_mask(torch.tensor([1, 3, 0]), 3)
    assert mask.tolist() == [[0, 0, 1], [1, 1, 1], [0, 0, 0]]


def test_a_layer_without_a_cache_of_its_own_stays_so() -> None:
    rows, more = RowCache([1]), RowCache([2])
    for cache, length in ((rows, 1), (more, 2)):
        cache.cache.update(*(2 * [torch.ones(1, HEADS, length, WIDTH)]), 1)
    rows.join(more)
    assert rows.width == 2
    rows.keep([1])
    assert not rows.cache.layers[0].is_initialized
    assert rows.cache.layers[1].keys.shape == (1, HEADS, 2, WIDTH)
