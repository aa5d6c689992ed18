"""The choice of tokens: which can be drawn, how often, and that a seed determines them."""

from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from loradock.engine.serving.sampling import (
    CANDIDATES,
    NOT_FINITE,
    Sampler,
    TokenHistory,
    adjust_logits,
    changes_of,
)
from loradock.engine.serving.sampling import sample as sample_with
from loradock.engine.serving.step_table import StepTable
from loradock.messages.prompts import Sampling

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]))


def sample(samplers: list[Sampler], logits: torch.Tensor) -> list[int]:
    return sample_with(samplers, logits, StepTable(logits.device, 0))


def adjusted(histories: list[TokenHistory], logits: torch.Tensor) -> torch.Tensor:
    return adjust_logits(changes_of(histories, logits.shape[-1]), logits)


def sampler(**fields: Any) -> Sampler:
    return Sampler(Sampling(**({"temperature": 1.0, "seed": 3} | fields)))


def draws(count: int = 400, logits: torch.Tensor = LOGITS, **fields: Any) -> Counter[int]:
    one = sampler(**fields)
    return Counter(sample([one], logits[None])[0] for _ in range(count))


@pytest.mark.parametrize(
    ("fields", "allowed"),
    [
        ({"top_k": 1}, {1}),
        ({"top_k": 2}, {1, 3}),
        ({"top_k": 5}, {0, 1, 2, 3, 4}),
        ({"top_k": 2**31 - 1}, {0, 1, 2, 3, 4}),
        ({"top_p": 1e-9}, {1}),
        ({"top_p": 0.39}, {1}),
        ({"top_p": 0.41}, {1, 3}),
        ({"top_p": 0.64}, {1, 3}),
        ({"top_p": 0.66}, {1, 3, 4}),
        ({"top_p": 1.0}, {0, 1, 2, 3, 4}),
        # After top_k the two have probabilities 0.615 and 0.385.
        ({"top_k": 2, "top_p": 0.6}, {1}),
        ({"top_k": 2, "top_p": 0.63}, {1, 3}),
        ({"min_p": 0.51}, {1, 3}),
        ({"min_p": 0.49}, {1, 3, 4}),
        ({"min_p": 1.0}, {1}),
        ({"min_p": 0.49, "top_k": 2}, {1, 3}),
        ({"temperature": 0.01}, {1}),
        ({"temperature": 5e-324}, {1}),
        ({"temperature": 100.0}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_leave_exactly_these(fields: dict[str, float], allowed: set[int]) -> None:
    assert set(draws(**fields)) == allowed


@pytest.mark.parametrize("size", [7, 1024, 5000])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7},
        {"top_k": 3},
        {"top_p": 0.7},
        {"min_p": 0.2},
        {"temperature": 1.5, "min_p": 0.1, "top_k": 40, "top_p": 0.9},
    ],
)
def test_a_row_is_drawn_from_the_distribution_of_the_reference(
    size: int, fields: dict[str, Any]
) -> None:
    """The number of the random sequence is inverted, so that few numbers show the distribution."""
    logits = 3 * torch.randn(size, generator=torch.Generator().manual_seed(size))
    expected = _reference(logits, **fields)
    inverted = Counter(_at(logits, (i + 0.5) / 1000, **fields) for i in range(1000))
    drawn = torch.zeros(size)
    for token, count in inverted.items():
        drawn[token] = count / 1000
    # Each token's share is exact up to one step at either end.
    assert (drawn - expected).abs().max() < 2.5e-3
    assert not drawn[expected == 0].any()


def _reference(logits: torch.Tensor, **fields: Any) -> torch.Tensor:
    options = Sampling(temperature=1.0, **fields) if "temperature" not in fields else None
    options = options or Sampling(**fields)
    warpers = LogitsProcessorList([TemperatureLogitsWarper(float(options.temperature))])
    if options.min_p:
        warpers.append(MinPLogitsWarper(options.min_p))
    if options.top_k:
        warpers.append(TopKLogitsWarper(options.top_k))
    if options.top_p < 1.0:
        warpers.append(TopPLogitsWarper(options.top_p))
    return warpers(torch.zeros(1, 1, dtype=torch.int64), logits[None].clone())[0].softmax(-1)


class _At(Sampler):
    """A sampler whose random numbers are all the same."""

    number = 0.0

    def uniform(self) -> float:
        return self.number


def _at(logits: torch.Tensor, number: float, **fields: Any) -> int:
    one = _At(Sampling(**({"temperature": 1.0} | fields)))
    one.number = number
    return sample([one], logits[None])[0]


def test_more_candidates_are_sorted_where_top_p_needs_them() -> None:
    logits = torch.zeros(20 * CANDIDATES)
    found = draws(1000, logits, top_p=0.9)
    assert len(found) > CANDIDATES
    assert len(draws(1000, logits, top_p=0.01)) <= 0.01 * len(logits) + 1


@given(number=st.sampled_from([0.0, 1e-300, 0.5, 1 - 2**-53]), data=st.data())
@settings(max_examples=60)
def test_no_number_leads_to_a_token_without_probability(number: float, data: Any) -> None:
    size = data.draw(st.sampled_from([1, 2, 5, 1023, 1024, 1025, 4096]))
    logits = torch.full((size,), -torch.inf)
    allowed = data.draw(st.sets(st.integers(0, size - 1), min_size=1, max_size=5))
    logits[list(allowed)] = torch.randn(len(allowed))
    for fields in ({}, {"top_p": 0.999999}, {"top_k": size}, {"temperature": 100.0}):
        assert _at(logits, number, **fields) in allowed


def test_a_rare_token_of_a_large_vocabulary_keeps_its_probability() -> None:
    """The weights before it sum to so much that adding its own in float32 changes nothing."""
    logits = torch.zeros(200_000)
    logits[-1] = -5.0
    weight = torch.tensor(-5.0).exp().item()
    total = 199_999 + weight
    assert _at(logits, 1 - 0.5 * weight / total) == 199_999
    assert _at(logits, 1 - 1.5 * weight / total) == 199_998


def test_exactly_k_of_equal_tokens_are_left() -> None:
    assert len(draws(logits=torch.zeros(9), top_k=3)) == 3


_OPTIONS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 2.0]),
        "top_k": st.sampled_from([0, 1, 5]),
        "top_p": st.sampled_from([0.2, 0.9, 1.0]),
        "min_p": st.sampled_from([0.0, 0.3]),
        "seed": st.integers(0, 2**63 - 1),
        "presence_penalty": st.sampled_from([0.0, 1.0]),
        "logit_bias": st.sampled_from([(), ((2, 5.0),)]),
    }
)


@given(rows=st.lists(_OPTIONS, min_size=1, max_size=6))
@settings(max_examples=60)
def test_a_row_draws_the_same_alone_and_in_any_batch(rows: list[dict[str, Any]]) -> None:
    logits = torch.randn(len(rows), 300, generator=torch.Generator().manual_seed(1))
    batch = [Sampler(Sampling(**fields)) for fields in rows]
    alone = [Sampler(Sampling(**fields)) for fields in rows]
    for _ in range(3):
        together = sample(batch, logits)
        assert together == [
            sample([one], logits[row : row + 1])[0] for row, one in enumerate(alone)
        ]
        for one, other, token in zip(batch, alone, together, strict=True):
            one.history.append(token)
            other.history.append(token)


def test_a_row_that_is_not_finite_fails_alone() -> None:
    logits = torch.zeros(5, 4)
    logits[0, 1], logits[1, 2], logits[2] = torch.nan, torch.inf, -torch.inf
    logits[3, 2] = 9.0
    for temperature in (0.0, 1.0):
        samplers = [sampler(temperature=temperature, top_k=1) for _ in range(5)]
        tokens = sample(samplers, logits)
        assert tokens[:4] == [NOT_FINITE, NOT_FINITE, NOT_FINITE, 2]
        assert tokens[4] >= 0


def test_without_a_seed_runs_differ() -> None:
    logits = torch.zeros(1, 1000)
    first, second = sampler(seed=None), sampler(seed=None)
    assert [sample([first], logits) for _ in range(8)] != [
        sample([second], logits) for _ in range(8)
    ]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_is_accepted(dtype: torch.dtype) -> None:
    assert set(draws(logits=LOGITS.to(dtype), top_k=1)) == {1}


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
    assert adjusted([history([1], [2]), history([], [])], logits) is logits


@given(prompt=TOKENS, output=TOKENS, penalty=st.sampled_from([0.5, 1.3, 2.0]))
def test_the_repetition_penalty_is_that_of_the_reference(
    prompt: list[int], output: list[int], penalty: float
) -> None:
    logits = logits_of(1)
    ours = adjusted([history(prompt, output, repetition_penalty=penalty)], logits)
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
    torch.testing.assert_close(adjusted([one], logits), expected)


def test_biases_are_added_before_the_penalties() -> None:
    logits = torch.tensor([[1.0, -1.0, 0.5]])
    bias = ((0, -3.0), (2, 1.5), (99, 5.0))
    one = history([], [0, 2], logit_bias=bias, repetition_penalty=2.0, presence_penalty=1.0)
    torch.testing.assert_close(adjusted([one], logits), torch.tensor([[-5.0, -1.0, 0.0]]))


def test_the_output_may_not_end_before_its_least_length() -> None:
    logits = torch.zeros(2, VOCABULARY)
    ends = frozenset({3, 7, 99})
    rows = [history([], [1] * count, ends, min_tokens=2) for count in (1, 2)]
    changed = adjusted(rows, logits)
    assert (changed[0] == -torch.inf).nonzero()[:, 0].tolist() == [3, 7]
    assert not changed[1].any()


@given(outputs=st.lists(TOKENS, min_size=1, max_size=4))
def test_rows_change_independently(outputs: list[list[int]]) -> None:
    logits = logits_of(len(outputs))
    before = logits.clone()
    rows = [history([], output, frequency_penalty=1.0) for output in outputs]
    together = adjusted(rows, logits)
    for row, one in enumerate(rows):
        torch.testing.assert_close(together[row], adjusted([one], before[row : row + 1])[0])
    torch.testing.assert_close(logits, before)
