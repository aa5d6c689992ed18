"""The comparison of two results of a model, and the refusal of a model whose results differ."""

from collections.abc import Callable, Mapping
from typing import Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import ModelNotRun, ModelRefused
from loradock.engine.models.trials.difference import Aligned, failing_module, first_difference

ERRORS_MAX: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""The relative norm by which a padded row may differ from the same row alone."""

ERROR_MAX_HALF: Final = 0.1
"""The same for 16-bit models, where rounding alone causes a few hundredths."""

ERRORS_MAX_GENERATED: Final = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The relative norm by which a row alone may differ from the model's own `generate`.

Both compute the same products, which differ by their rounding alone.
"""


class Compared(NamedTuple):
    """How to run the two again whose results were compared, and which of their rows differ."""

    found: Callable[[], object]
    expected: Callable[[], object]
    aligned: Aligned = Aligned()


class ResultsDiffer(ModelRefused):
    """The model computes one row differently in two ways of running it."""

    def __init__(self, text: str, ending: str, compared: Compared, error_max: float) -> None:
        super().__init__(text + ending)
        self._parts = text, ending
        self._compared, self._error_max = compared, error_max

    def located(self, model: nn.Module) -> ModelRefused:
        """Return the refusal with the name of the first module that differs, by running again."""
        place = first_difference(model, *self._compared, self._error_max)
        text, ending = self._parts
        return ModelRefused(text + place + ending)


class RunFailed(ModelNotRun):
    """The model's code has raised an error in a trial."""

    def __init__(self, how: str, error: Exception, run: Callable[[], object]) -> None:
        self._text = f"the model does not run{how}: {type(error).__name__}: {error}"
        super().__init__(self._text)
        self._run = run

    def located(self, model: nn.Module) -> ModelRefused:
        """Return the refusal with the name of the module that has failed, by running again."""
        return ModelNotRun(self._text + failing_module(model, self._run))


def located(refusal: ModelRefused, model: nn.Module) -> ModelRefused:
    """Return a refusal that names the module, if it follows from results or a failure."""
    if isinstance(refusal, ResultsDiffer | RunFailed):
        return refusal.located(model)
    return refusal


def check_same(
    found: Tensor,
    expected: Tensor,
    row: str = "a padded row",
    compared: Compared | None = None,
    result: str = "the model can't be batched",
    errors_max: Mapping[torch.dtype, float] = ERRORS_MAX,
) -> None:
    """Raise `ModelRefused` if rows differ from the same rows alone.

    `row` describes them, and `result` what follows from that. `errors_max`: the relative norm of
    the difference that is allowed, by dtype; `ERROR_MAX_HALF` for others.
    """
    error_max = errors_max.get(expected.dtype, ERROR_MAX_HALF)
    error = relative_difference(found, expected)
    if error <= error_max:
        return
    text = f"{row}'s results differ from the row alone (relative norm {error:.1e}, "
    text += f"at most {error_max:.0e})"
    ending = f"; {result}"
    if compared is None:
        raise ModelRefused(text + ending)
    raise ResultsDiffer(text, ending, compared, error_max)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative norm of the difference."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())
