"""The comparison of two results of a model, and the refusal of a model whose results differ.

A refusal names the first module whose output differs. That decides nothing: both runs are repeated
after their results were found to differ.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS, ModelNotRun, ModelRefused


class Forwarded(NamedTuple):
    """One forward: its tokens per row, and the outputs of its modules in the order of their ends.

    `outputs`: by module and number of its call.
    """

    tokens: int
    outputs: dict[tuple[str, int], Tensor]


class Aligned(NamedTuple):
    """The row of the first run that the second run computes alone.

    `row`: its index among `rows`. `at_start`: the first run has more tokens after its last one,
    instead of more before it. `last`: the number of last forwards of both runs that are compared;
    0 for all.
    """

    row: int = 0
    rows: int = 1
    at_start: bool = False
    last: int = 0


def first_difference(
    model: nn.Module,
    found: Callable[[], object],
    expected: Callable[[], object],
    aligned: Aligned,
    error_max: float,
) -> str:
    """Return the first module whose output differs by more than `error_max`, for an error text.

    Returns an empty text if there is none, or if the two runs have no forwards in common.
    """
    with suppress(*MODEL_CODE_ERRORS):
        pairs = _pair(_outputs_of(model, found), _outputs_of(model, expected), aligned)
        for own, other in pairs:
            for (name, call), output in own.outputs.items():
                counts = own.tokens, other.tokens
                error = _difference(output, other.outputs.get((name, call)), counts, aligned)
                if error > error_max:
                    kind = type(model.get_submodule(name)).__name__
                    return f"; {name} ({kind}) is the first that differs (by {error:.1e})"
    return ""


def failing_module(model: nn.Module, run: Callable[[], object]) -> str:
    """Return the innermost module in which a run fails, for an error text; empty if it does not."""
    running: list[str] = []

    def enter(name: str, _module: nn.Module, _inputs: object) -> None:
        running.append(name)

    def leave(name: str, _module: nn.Module, _inputs: object, _output: object) -> None:
        del running[running.index(name) :]

    with _hooks(model, leave, enter):
        try:
            run()
        except MODEL_CODE_ERRORS:
            return f" (in {running[-1]})" if running and running[-1] else ""
    return ""


def _outputs_of(model: nn.Module, run: Callable[[], object]) -> list[Forwarded]:
    """Return the outputs of each forward of `model` during `run`, on the host."""
    forwards: list[Forwarded] = []

    def begin(_model: nn.Module, inputs: tuple[object, ...], named: dict[str, object]) -> None:
        ids = [x for x in (*inputs, named.get("input_ids")) if isinstance(x, Tensor)]
        forwards.append(Forwarded(int(ids[0].shape[-1]) if ids else 0, {}))

    def leave(name: str, _module: nn.Module, _inputs: object, output: object) -> None:
        tensor = _tensor_of(output)
        # A wrapper's output is that of the layer which it has replaced.
        if name and forwards and tensor is not None and not name.endswith(".base_layer"):
            outputs = forwards[-1].outputs
            call = sum(key == name for key, _ in outputs)
            outputs[name, call] = tensor.detach().cpu()

    handle = model.register_forward_pre_hook(begin, with_kwargs=True)
    try:
        with _hooks(model, leave=leave):
            run()
    finally:
        handle.remove()
    return forwards


@contextmanager
def _hooks(
    model: nn.Module, leave: Callable[..., None], enter: Callable[..., None] | None = None
) -> Iterator[None]:
    """Call `enter` before each module runs and `leave` after it, with its path first."""
    hooks = []
    for name, module in model.named_modules():
        if enter is not None:
            hooks.append(module.register_forward_pre_hook(partial(enter, name)))
        hooks.append(module.register_forward_hook(partial(leave, name)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _tensor_of(output: object) -> Tensor | None:
    """Return the first floating tensor of a module's output."""
    values: Any = output.values() if isinstance(output, Mapping) else output
    candidates = [output] if isinstance(output, Tensor) else values
    if not isinstance(candidates, list | tuple) and not isinstance(output, Mapping):
        return None
    return next((x for x in candidates if isinstance(x, Tensor) and x.is_floating_point()), None)


def _pair(
    found: list[Forwarded], expected: list[Forwarded], aligned: Aligned
) -> list[tuple[Forwarded, Forwarded]]:
    """Pair the forwards of both runs in which the row is computed."""
    found, expected = found[-aligned.last :], expected[-aligned.last :]
    rows, steps = aligned.rows, len(expected)
    if len(found) != steps:
        if steps == 1:
            # The last of several steps, and a whole text.
            found = found[-1:]
        elif len(found) == rows * steps:
            found = found[aligned.row :: rows]
        elif len(found) == steps + rows - 1:
            # Prompts alone, and then steps together.
            found = [found[aligned.row], *found[rows:]]
        else:
            return []
    return list(zip(found, expected, strict=True))


def _difference(
    found: Tensor, expected: Tensor | None, tokens: tuple[int, int], aligned: Aligned
) -> float:
    """Return the relative norm of the difference in the row's last token; 0 if not comparable.

    tokens: those of a row in the forwards of `found` and of `expected`.
    """
    if expected is None or found.ndim != expected.ndim:
        return 0.0
    own: list[Any] = []
    other: list[Any] = []
    for sizes in zip(found.shape, expected.shape, strict=True):
        index = _index_of(sizes, tokens, aligned)
        if index is None:
            return 0.0
        own.append(index[0])
        other.append(index[1])
    # Two dimensions of tokens: weights of attention, where the row alone has fewer columns.
    is_pair = sum(a != b for a, b in zip(found.shape[1:], expected.shape[1:], strict=True)) > 1
    x, y = found[tuple(own)].double(), expected[tuple(other)].double()
    norm = float(y.norm())
    return float((x - y).norm()) / norm if norm > 0 and not is_pair else 0.0


def _index_of(
    sizes: tuple[int, int], tokens: tuple[int, int], aligned: Aligned
) -> tuple[Any, Any] | None:
    """Return the indices of the row's last token in one dimension of both outputs.

    None for a dimension that is neither that of the rows nor that of the tokens.
    """
    found, expected = sizes
    if found == expected:
        return slice(None), slice(None)
    if found == aligned.rows and expected == 1:
        return aligned.row, 0
    begin, is_flat = 0, found == aligned.rows * tokens[0] and expected == tokens[1]
    if is_flat:
        begin, found = aligned.row * tokens[0], tokens[0]
    elif found - expected != tokens[0] - tokens[1]:
        return None
    return begin + (min(found, expected) if aligned.at_start else found) - 1, expected - 1


ERRORS_MAX: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""The relative norm by which a padded row may differ from the same row alone."""

ERROR_MAX_HALF: Final = 0.1
"""The same for 16-bit models, where rounding alone causes a few hundredths."""

ERRORS_MAX_GENERATED: Final = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The relative norm by which a row alone may differ from the model's own `generate`.

Both compute the same products, which differ by their rounding alone.
"""


class Compared(NamedTuple):
    """The two runs whose results were compared, to be repeated, and which of their rows differ."""

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
    """The model's code has raised an error in a probe."""

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
