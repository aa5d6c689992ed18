"""The number of tokens per step: given, or chosen at start from the measured speed of the model.

A step's duration is the longest gap between two tokens of a running sequence, so the tokens of
long prompts are spread over several steps.
"""

import time
from typing import Final, NamedTuple

import structlog
import torch
from torch import Tensor

from loradock.engine.config import EngineConfig
from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.inference.decoding.decode_probe import ProbeMapper
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.probes.comparison import ERROR_MAX_HALF, ERRORS_MAX

_log = structlog.get_logger()

STEP_S_CPU: Final = 0.25
STEP_S_GPU: Final = 0.05
"""The duration that a step should have at most, on a CPU and on any other device."""

TOKENS_MIN: Final = 64
TOKENS_MAX: Final = 8192
_MEASURED_TOKENS: Final = 64
_MEASUREMENTS: Final = 3
_PROBE_LENGTHS: Final = (5, 2, 11)
_PROBE_COLUMNS: Final = 4


class StepBudget(NamedTuple):
    """The most tokens per step, and whether prompts are divided into chunks to keep it."""

    tokens: int
    chunks: bool


def choose_budget(
    model: CausalModel, mapper: ProbeMapper, config: EngineConfig, *, is_flat: bool = False
) -> StepBudget:
    """Return the budget of this engine, equal on all ranks.

    Prompts are not divided where the model answers differently when they are; that is logged.
    `is_flat`: whether prompts are prefilled in flat passes, whose trial has divided some.
    """
    if not is_flat and not _chunks_are_equal(model, mapper):
        _log.warning("long prompts are processed in one step: in chunks this model differs")
        return StepBudget(TOKENS_MAX, chunks=False)
    if config.max_num_batched_tokens:
        return StepBudget(config.max_num_batched_tokens, chunks=True)
    target_s = STEP_S_CPU if model.device.type == "cpu" else STEP_S_GPU
    tokens = int(target_s / _seconds_per_token(model, mapper))
    [chosen] = model.group.broadcast_numbers([min(max(tokens, TOKENS_MIN), TOKENS_MAX)])
    return StepBudget(chosen, chunks=True)


def _chunks_are_equal(model: CausalModel, mapper: ProbeMapper) -> bool:
    """Whether a left-padded batch in chunks has the same logits as in one pass, on all ranks."""
    whole = _prefill(model, mapper, max(_PROBE_LENGTHS))
    try:
        chunked = _prefill(model, mapper, _PROBE_COLUMNS)
    except MODEL_CODE_ERRORS:
        return False
    error = float((chunked.double() - whole.double()).norm() / whole.double().norm())
    return model.group.all_true(error <= ERRORS_MAX.get(whole.dtype, ERROR_MAX_HALF))


def _prefill(model: CausalModel, mapper: ProbeMapper, columns: int) -> Tensor:
    """Return the logits of a batch that is prefilled in chunks of `columns` columns."""
    width = max(_PROBE_LENGTHS)
    padded = torch.zeros(len(_PROBE_LENGTHS), width, dtype=torch.int64)
    for row, length in enumerate(_PROBE_LENGTHS):
        padded[row, width - length :] = (torch.arange(length) * 7 + row + 3) % model.vocab_size
    cache = model.new_cache([0] * len(_PROBE_LENGTHS))
    for end in (*range(columns, width, columns), width):
        chunk = padded[:, cache.width : end]
        cache.lengths = [max(0, length - (width - end)) for length in _PROBE_LENGTHS]
        mapper.map(chunk.numel(), len(chunk))
        logits = model.forward(chunk, cache)
    return logits


def _seconds_per_token(model: CausalModel, mapper: ProbeMapper) -> float:
    """Return the duration of the fastest of some prefills of one row, per token.

    The first one allocates and compiles, and is not among them. Other programs make a prefill
    slower and never faster.
    """
    count = min(_MEASURED_TOKENS, model.context_tokens_max)
    tokens = torch.arange(count)[None] % model.vocab_size
    seconds = []
    for _ in range(1 + _MEASUREMENTS):
        mapper.map(count, 1)
        started = time.perf_counter()
        # Reading a result waits for the device.
        float(model.forward(tokens, model.new_cache([count]))[0, 0])
        seconds.append(time.perf_counter() - started)
    return max(min(seconds[1:]), 1e-9) / count
