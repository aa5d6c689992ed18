"""Changes of logits: biases, forbidden tokens and penalties, against their formulas."""

from collections import Counter
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import RepetitionPenaltyLogitsProcessor

from loradock.engine.serving.sampling import TokenHistory, adjust_logits
from loradock.messages.prompts import Sampling

VOCABULARY = 12
TOKENS = st.lists(st.integers(0, VOCABULARY - 1), max_size=8)


def history(
    prompt: list[int], output: list[int], end_ids: frozenset[int] = frozenset(), **fields: Any
) -> TokenHistory:
    result = TokenHistory(Sampling(**fields), prompt, end_ids)
    for token in output:
        result.append(token)
    return result


def logits_of(rows: int) -> torch.Tensor:
    return torch.randn(rows, VOCABULARY, generator=torch.Generator().manual_seed(rows))


def test_without_options_the_logits_are_not_copied() -> None:
    logits = logits_of(2)
    assert adjust_logits([history([1], [2]), history([], [])], logits) is logits


@given(prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.5, 1.3, 2.0]))
def test_the_repetition_penalty_is_that_of_the_reference(
    prompt: list[int], output: list[int], penalty: float
) -> None:
    logits = logits_of(1)
    ours = adjust_logits([history(prompt, output, repetition_penalty=penalty)], logits)
    tokens = torch.tensor([prompt + output], dtype=torch.int64)
    expected = logits
    if prompt + output:
        expected = RepetitionPenaltyLogitsProcessor(penalty)(tokens, logits.clone())
    torch.testing.assert_close(ours, expected)


@given(prompt=TOKENS, output=TOKENS)
def test_presence_and_frequency_count_the_output_alone(
    prompt: list[int], output: list[int]
) -> None:
    logits = logits_of(1)
    one = history(prompt, output, presence_penalty=0.5, frequency_penalty=0.25)
    expected = logits.clone()
    for token, count in Counter(output).items():
        expected[0, token] -= 0.5 + 0.25 * count
    torch.testing.assert_close(adjust_logits([one], logits), expected)


def test_biases_are_added_before_the_penalties() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.5]])
    bias = ((0, -3.0), (2, 1.5), (99, 5.0))
    one = history([], [0, 2], logit_bias=bias, repetition_penalty=2.0, presence_penalty=1.0)
    torch.testing.assert_close(adjust_logits([one], logits), torch.tensor([[-5.0, -1.0, 0.0]]))


def test_the_output_may_not_end_before_its_least_length() -> None:
    logits = torch.zeros(2, VOCABULARY)
    ends = frozenset({3, 7, 99})
    rows = [history([], [1] * count, ends, min_tokens=2) for count in (1, 2)]
    adjusted = adjust_logits(rows, logits)
    assert (adjusted[0] == -torch.inf).nonzero()[:, 0].tolist() == [3, 7]
    assert not adjusted[1].any()


@given(outputs=st.lists(TOKENS, min_size=1, max_size=4))
def test_rows_change_independently(outputs: list[list[int]]) -> None:
    logits = logits_of(len(outputs))
    before = logits.clone()
    rows = [history([], output, frequency_penalty=1.0) for output in outputs]
    together = adjust_logits(rows, logits)
    for row, one in enumerate(rows):
        torch.testing.assert_close(together[row], adjust_logits([one], before[row : row + 1])[0])
    torch.testing.assert_close(logits, before)
