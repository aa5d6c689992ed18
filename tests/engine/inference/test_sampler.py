"""The choice of tokens: which can be drawn, how often, and that a seed determines them."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine.inference.sampler import Sampler
from messages.prompts import Sampling

LOGITS = torch.log(torch.tensor([0.1, 0.4, 0.05, 0.25, 0.2]))


def draws(count: int = 400, logits: torch.Tensor = LOGITS, **fields: object) -> Counter[int]:
    sampler = Sampler(Sampling(**({"temperature": 1.0, "seed": 3} | fields)))
    return Counter(sampler.draw(logits) for _ in range(count))


def test_without_filters_tokens_are_drawn_by_their_probabilities() -> None:
    found = draws(4000)
    for token, probability in enumerate(LOGITS.exp().tolist()):
        assert abs(found[token] / 4000 - probability) < 0.03


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
        ({"temperature": 0.01}, {1}),
        ({"temperature": 5e-324}, {1}),
        ({"temperature": 100.0}, {0, 1, 2, 3, 4}),
    ],
)
def test_filters_leave_exactly_these(fields: dict[str, float], allowed: set[int]) -> None:
    assert set(draws(**fields)) == allowed


def test_temperature_sharpens() -> None:
    assert draws(2000, temperature=0.5)[1] > draws(2000, temperature=1.0)[1] + 200


def test_exactly_k_of_equal_tokens_are_left() -> None:
    assert len(draws(logits=torch.zeros(9), top_k=3)) == 3


def test_a_forbidden_token_is_never_drawn() -> None:
    logits = torch.tensor([-torch.inf, 1.0, -torch.inf, 0.5])
    for fields in ({}, {"temperature": 100.0}, {"top_k": 4}, {"top_p": 1.0}):
        assert set(draws(logits=logits, **fields)) == {1, 3}


@given(seed=st.integers(0, 2**63 - 1))
def test_a_seed_determines_all_tokens(seed: int) -> None:
    sampling = Sampling(temperature=1.0, seed=seed)
    first, second = Sampler(sampling), Sampler(sampling)
    assert [first.draw(LOGITS) for _ in range(8)] == [second.draw(LOGITS) for _ in range(8)]


def test_without_a_seed_runs_differ() -> None:
    logits = torch.zeros(1000)
    first, second = (Sampler(Sampling(temperature=1.0)) for _ in range(2))
    assert [first.draw(logits) for _ in range(8)] != [second.draw(logits) for _ in range(8)]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_any_floating_dtype_is_accepted(dtype: torch.dtype) -> None:
    assert set(draws(logits=LOGITS.to(dtype), top_k=1)) == {1}


def test_only_temperature_zero_is_greedy() -> None:
    assert Sampler(Sampling(temperature=0.0)).is_greedy
    assert not Sampler(Sampling(temperature=5e-324)).is_greedy
