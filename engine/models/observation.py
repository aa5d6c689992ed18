"""What a probe observes: the inputs of layers, which layers share one, and different results."""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor, nn

from loradock.engine.errors import ModelRefused

ERRORS_MAX: Final = {torch.float64: 1e-3, torch.float32: 1e-3}
"""The relative norm by which a padded row can differ from the same row alone."""

ERROR_MAX_HALF: Final = 0.1
"""The same for 16-bit models, where rounding alone causes a few hundredths."""

ERRORS_MAX_GENERATED: Final = {torch.float64: 1e-5, torch.float32: 1e-4}
"""The relative norm by which a row alone can differ from the model's own `generate`.

Both compute the same products, which differ by their rounding alone.
"""


def error_max(dtype: torch.dtype) -> float:
    """Return the relative norm by which results in a dtype can differ."""
    return ERRORS_MAX.get(dtype, ERROR_MAX_HALF)


def relative_difference(found: Tensor, expected: Tensor) -> float:
    """Return the relative norm of the difference, computed in float64."""
    return float((found.double() - expected.double()).norm() / expected.double().norm())


def check_same(
    found: Tensor,
    expected: Tensor,
    row: str = "a padded row",
    result: str = "the model can't be batched",
    errors_max: Mapping[torch.dtype, float] = ERRORS_MAX,
) -> None:
    """Raise `ModelRefused` if rows differ from the same rows alone.

    `row` describes them, and `result` what follows from that. `errors_max`: the relative norm of
    the difference that is allowed, by dtype; `ERROR_MAX_HALF` for others.
    """
    allowed = errors_max.get(expected.dtype, ERROR_MAX_HALF)
    error = relative_difference(found, expected)
    if not error <= allowed:
        raise ModelRefused(
            f"{row}'s results differ from the row alone (relative norm {error:.1e}, at most "
            f"{allowed:.0e}); {result}"
        )


SHORT: Final = 7
LONG: Final = 16
ROWS: Final = 2
"""The tokens of a probe's prompts, and their number."""


class RowShapes(NamedTuple):
    """The shapes that a layer's input rows can have in the probe's steps.

    `rows`: the numbers of rows that an input without other axes can have. `alone`: the tokens of
    prompts that are run alone; empty if all are run together.
    """

    rows: frozenset[int]
    alone: frozenset[int] = frozenset()

    def is_alone(self, shape: tuple[int, ...]) -> bool:
        """Return whether an input can be of a row that is run alone."""
        return bool(self.alone) and (len(shape) != 1 or shape[0] in self.alone)


EVERY_TOKEN: Final = RowShapes(frozenset({ROWS * LONG, ROWS}))
"""The input of a layer that is mapped by token or by row, as heads are."""

TOGETHER: Final = RowShapes(frozenset({ROWS}), frozenset({SHORT, LONG, 1}))
"""The input if prompts are run alone, and decoded together."""


class RecordedInput(NamedTuple):
    """One input of a layer: its shape, the tensor itself, and a copy or a digest of its values.

    `values` were taken during the call, so that a later change of `tensor` is seen.
    """

    shape: tuple[int, ...]
    tensor: Tensor | None = None
    values: Tensor | None = None


class ObservedInputs:
    """The inputs of each layer during the probe, in the order of the calls."""

    def __init__(self, names: Collection[str]) -> None:
        self.inputs: dict[str, list[RecordedInput]] = {name: [] for name in names}

    def is_ordered(self, name: str, rows: RowShapes) -> bool:
        """Return whether every input had its rows in the order of a mapping.

        An input has all rows, or any number of rows for each row of the batch, or for all of them
        together. Inputs of a row that was run alone have any shape.
        """
        shapes = [recorded.shape for recorded in self.inputs[name]]
        return all(
            (len(shape) == 1 and shape[0] in rows.rows)
            # Rows of one sequence of the batch, or of an input that all of them share.
            or (len(shape) > 1 and shape[0] in {1, ROWS})
            or rows.is_alone(shape)
            for shape in shapes
        )

    def sees_tokens(self, name: str) -> bool:
        """Return whether every input was [tokens], or [rows, tokens, ...].

        A norm over transposed heads has [rows, heads, tokens], which are as many as tokens in one
        of the steps at most: in all the steps that other layers had, the second axis is theirs.
        """
        steps = {(ROWS, LONG), (ROWS, 1)}
        seen = steps.intersection(one.shape for found in self.inputs.values() for one in found)
        shapes = [one.shape for one in self.inputs[name] if len(one.shape) > 1]
        leading = {shape[:2] for shape in shapes}
        has_more = any(len(shape) > 2 for shape in shapes)
        return leading == seen if has_more else leading <= steps

    def has_rows_as_columns(self, name: str, alone: "ObservedInputs") -> bool:
        """Return whether every input is [tokens, rows, ...], with one row in `alone`, the same
        otherwise.

        Only for layers that were recorded as `retained`, with the first row alone.
        """
        inputs, others = self.inputs[name], alone.inputs[name]
        return 0 < len(inputs) == len(others) and all(
            is_first_column(*pair) for pair in zip(inputs, others, strict=True)
        )

    def share_inputs(self, names: Sequence[str]) -> bool:
        """Return whether these layers always received the same tensor, unchanged between them.

        Only for layers that were recorded as `retained`.
        """
        return share_inputs([self.inputs[name] for name in names])


def is_first_column(together: RecordedInput, alone: RecordedInput) -> bool:
    """Return whether an input of all rows is [tokens, rows, ...] with the first row as a column."""
    tokens, *rest = together.shape
    is_column = rest[:1] == [ROWS] and alone.shape == (tokens, 1, *rest[1:])
    if not is_column or together.values is None or alone.values is None:
        return False
    expected = alone.values.double()
    error = (together.values[:, :1].double() - expected).norm()
    return bool(error <= ERROR_MAX_HALF * expected.norm())


def share_inputs(inputs: Sequence[Sequence[RecordedInput]]) -> bool:
    """Return whether the layers with these inputs always received one tensor, unchanged between
    them.
    """
    if len({len(calls) for calls in inputs}) != 1 or not inputs[0]:
        return False
    return all(_is_one_input(together) for together in zip(*inputs, strict=True))


def _is_one_input(inputs: Sequence[RecordedInput]) -> bool:
    first = inputs[0]
    return all(
        recorded.tensor is first.tensor is not None
        and recorded.values is not None
        and first.values is not None
        and torch.equal(recorded.values, first.values)
        for recorded in inputs
    )


@contextmanager
def recording(
    layers: Mapping[str, nn.Module], retained: frozenset[str]
) -> Iterator[ObservedInputs]:
    """Record every layer's inputs: the shapes of tokens, and of activations without the last axis.

    A call without a tensor records nothing.
    """
    observed = ObservedInputs(layers.keys())

    def collect(name: str, layer: nn.Module, x: Tensor) -> None:
        shape = tuple(x.shape if isinstance(layer, nn.Embedding) else x.shape[:-1])
        tensors = (x, x.clone()) if name in retained else ()
        observed.inputs[name].append(RecordedInput(shape, *tensors))

    with input_hooks(layers, collect):
        yield observed


@contextmanager
def input_hooks(
    layers: Mapping[str, nn.Module], on_input: Callable[[str, nn.Module, Tensor], None]
) -> Iterator[None]:
    """Call `on_input` with a layer's name, itself and its first argument, if that is a tensor."""

    def before(name: str, layer: nn.Module, arguments: tuple[Any, ...]) -> None:
        if arguments and isinstance(arguments[0], Tensor):
            on_input(name, layer, arguments[0])

    hooks = [
        layer.register_forward_pre_hook(partial(before, name)) for name, layer in layers.items()
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
