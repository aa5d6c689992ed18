"""Rows with states of several kinds: joined and dropped, each keeps its own."""

import pytest
import torch
from transformers import Lfm2Config

from loradock.engine.errors import ModelRefused
from loradock.engine.models.row_cache import StateCache, own_cache
from tests.support.models.causal_configs import build_config

CONFIG = Lfm2Config(
    hidden_size=8, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
    layer_types=["conv", "full_attention"],
)  # fmt: skip


def filled(lengths: list[int], first: int) -> StateCache:
    """Return rows whose states contain the row's number, from `first` on."""
    cache = StateCache(CONFIG, lengths)
    for row, length in enumerate(lengths):
        single = cache.single(row)
        keys = torch.full((1, 1, length, 2), float(first + row))
        single.update(keys, -keys, 1)
        single.update_conv_state(torch.full((1, 8, 3), float(first + row)), 0)
    cache.finish(max(lengths))
    return cache


def rows_of(cache: StateCache) -> list[tuple[int, int]]:
    """Return each row's number by its states, and the columns that it has."""
    together = cache.together()
    found = []
    for row, length in enumerate(cache.lengths):
        keys = together.layers[1].keys[row, 0, :, 0]
        own = keys[len(keys) - length :]
        number = int(together.layers[0].conv_states[0][row, 0, 0])
        assert (own == number).all()
        assert (keys[: len(keys) - length] == 0).all()
        assert (together.layers[1].values[row, 0] == -together.layers[1].keys[row, 0]).all()
        found.append((number, length))
    assert together.get_seq_length() == max(cache.lengths)
    return found


def test_rows_join_and_leave_with_their_own_states() -> None:
    cache = StateCache(CONFIG)
    cache.join(filled([2, 5], 1))
    assert rows_of(cache) == [(1, 2), (2, 5)]
    cache.join(filled([7], 3))
    assert rows_of(cache) == [(1, 2), (2, 5), (3, 7)]
    cache.keep([0, 1])
    assert rows_of(cache) == [(1, 2), (2, 5)]
    cache.join(filled([1, 3], 4))
    cache.keep([3, 0])
    assert rows_of(cache) == [(5, 3), (1, 2)]
    cache.keep([])
    assert len(cache) == 0
    cache.join(filled([4], 6))
    assert rows_of(cache) == [(6, 4)]


def test_rows_can_be_dropped_before_they_are_together() -> None:
    cache = filled([2, 5, 4], 1)
    cache.keep([2, 0])
    assert not cache.is_together
    assert rows_of(cache) == [(3, 4), (1, 2)]


def test_states_of_an_unknown_kind_are_refused_by_layer() -> None:
    # The layers of this model register their kind when its module is imported.
    import transformers.models.deepseek_v4.modeling_deepseek_v4  # noqa: F401, PLC0415

    with pytest.raises(ModelRefused, match="layer 1 has the states of a DeepseekV4CSACache"):
        own_cache(build_config("deepseek_v4"))
