"""The lookback of masks: of those that models request, and of others that have a first token."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from loradock.engine.serving.attention import SequenceMasks, longest_lookback
from loradock.engine.serving.blocks import BLOCK_TOKENS, BlockPool, BlockTable
from loradock.engine.serving.paged_cache import MaskFunction, PackedChunk, PackedStep

TOKENS = 60
CPU = torch.device("cpu")


def window(tokens: int) -> MaskFunction:
    return sliding_window_causal_mask_function(tokens)


def chunk(tokens: int) -> MaskFunction:
    return chunked_causal_mask_function(tokens, torch.zeros(1, dtype=torch.int64))


def strided(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The tokens at every seventh distance, and the next ones before."""
    del row, head
    return ((query - key) % 7 == 0) | (query - key < 3)


def sinks(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The first tokens, which every one attends to."""
    del row, head, query
    return key < 2


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, TOKENS - 1, TOKENS, 2 * TOKENS])
def test_windows_and_chunks_reach_back_by_their_length(tokens: int) -> None:
    expected = max(1, min(tokens, TOKENS) - 1)
    for function in (window(tokens), chunk(tokens)):
        assert longest_lookback([function], TOKENS, CPU) == expected
        assert longest_lookback([function, window(5), chunk(3)], TOKENS, CPU) == max(4, expected)
        assert longest_lookback([function, causal_mask_function], TOKENS, CPU) == TOKENS - 1


@pytest.mark.parametrize(
    "function",
    [
        causal_mask_function,
        bidirectional_mask_function,
        and_masks(causal_mask_function, strided),
        or_masks(window(5), and_masks(causal_mask_function, sinks)),
    ],
)
def test_a_mask_without_a_bound_reaches_all_tokens(function: MaskFunction) -> None:
    assert longest_lookback([function], TOKENS, CPU) >= TOKENS - 1


def test_without_masks_nothing_is_known_to_be_unread() -> None:
    assert longest_lookback([], TOKENS, CPU) == TOKENS


@given(st.lists(st.integers(0, 100), min_size=2, max_size=40))
def test_the_reach_is_the_longest_distance_of_any_token(distances: list[int]) -> None:
    """Masks under which each token attends to all tokens from some first one on."""
    firsts = torch.tensor([max(0, at - distance) for at, distance in enumerate(distances)])

    def function(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del row, head
        return (key >= firsts[query]) & (key <= query)

    longest = max(int(at - first) for at, first in enumerate(firsts))
    assert longest_lookback([function], len(distances), CPU) == max(1, longest)


@pytest.mark.parametrize(
    ("function", "has_segments"),
    [
        (causal_mask_function, True),
        (window(40), True),
        (and_masks(causal_mask_function, strided), False),
    ],
)
def test_a_row_with_gaps_in_its_mask_is_not_read_in_pieces(
    function: MaskFunction, has_segments: bool
) -> None:
    pool = BlockPool(16)
    tables = [BlockTable(pool, None) for _ in range(2)]
    for blocks in range(1, 5):
        for table in tables:
            table.reserve(blocks * BLOCK_TOKENS)
    tables[0].advance(TOKENS, list)
    masks = SequenceMasks(function, PackedStep([PackedChunk([0], tables[0])], CPU))
    segments, others = masks.divided(token_bytes=1 << 30)
    assert (segments is not None) == has_segments
    assert len(others) == (not has_segments)
