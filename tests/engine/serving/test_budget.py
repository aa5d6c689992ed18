"""The tokens of a step: chosen by what steps cost, and again while serving."""

import time

import pytest
import torch

from loradock.engine.parallel import SINGLE
from loradock.engine.serving.budget import (
    STEP_TOKENS_MAX,
    STEP_TOKENS_MIN,
    UNDISTURBED,
    UPDATE_STEPS,
    StepBudget,
    clock_of,
)

TARGET_S = 0.25
STEP_S, EACH_S = 0.036, 0.0015


class Machine:
    """A machine whose steps take `step_s + each_s * tokens`; `now_s` is its clock."""

    def __init__(self, step_s: float = STEP_S, each_s: float = EACH_S) -> None:
        self.step_s, self.each_s, self.now_s = step_s, each_s, 0.0

    def seconds(self, tokens: int) -> float:
        return self.step_s + self.each_s * tokens

    def budget(self, *sizes: int) -> StepBudget:
        measured = [(size, self.seconds(size)) for size in sizes]
        return StepBudget(
            STEP_TOKENS_MAX,
            SINGLE,
            target_s=TARGET_S,
            measured=measured,
            clock=lambda: self.now_s,
        )

    def run(self, budget: StepBudget, *sizes: int) -> None:
        for size in sizes:
            budget.begin_step()
            budget.count(size)
            self.now_s += self.seconds(size)
            budget.end_step()


def test_a_step_of_the_budget_takes_its_target() -> None:
    """A budget from one size alone would count the cost of the step once for each token."""
    machine = Machine()
    budget = machine.budget(16, 128)
    assert machine.seconds(budget.tokens) == pytest.approx(TARGET_S, rel=0.01)
    assert machine.seconds(budget.prompt_tokens(0)) == pytest.approx(
        UNDISTURBED * TARGET_S, rel=0.01
    )
    assert budget.prompt_tokens(5) == budget.tokens - 5


def test_a_start_next_to_other_programs_does_not_decide_for_ever() -> None:
    machine = Machine(10 * STEP_S, 10 * EACH_S)
    budget = machine.budget(16, 128)
    assert budget.tokens == STEP_TOKENS_MIN
    machine.step_s, machine.each_s = STEP_S, EACH_S
    for _ in range(16 * UPDATE_STEPS):
        machine.run(budget, 8, budget.tokens)
    assert machine.seconds(budget.tokens) == pytest.approx(TARGET_S, rel=0.05)


def test_steps_of_one_size_keep_the_choice_within_its_bounds() -> None:
    """A line through one point has no slope."""
    machine = Machine()
    budget = machine.budget(16, 128)
    machine.run(budget, *[1] * (100 * UPDATE_STEPS))
    assert STEP_TOKENS_MIN <= budget.tokens <= STEP_TOKENS_MAX


def test_a_given_budget_is_never_changed() -> None:
    budget = StepBudget(100, SINGLE)
    Machine(9.0, 9.0).run(budget, *range(1, 100))
    assert (budget.tokens, budget.prompt_tokens(0), budget.prompt_tokens(10)) == (100, 100, 90)


def test_a_limited_budget_does_not_grow() -> None:
    machine = Machine()
    budget = machine.budget(16, 128)
    budget.limit()
    before = budget.tokens
    machine.each_s /= 10
    machine.run(budget, *[64, 128] * (20 * UPDATE_STEPS))
    assert budget.tokens == budget.prompt_tokens(0) == before


def test_time_that_other_programs_take_is_not_measured() -> None:
    """A thread that waits has no processor time."""
    clock = clock_of(torch.device("cpu"))
    before = clock()
    time.sleep(0.2)
    assert clock() < before + 0.1
