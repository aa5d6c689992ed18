"""The choice of a decode strategy at start, by a probe of the model itself.

Static decode is chosen only where a few static steps were observed to match dynamic ones without a
host sync; otherwise the reason is logged and nothing is captured. The probe is a sample, not a
proof for every length. It runs with the fewest columns and with the most of the model's
context: the latter detects a model that derives positions from the number of columns.
"""

from collections.abc import Sequence
from typing import Final

import structlog
import torch
from torch import Tensor

from loradock.engine.config import EngineConfig
from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.inference.decoding.cuda_graphs import (
    CudaCapture,
    GraphRunner,
    StepRunner,
    SyncCheckedRunner,
)
from loradock.engine.inference.decoding.decode import DecodeStrategy, DynamicDecode, StaticDecode
from loradock.engine.layout import next_power_of_two
from loradock.engine.models.caches.kv_cache import STATIC_COLUMNS_MIN, BatchKVCache
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.probes.comparison import ERROR_MAX_HALF, ERRORS_MAX
from loradock.engine.punica.mapping import BASE, LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper

_log = structlog.get_logger()

PROBE_STEPS: Final = 3
"""The decode steps of a probe."""

_LENGTHS: Final = (5, 2, 11)
"""The prompt lengths of a probe: all different, and one row less than a power of two."""


class StaticDecodeRefused(Exception):  # noqa: N818 - named like the engine's other refusals
    """A model's decode steps can't run over a static cache; the text is the reason."""


def choose_decode(
    model: CausalModel, punica: PunicaWrapper, slots: int, config: EngineConfig
) -> DecodeStrategy:
    """Return the decode strategy of this engine.

    `slots`: the number of slots, which are all empty. Raises `ValueError` where `capture_steps` is
    set for a device without CUDA graphs or for several ranks.
    """
    if not config.capture_steps:
        return DynamicDecode(model)
    if not model.group.is_trivial:
        raise ValueError(
            "capture_steps is on, and several ranks hold the model; they wait for one another "
            "within each step, which no graph was tried with: leave it off"
        )
    if model.device.type != "cuda":
        raise ValueError(
            f"capture_steps is on, and the device is {str(model.device)!r}; graphs need CUDA: "
            "leave it off"
        )
    runner = GraphRunner(punica, CudaCapture(model.device))
    return static_or_dynamic(model, punica, slots, runner)


def static_or_dynamic(
    model: CausalModel, punica: PunicaWrapper, slots: int, runner: StepRunner
) -> DecodeStrategy:
    """Return static decode by `runner` where the probe passes; otherwise log why it does not."""
    try:
        for adapter in (BASE, 1):
            # An adapter without weights launches the same kernels as any other.
            mapper = ProbeMapper(punica, slots, adapter)
            probe_static_decode(model, mapper, SyncCheckedRunner(model.device))
            probe_static_decode(model, mapper, runner)
    except StaticDecodeRefused as refusal:
        _log.warning("decode steps are not captured", reason=str(refusal))
        return DynamicDecode(model)
    return StaticDecode(model, runner)


class ProbeMapper:
    """Sets the mappings of a probe: all rows use `adapter`, which is in slot 0, or the base."""

    def __init__(self, punica: PunicaWrapper, slots: int, adapter: int = BASE) -> None:
        self._punica = punica
        self._adapter = adapter
        self._residents = [adapter or None, *[None] * (slots - 1)]

    def map(self, tokens: int, rows: int) -> None:
        """Set the mapping for a forward pass of `tokens` tokens, `rows` of them sampled."""
        mapping = LoRAMapping([self._adapter] * tokens, [self._adapter] * rows, tokens > rows)
        self._punica.update_metadata(mapping, self._residents)


def probe_static_decode(model: CausalModel, mapper: ProbeMapper, runner: StepRunner) -> None:
    """Raise `StaticDecodeRefused` where static steps by `runner` fail or differ from dynamic."""
    columns_max = next_power_of_two(model.context_tokens_max)
    for lengths, columns in ((_LENGTHS, STATIC_COLUMNS_MIN), (_LENGTHS[:1], columns_max)):
        dynamic, static = DynamicDecode(model), StaticDecode(model, runner, columns)
        caches = [_prefill(model, mapper, lengths, one.keeps_capacity) for one in (dynamic, static)]
        for step in range(PROBE_STEPS):
            expected = _decode(model, mapper, dynamic, caches[0], step)
            try:
                found = _decode(model, mapper, static, caches[1], step)
            except MODEL_CODE_ERRORS as error:
                raise StaticDecodeRefused(f"{type(error).__name__}: {error}") from error
            if runner.failure:
                raise StaticDecodeRefused(runner.failure)
            _compare(found, expected, columns)


def _prefill(
    model: CausalModel, mapper: ProbeMapper, lengths: Sequence[int], keeps_capacity: bool
) -> BatchKVCache:
    width = max(lengths)
    padded = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padded[row, width - length :] = (torch.arange(length) * 7 + row + 3) % model.vocab_size
    cache = BatchKVCache(lengths, keeps_capacity=keeps_capacity)
    mapper.map(padded.numel(), len(lengths))
    model.forward(padded, cache)
    return cache


def _decode(
    model: CausalModel,
    mapper: ProbeMapper,
    strategy: DecodeStrategy,
    cache: BatchKVCache,
    step: int,
) -> Tensor:
    cache.grow(1)
    rows = strategy.padded_rows(len(cache))
    mapper.map(rows, rows)
    tokens = (torch.arange(len(cache))[:, None] + 11 * step) % model.vocab_size
    return strategy.run(tokens, cache)


def _compare(found: Tensor, expected: Tensor, columns: int) -> None:
    allowed = ERRORS_MAX.get(expected.dtype, ERROR_MAX_HALF)
    error = float((found.double() - expected.double()).norm() / expected.double().norm())
    if not error <= allowed:
        raise StaticDecodeRefused(
            f"a static step over {columns} columns differs from a dynamic one "
            f"(relative norm {error:.1e}, at most {allowed:.0e})"
        )
