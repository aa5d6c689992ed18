"""Flat forward passes of a model: all rows' new tokens in one line, without padding.

Prompt chunks and decoding rows share a pass. Whether a model can be run so is tried out when the
engine starts, against the model's own forward pass; what counts is the result, not its name.
"""

import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.models.caches.kv_cache import BatchKVCache
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.library.names import PreTrainedConfig
from loradock.engine.models.probes.comparison import ERROR_MAX_HALF, ERRORS_MAX
from loradock.engine.paging.attention import flat_attention
from loradock.engine.paging.block_pool import BlockPool
from loradock.engine.paging.block_table import BlockTable
from loradock.engine.paging.masks import longest_reach
from loradock.engine.paging.paged_cache import FlatRow, FlatStep, PagedKVCache

MapTokens = Callable[[int, int], None]
"""Prepares the adapters' mapping for a pass of (tokens, sampled rows), all of one adapter."""

_LENGTHS: Final = (5, 2, 19)
"""The prompts of the trial; the last one exceeds a block."""

_CHUNKS: Final = ((5, 1, 7), (1, 1, 11), (1, 1, 1), (1, 1, 1))
"""The tokens of each row per pass of the trial: chunks next to decode steps."""


class FlatRefused(Exception):  # noqa: N818 - named like the engine's other refusals
    """A model can't be run in flat passes; the text is the reason."""


class FlatTrial(NamedTuple):
    """What a trial has found: the bytes of one block, and `reach` as in `FlatModel`."""

    block_bytes: int
    reach: int


class FlatModel:
    """A model over a paged cache of `blocks` blocks.

    `reach`: how many tokens before itself a token attends to at most, in any layer; rows may give
    up the others. `groups_rows`: as in `FlatStep`.
    """

    def __init__(self, model: CausalModel, blocks: int, reach: int = sys.maxsize) -> None:
        self.cache: Final = PagedKVCache(blocks)
        self.reach: Final = reach
        self.groups_rows = model.device.type != "cpu"
        self._model = model
        self._configs = _configs_of(model.model.config)

    def allocate(self) -> None:
        """Make the buffers of all layers now, by a pass of one token."""
        self._run_one_token()

    def measure_reach(self) -> int:
        """Return the longest reach of the masks of all layers, by a pass of one token."""
        functions = self._run_one_token().mask_functions
        return longest_reach(functions, self._model.context_tokens_max, self._model.device)

    def forward(self, rows: Sequence[FlatRow]) -> Tensor:
        """Return the logits after the last `logits` tokens of each row, [logits, vocabulary].

        They are in the order of the rows, which need one each unless their tokens are scored. The
        rows' tables have blocks for their new tokens, and do not count them yet. Raises
        `RuntimeError` where a layer attends to a token whose block its row has given up.
        """
        step = FlatStep(rows, self._model.device, groups_rows=self.groups_rows)
        return self._run(rows, step)

    def _run_one_token(self) -> FlatStep:
        table = BlockTable(BlockPool(self.cache.blocks), None)
        table.reserve(1)
        rows = [FlatRow([0], table)]
        step = FlatStep(rows, self._model.device)
        self._run(rows, step)
        return step

    @torch.inference_mode()
    def _run(self, rows: Sequence[FlatRow], step: FlatStep) -> Tensor:
        model, device = self._model, self._model.device
        tokens = torch.tensor([[token for row in rows for token in row.tokens]], device=device)
        positions = [
            index + row.offset for row in rows for index in range(row.table.length, row.end)
        ]
        arguments: dict[str, Any] = {
            model.cache_argument: self.cache.cache,
            "use_cache": True,
        }
        if "position_ids" in model.accepts:
            arguments["position_ids"] = torch.tensor([positions], device=device)
        selects = "logits_to_keep" in model.accepts
        if selects:
            arguments["logits_to_keep"] = step.kept
        self.cache.step = step
        try:
            with flat_attention(self._configs, step), self._lengths_of(rows):
                output = model.model(tokens, **arguments)
        finally:
            self.cache.step = None
        logits: Tensor = output.logits[0]
        return logits if selects else logits[step.kept]

    def _lengths_of(self, rows: Sequence[FlatRow]) -> AbstractContextManager[None]:
        prompts = [row.prompt for row in rows for _ in row.tokens]
        longest = max(max(row.end, row.prompt) for row in rows)
        return self._model.row_lengths.of([prompts], longest, self._model.device)


def _configs_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and those of its parts, parents first."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(found for part in parts if part is not None for found in _configs_of(part))]


def try_flat(model: CausalModel, map_tokens: MapTokens) -> FlatTrial:
    """Try flat passes of a model, and measure how far back its tokens attend.

    Raises `FlatRefused` with the reason where they do not give the model's own logits.
    """
    if model.batching != "padded":
        reason = next(iter(model.refusals), "its layers see rows in an order of their own")
        raise FlatRefused(f"rows are run {model.batching}: {reason}")
    if "position_ids" not in model.accepts:
        raise FlatRefused("the model accepts no positions")
    tokens = [
        [(7 * index + 3 * row + 1) % model.vocab_size for index in range(length + len(_CHUNKS))]
        for row, length in enumerate(_LENGTHS)
    ]
    flat = FlatModel(model, 8)
    try:
        found = _flat_logits(flat, tokens, map_tokens)
        map_tokens(1, 1)
        reach = flat.measure_reach()
    except MODEL_CODE_ERRORS as error:
        raise FlatRefused(f"{type(error).__name__}: {error}") from error
    for row, (ends, logits) in enumerate(found):
        expected = _own_logits(model, tokens[row], ends, map_tokens)
        distance = float((logits.double() - expected.double()).norm() / expected.double().norm())
        allowed = ERRORS_MAX.get(expected.dtype, ERROR_MAX_HALF)
        if not model.group.all_true(distance <= allowed):
            raise FlatRefused(
                f"a flat pass differs from the model's own (relative norm {distance:.1e} here, at "
                f"most {allowed:.0e} on every rank)"
            )
    return FlatTrial(flat.cache.block_bytes, reach)


def _flat_logits(
    flat: FlatModel, tokens: Sequence[Sequence[int]], map_tokens: MapTokens
) -> list[tuple[list[int], Tensor]]:
    """Return each row's numbers of tokens after each pass, and its logits, [passes, vocabulary]."""
    pool = BlockPool(flat.cache.blocks)
    tables = [BlockTable(pool, None) for _ in tokens]
    # The order in which blocks are reserved makes the last row's blocks not adjacent.
    tables[2].reserve(1)
    tables[0].reserve(1)
    ends: list[list[int]] = [[] for _ in tokens]
    logits = []
    for chunks in _CHUNKS:
        rows = []
        for table, known, chunk in zip(tables, tokens, chunks, strict=True):
            table.reserve(table.length + chunk)
            rows.append(FlatRow(known[table.length : table.length + chunk], table))
        map_tokens(sum(chunks), len(rows))
        logits.append(flat.forward(rows))
        for row, end in zip(rows, ends, strict=True):
            row.table.advance(row.end, list)
            end.append(row.table.length)
    return list(zip(ends, torch.stack(logits, dim=1), strict=True))


def _own_logits(
    model: CausalModel, tokens: Sequence[int], ends: Sequence[int], map_tokens: MapTokens
) -> Tensor:
    """Return one row's logits after each of these numbers of tokens, [ends, vocabulary]."""
    cache = BatchKVCache([0])
    logits = []
    for begin, end in zip([0, *ends], ends, strict=False):
        cache.lengths = [end]
        map_tokens(end - begin, 1)
        logits.append(model.forward(torch.tensor([tokens[begin:end]]), cache)[0])
    return torch.stack(logits)
