"""Whether a model's decode steps can run over fixed places: asked of the model itself, at start.

What it is: a few steps beside those over a growing cache, and the choice between the two ways. What
it is not: a list of models, or a proof for every length. One rule: only what was seen counts;
where a step answers otherwise or asks the host, steps are not captured, and the engine says why.

A fixed step is tried with the fewest columns and with the most that the model's context can have:
a model that takes its position from the number of columns is found out by the second.
"""

from collections.abc import Sequence
from typing import Final

import structlog
import torch
from torch import Tensor

from engine.config import EngineConfig
from engine.errors import FOREIGN_FAILURES
from engine.inference.cuda_graphs import CapturedSteps, CudaCapture, StepRunner, WatchedSteps
from engine.inference.decode import DecodeSteps, FixedSteps, GrowingSteps
from engine.layout import power_of_two
from engine.models.causal_model import PreparedModel
from engine.models.kv_cache import FIXED_COLUMNS_MIN, RowCache
from engine.models.probe import ERROR_MAX_HALF, ERRORS_MAX
from engine.punica.mapping import BASE, LoRAMapping
from engine.punica.wrapper import PunicaWrapper

_log = structlog.get_logger()

STEPS: Final = 3
"""How many steps a trial has."""

_LENGTHS: Final = (5, 2, 11)
"""The prompts of a trial's rows: one row less than there are places, none as long as another."""


class StepsRefused(Exception):  # noqa: N818 - named like the engine's other refusals
    """Why a model's decode steps can't run over fixed places."""


def choose_steps(
    model: PreparedModel, punica: PunicaWrapper, slots: int, config: EngineConfig
) -> DecodeSteps:
    """The way that decode steps are run on this engine.

    `slots`: how many adapters there may be, none of which has been written yet. Raises
    `ValueError` where steps are to be captured on a device, or by ranks, that can't.
    """
    if not config.capture_steps:
        return GrowingSteps(model)
    if not model.group.is_single:
        raise ValueError(
            "capture_steps is on, and several ranks hold the model; they wait for one another "
            "within each step, which no graph was tried with: leave it off"
        )
    if model.device.type != "cuda":
        raise ValueError(
            f"capture_steps is on, on device {str(model.device)!r}; graphs are CUDA's: leave it "
            "off elsewhere"
        )
    runner = CapturedSteps(punica, CudaCapture(model.device))
    return fixed_or_growing(model, punica, slots, runner)


def fixed_or_growing(
    model: PreparedModel, punica: PunicaWrapper, slots: int, runner: StepRunner
) -> DecodeSteps:
    """Steps over fixed places by `runner`, where a trial shows them sound; else says why not."""
    try:
        for adapter in (BASE, 1):
            # An adapter that has no weights yet is launched for like any other.
            mapper = TrialMapper(punica, slots, adapter)
            try_fixed_steps(model, mapper, WatchedSteps(model.device))
            try_fixed_steps(model, mapper, runner)
    except StepsRefused as refusal:
        _log.warning("decode steps are not captured", reason=str(refusal))
        return GrowingSteps(model)
    return FixedSteps(model, runner)


class TrialMapper:
    """Sets the mappings of a trial's forwards, all rows with one adapter or the base model."""

    def __init__(self, punica: PunicaWrapper, slots: int, adapter: int = BASE) -> None:
        """The adapter, if it is one, is in the first slot."""
        self._punica = punica
        self._adapter = adapter
        self._layout = [adapter or None, *[None] * (slots - 1)]

    def show(self, tokens: int, rows: int) -> None:
        """Map a forward of so many tokens, of which so many are sampled."""
        mapping = LoRAMapping([self._adapter] * tokens, [self._adapter] * rows, tokens > rows)
        self._punica.update_metadata(mapping, self._layout)


def try_fixed_steps(model: PreparedModel, mapper: TrialMapper, runner: StepRunner) -> None:
    """Raise `StepsRefused` where steps by `runner` are not those over a growing cache."""
    columns_max = power_of_two(model.context_tokens_max)
    for lengths, columns in ((_LENGTHS, FIXED_COLUMNS_MIN), (_LENGTHS[:1], columns_max)):
        growing, fixed = GrowingSteps(model), FixedSteps(model, runner, columns)
        rows = [_prefilled(model, mapper, lengths, one.keeps_room) for one in (growing, fixed)]
        for token in range(STEPS):
            expected = _step(model, mapper, growing, rows[0], token)
            try:
                found = _step(model, mapper, fixed, rows[1], token)
            except FOREIGN_FAILURES as error:
                raise StepsRefused(f"{type(error).__name__}: {error}") from error
            if runner.failure:
                raise StepsRefused(runner.failure)
            _compare(found, expected, columns)


def _prefilled(
    model: PreparedModel, mapper: TrialMapper, lengths: Sequence[int], keeps_room: bool
) -> RowCache:
    width = max(lengths)
    padded = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padded[row, width - length :] = (torch.arange(length) * 7 + row + 3) % model.vocab_size
    rows = RowCache(lengths, keeps_room=keeps_room)
    mapper.show(padded.numel(), len(lengths))
    model.forward(padded, rows)
    return rows


def _step(
    model: PreparedModel, mapper: TrialMapper, steps: DecodeSteps, rows: RowCache, number: int
) -> Tensor:
    rows.grow(1)
    places = steps.places(len(rows))
    mapper.show(places, places)
    tokens = (torch.arange(len(rows))[:, None] + 11 * number) % model.vocab_size
    return steps.run(tokens, rows)


def _compare(found: Tensor, expected: Tensor, columns: int) -> None:
    allowed = ERRORS_MAX.get(expected.dtype, ERROR_MAX_HALF)
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= allowed:
        raise StepsRefused(
            f"a step over {columns} fixed columns answers otherwise than over a growing cache "
            f"(relative norm {error:.1e}, at most {allowed:.0e})"
        )
