"""Layers compute the same outputs on one and two ranks, for every class and both schemes."""

import pytest

from tests.support.parallel import layer_cases
from tests.support.parallel.ranks import Ranks

ERROR_MAX = 1e-5
SCHEMES = pytest.mark.parametrize("sharded", [False, True], ids=["default", "fully-sharded"])


def test_the_group_transfers_bytes_numbers_and_tensors(pair: Ranks) -> None:
    expected = [[0, 3], [0, 0], "from 0", "", [5, -1], [3.0, 3.0], [[0, 1], [10, 11]]]
    assert pair.run(layer_cases.exchange) == [expected, expected]


@SCHEMES
@pytest.mark.parametrize("gathers", [False, True])
def test_column(pair: Ranks, sharded: bool, gathers: bool) -> None:
    assert max(pair.run(layer_cases.column, sharded=sharded, gathers=gathers)) < ERROR_MAX


@SCHEMES
def test_column_of_a_pair_with_one_tensor(pair: Ranks, sharded: bool) -> None:
    assert max(pair.run(layer_cases.column_pair, sharded=sharded)) < ERROR_MAX


@SCHEMES
def test_merged_of_unequal_widths_with_an_absent_slice(pair: Ranks, sharded: bool) -> None:
    assert max(pair.run(layer_cases.merged, sharded=sharded)) < ERROR_MAX


@pytest.mark.parametrize("covers", [1, 2])
def test_merged_of_three_with_a_tensor_over_several(pair: Ranks, covers: int) -> None:
    assert max(pair.run(layer_cases.merged_variable, covers=covers)) < ERROR_MAX


@SCHEMES
@pytest.mark.parametrize("is_joined", [False, True], ids=["three-tensors", "one-tensor"])
@pytest.mark.parametrize("copies", [1, 2])
def test_qkv(pair: Ranks, sharded: bool, is_joined: bool, copies: int) -> None:
    assert (
        max(pair.run(layer_cases.qkv, sharded=sharded, is_joined=is_joined, copies=copies))
        < ERROR_MAX
    )


@SCHEMES
@pytest.mark.parametrize("splits_input", [False, True])
def test_row(pair: Ranks, sharded: bool, splits_input: bool) -> None:
    assert max(pair.run(layer_cases.row, sharded=sharded, splits_input=splits_input)) < ERROR_MAX


def test_replicated(pair: Ranks) -> None:
    assert max(pair.run(layer_cases.replicated)) < ERROR_MAX


@pytest.mark.parametrize("tokens", [16, 17, 3])
def test_a_vocabulary_of_any_size(pair: Ranks, tokens: int) -> None:
    assert max(pair.run(layer_cases.vocabulary, tokens=tokens)) < ERROR_MAX


@SCHEMES
def test_a_group_of_one_is_the_same_class(pair: Ranks, sharded: bool) -> None:
    assert max(pair.run(layer_cases.group_of_one, sharded=sharded)) < ERROR_MAX


def test_a_rank_that_the_group_does_not_divide(pair: Ranks) -> None:
    for error in pair.run(layer_cases.uneven_rank):
        assert "rank 3 can't be divided among 2 processes" in error
        assert "fully_sharded_loras off" in error


def test_a_layer_that_the_group_does_not_divide(pair: Ranks) -> None:
    for errors in pair.run(layer_cases.uneven_layers):
        assert all("21 can't be shared evenly by 2 ranks" in text for text in errors), errors
