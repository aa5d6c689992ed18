"""The choice of a batch at start: over blocks where a trial of the model passes, else padded."""

import os
from typing import Final

import structlog
import torch

from loradock.engine.config import EngineConfig
from loradock.engine.inference.admission import SlotTable
from loradock.engine.inference.batch import BatchEvents, SequenceBatch
from loradock.engine.inference.decoding.decode_probe import ProbeMapper
from loradock.engine.inference.forward_runner import ForwardRunner
from loradock.engine.inference.padded_batch import PaddedBatch
from loradock.engine.inference.paged_batch import PagedBatch
from loradock.engine.inference.step_budget import StepBudget, choose_budget
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.paging.block_pool import BLOCK_TOKENS
from loradock.engine.paging.block_table import blocks_around, blocks_of
from loradock.engine.paging.flat_model import FlatModel, FlatRefused, try_flat
from loradock.engine.punica.wrapper import PunicaWrapper

_log = structlog.get_logger()

_HOST_BYTES_MAX: Final = 4 << 30
_HOST_SHARE: Final = 0.25
_DEVICE_SHARE: Final = 0.8
"""Of the host's memory, and of what is free on any other device, for keys and values."""


def choose_batch(
    model: CausalModel,
    punica: PunicaWrapper,
    slots: SlotTable,
    config: EngineConfig,
    events: BatchEvents,
) -> SequenceBatch:
    """Return the batch of this engine; the reason for a padded one is logged.

    Raises `ValueError` for a number of bytes that is too small for one sequence.
    """
    mapper = ProbeMapper(punica, len(slots.residents))
    runner = ForwardRunner(model, punica, slots)
    try:
        if config.capture_steps:
            raise FlatRefused("captured steps need a padded cache")
        if not config.paged_attention:
            raise FlatRefused("paged_attention is off")
        trial = try_flat(model, mapper.map)
    except FlatRefused as refusal:
        _log.warning("the key/value cache is padded, prefixes are not reused", reason=str(refusal))
        model.record_refusal(str(refusal))
        budget = choose_budget(model, mapper, config)
        return PaddedBatch(runner, punica, config, budget, events)
    budget = choose_budget(model, mapper, config, is_flat=True)
    row_blocks = row_blocks_max(model, trial.reach, budget)
    blocks = choose_blocks(model, config, trial.block_bytes, row_blocks)
    flat = FlatModel(model, blocks, trial.reach)
    mapper.map(1, 1)
    flat.allocate()
    _log.info(
        "the key/value cache is paged",
        tokens=blocks * BLOCK_TOKENS,
        sequence_tokens_max=row_blocks * BLOCK_TOKENS,
    )
    return PagedBatch(
        runner,
        flat,
        budget,
        events,
        row_blocks=row_blocks,
        shares_prefixes=config.prefix_caching,
    )


def row_blocks_max(model: CausalModel, reach: int, budget: StepBudget) -> int:
    """Return the most blocks that a sequence holds at once: of its window and of one step.

    A prompt with images is computed in one step of any length.
    """
    whole = blocks_of(model.context_tokens_max)
    if model.prompt_reader is not None:
        return whole
    return min(whole, blocks_around(reach + budget.tokens))


def choose_blocks(
    model: CausalModel, config: EngineConfig, block_bytes: int, row_blocks: int
) -> int:
    """Return the number of blocks, equal on all ranks: as many as all sequences have tokens for.

    They are fewer if their bytes exceed the configured or the default budget. A default budget on a
    host allows at least one sequence, because the memory is provided only when it is written.
    """
    budget = config.kv_cache_bytes or _default_bytes(model.device)
    whole = blocks_of(model.context_tokens_max)
    blocks = min(budget // block_bytes, config.max_num_seqs * whole)
    if not config.kv_cache_bytes and model.device.type == "cpu":
        blocks = max(blocks, row_blocks)
    [blocks] = model.group.broadcast_numbers([blocks])
    if blocks < row_blocks:
        raise ValueError(
            f"kv_cache_bytes {budget} are {blocks * BLOCK_TOKENS} tokens, and one sequence may "
            f"hold {row_blocks * BLOCK_TOKENS}; allow {row_blocks * block_bytes} bytes, or fewer "
            "tokens with context_tokens_max"
        )
    return blocks


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_DEVICE_SHARE * free)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_HOST_BYTES_MAX, int(_HOST_SHARE * host))
