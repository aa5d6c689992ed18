"""Choices at start, by probes of the model itself: the batch, its budget and its decode steps.

The key/value cache is paged if packed passes give the model's own logits; otherwise it is padded.
On a GPU a kernel attends over its blocks if passes with it do, and decode steps are captured if a
few of them equal passes that are not, without a host sync. The tokens of a step are given, or
chosen from the measured speed of the model. The result of a probe counts, not the model's name; a
probe is a sample, not a proof for every length.
"""

import os
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from typing import Any, Final, NamedTuple, Self

import structlog
import torch
from torch import Tensor

from loradock.engine.config import EngineConfig
from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.kernels.block_attention import (
    AttentionOptions,
    BlockAttention,
    BlockOperands,
)
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.models.observation import error_max, relative_difference
from loradock.engine.punica.mapping import BASE, LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.serving.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    blocks_around,
    blocks_of,
)
from loradock.engine.serving.budget import STEP_TOKENS_MAX, StepBudget, clock_of
from loradock.engine.serving.decoding import (
    CapturedDecode,
    CudaCapture,
    GraphRunner,
    StepRunner,
    SyncCheckedRunner,
)
from loradock.engine.serving.forward import BatchEvents, ForwardRunner, PackedModel
from loradock.engine.serving.padded_batch import PaddedBatch
from loradock.engine.serving.paged_batch import PagedBatch, Paging
from loradock.engine.serving.paged_cache import PackedChunk
from loradock.engine.serving.prefix_states import PrefixStates
from loradock.engine.serving.queue import SlotTable

_log = structlog.get_logger()

_HOST_BYTES_MAX: Final = 4 << 30
_HOST_SHARE: Final = 0.25
_DEVICE_SHARE: Final = 0.8
"""Of the host's memory, and of the free memory of any other device, for keys and values."""

_PREFIX_SHARE: Final = 0.25
"""Of the memory for keys and values, for stored states of models that have some."""

STEP_S_CPU: Final = 0.25
STEP_S_GPU: Final = 0.05
"""The longest duration that a step should have, on a CPU and on any other device.

It is the longest gap between two tokens of a running sequence, so the tokens of long prompts are
spread over several steps.
"""

_MEASURED_TOKENS: Final = (16, 128)
_MEASUREMENTS: Final = 3
_MEASURED_S_MAX: Final = 1.0
"""A size is measured this many times, but not again after this many seconds."""

_LENGTHS: Final = (5, 2, 11)
"""The prompt lengths of a padded probe: all different, and one row less than a power of two."""

_COLUMNS: Final = 4
"""The columns of a chunk in the probe of chunks."""

DECODE_STEPS: Final = 3
"""The decode steps of a probe."""

_PACKED_LENGTHS: Final = (5, 2, 19)
"""The prompts of the packed probe; the last one exceeds a block."""

_PACKED_CHUNKS: Final = ((5, 1, 7), (1, 1, 11), (1, 1, 1), (1, 1, 1))
"""The tokens of each prompt per pass of the packed probe: chunks next to decode steps."""

Batch = PagedBatch | PaddedBatch
"""The sequences whose prompts are prefilled or which are decoded."""

MapTokens = Callable[[int, int], None]
"""Prepares the adapters' mapping for a pass of (tokens, sampled rows), all of one adapter."""


class PackedRefused(Exception):  # noqa: N818 - named like the engine's other refusals
    """A model can't be run in packed passes; the text is the reason."""


class CaptureRefused(Exception):  # noqa: N818 - as above
    """A model's decode steps can't be captured; the text is the reason."""


class PackedProbe(NamedTuple):
    """The results of a probe: the bytes of one block, and `lookback` as in `PackedModel`."""

    block_bytes: int
    lookback: int


class ProbeMapper:
    """Sets the mappings of a probe: all rows use `adapter`, which is in slot 0, or the base."""

    def __init__(self, punica: PunicaWrapper, slots: int, adapter: int = BASE) -> None:
        self._punica = punica
        self._adapter = adapter
        self._slots = slots

    def with_adapter(self, adapter: int) -> Self:
        """Return a mapper for another adapter."""
        return type(self)(self._punica, self._slots, adapter)

    def map(self, tokens: int, rows: int) -> None:
        """Set the mapping for a forward pass of `tokens` tokens, `rows` of them sampled."""
        residents = [self._adapter or None, *[None] * (self._slots - 1)]
        mapping = LoRAMapping([self._adapter] * tokens, [self._adapter] * rows, tokens > rows)
        self._punica.update_metadata(mapping, residents)

    def active_counts(self, rows: int) -> list[int]:
        """Return the numbers of active adapters that steps of `rows` rows are captured for."""
        most = min(rows, self._slots)
        return [0, *(1 << power for power in range(most.bit_length()))]

    def map_active(self, rows: int, active: int) -> None:
        """Set the mapping for a decode step in which `active` adapters have rows, or none."""
        ids = [1 + row % active if active else BASE for row in range(rows)]
        self._punica.update_metadata(LoRAMapping(ids, ids), range(1, self._slots + 1))


def choose_batch(
    model: CausalModel,
    punica: PunicaWrapper,
    slots: SlotTable,
    config: EngineConfig,
    events: BatchEvents,
) -> Batch:
    """Return the batch of this engine; the reason for a padded one is logged.

    Raises `ValueError` for a number of bytes that is too small for one sequence, and as
    `check_capture` does.
    """
    check_capture(model, config)
    mapper = ProbeMapper(punica, len(slots.residents))
    runner = ForwardRunner(model, punica, slots)
    try:
        if not config.paged_attention:
            raise PackedRefused("paged_attention is off")
        kernel, probe = choose_attention(model, punica, mapper, config)
    except PackedRefused as refusal:
        _log.warning("the key/value cache is padded", reason=str(refusal))
        model.record_refusal(str(refusal))
        budget = choose_budget(model, mapper, config)
        prefixes = choose_prefixes(model, mapper, config, budget)
        return PaddedBatch(runner, budget, events, config.max_num_seqs, prefixes)
    budget = choose_budget(model, mapper, config, is_packed=True)
    if probe.lookback < model.max_model_len:
        budget.limit()
    sequence_blocks = sequence_blocks_max(model, probe.lookback, budget)
    blocks = choose_blocks(model, config, probe.block_bytes, sequence_blocks)
    packed = PackedModel(model, blocks, probe.lookback, kernel, config.max_num_seqs)
    mapper.map(1, 1)
    packed.allocate()
    captured = choose_capture(punica, packed, mapper, config, budget)
    _log.info(
        "the key/value cache is paged",
        tokens=blocks * BLOCK_TOKENS,
        sequence_tokens_max=sequence_blocks * BLOCK_TOKENS,
        attention="kernel" if packed.has_kernel else "torch",
        captured=captured is not None,
    )
    return PagedBatch(
        runner,
        packed,
        budget,
        events,
        Paging(sequence_blocks, config.prefix_caching),
        captured,
    )


def choose_attention(
    model: CausalModel, punica: PunicaWrapper, mapper: ProbeMapper, config: EngineConfig
) -> tuple[BlockAttention | None, PackedProbe]:
    """Return the kernel that attends over blocks, None for PyTorch's functions, and its probe.

    The reason why the device's kernel is not used is logged. Raises `PackedRefused` if neither can
    be.
    """
    kernel = punica.attention if config.attention_backend == "auto" else None
    if kernel is not None:
        try:
            # The tokens of long sequences are divided into parts, by other variants of the kernel.
            probe_packed(model, mapper.map, _as_longest(kernel, model.max_model_len))
            found = probe_packed(model, mapper.map, kernel)
            probe_shared(model, mapper.map, kernel)
            return kernel, found
        except PackedRefused as refusal:
            reason = f"PyTorch's functions attend over blocks, not the kernel: {refusal}"
            _log.warning("attention over blocks has no kernel", reason=str(refusal))
            model.record_refusal(reason)
    return None, probe_packed(model, mapper.map)


def _as_longest(kernel: BlockAttention, tokens: int) -> BlockAttention:
    """Return the kernel, attending as if a sequence had `tokens` tokens."""

    def attend(
        y: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        blocks: BlockOperands,
        options: AttentionOptions,
    ) -> None:
        kernel.attend(y, query, keys, values, blocks._replace(longest=tokens), options)

    return kernel._replace(attend=attend)


def sequence_blocks_max(model: CausalModel, lookback: int, budget: StepBudget) -> int:
    """Return the most blocks that a sequence has at once: of its window and of one step.

    A prompt with images is computed in one step of any length.
    """
    whole = blocks_of(model.max_model_len)
    if model.prompt_reader is not None:
        return whole
    return min(whole, blocks_around(lookback + budget.tokens_max))


def choose_blocks(
    model: CausalModel, config: EngineConfig, block_bytes: int, sequence_blocks: int
) -> int:
    """Return the number of blocks, equal on all ranks: as many as all sequences have tokens for.

    They are fewer if their bytes exceed the configured or the default budget. A default budget on a
    host allows at least one sequence, because the memory is provided only when it is written.
    """
    budget = config.kv_cache_bytes or _default_bytes(model.device)
    whole = blocks_of(model.max_model_len)
    blocks = min(budget // block_bytes, config.max_num_seqs * whole)
    if not config.kv_cache_bytes and model.device.type == "cpu":
        blocks = max(blocks, sequence_blocks)
    [blocks] = model.group.broadcast_numbers([blocks])
    if blocks < sequence_blocks:
        raise ValueError(
            f"kv_cache_bytes {budget} are {blocks * BLOCK_TOKENS} tokens, and one sequence may "
            f"hold {sequence_blocks * BLOCK_TOKENS}; allow {sequence_blocks * block_bytes} bytes, "
            "or fewer tokens with max_model_len"
        )
    return blocks


def choose_prefixes(
    model: CausalModel, mapper: ProbeMapper, config: EngineConfig, budget: StepBudget
) -> PrefixStates:
    """Return where a padded batch stores states of prompts, of equal size on all ranks.

    Nothing is stored, with the reason in the log, if a row that continues from stored states has
    other logits than a row that computes all its tokens.
    """
    if not config.prefix_caching:
        return PrefixStates(0)
    reason = "its rows are not run with states" if model.batching in ("padded", "whole") else ""
    if not reason and not budget.chunks:
        reason = "its prompts can't be divided"
    if not reason and not _states_are_restored(model, mapper):
        reason = "a row that continues from stored states differs"
    if reason:
        _log.warning("prefixes are not reused", reason=reason)
        model.record_refusal(f"prefixes are not reused: {reason}")
        return PrefixStates(0)
    share = int(_PREFIX_SHARE * (config.kv_cache_bytes or _default_bytes(model.device)))
    [chosen] = model.group.broadcast_numbers([share])
    return PrefixStates(chosen)


def _states_are_restored(model: CausalModel, mapper: ProbeMapper) -> bool:
    """Return whether two rows that continue from one row's states are as computed whole, on all
    ranks.
    """
    count = 9
    texts = [
        [(7 * at + 3 * (0 if at < count else row)) % model.vocab_size for at in range(2 * count)]
        for row in (1, 2, 3)
    ]
    first = model.new_cache([0])
    try:
        expected = torch.cat(
            [_own_logits(model, mapper.map, model.new_cache([0]), one, [len(one)]) for one in texts]
        )
        _own_logits(model, mapper.map, first, texts[0], [count])
        states = first.copy_states(0)
        caches = [first, model.new_cache([0]), model.new_cache([0])]
        for cache in caches[1:]:
            cache.restore(0, states, count)
        # The row that the states were copied from continues too, and must not change them.
        pairs = zip(caches, texts, strict=True)
        found = torch.cat([_own_logits(model, mapper.map, *pair, [2 * count]) for pair in pairs])
    except MODEL_CODE_ERRORS:
        return False
    return model.group.all_true(relative_difference(found, expected) <= error_max(expected.dtype))


def _default_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(_DEVICE_SHARE * free)
    host = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(_HOST_BYTES_MAX, int(_HOST_SHARE * host))


def choose_budget(
    model: CausalModel,
    mapper: ProbeMapper,
    config: EngineConfig,
    *,
    is_packed: bool = False,
    clock: Callable[[], float] | None = None,
) -> StepBudget:
    """Return the budget of this engine, equal on all ranks; `clock`: None for the device's own.

    Prompts are not divided if the model answers differently when they are; that is logged.
    `is_packed`: whether prompts are prefilled in packed passes, whose probe has divided some.
    """
    if not is_packed and not _chunks_are_equal(model, mapper):
        _log.warning("long prompts are processed in one step: in chunks this model differs")
        return StepBudget(STEP_TOKENS_MAX, model.group, chunks=False)
    if config.max_num_batched_tokens:
        return StepBudget(config.max_num_batched_tokens, model.group)
    target_s = STEP_S_CPU if model.device.type == "cpu" else STEP_S_GPU
    clock = clock or clock_of(model.device)
    sizes = {min(count, model.max_model_len) for count in _MEASURED_TOKENS}
    measured = [(count, _seconds_of(model, mapper, count, clock)) for count in sorted(sizes)]
    return StepBudget(
        STEP_TOKENS_MAX, model.group, target_s=target_s, measured=measured, clock=clock
    )


def _chunks_are_equal(model: CausalModel, mapper: ProbeMapper) -> bool:
    """Return whether a left-padded batch in chunks has the same logits as in one pass, on all
    ranks.
    """
    none = [0] * len(_LENGTHS)
    whole = _prefill(model, mapper, _LENGTHS, model.new_cache(none))
    try:
        chunked = _prefill(model, mapper, _LENGTHS, model.new_cache(none), _COLUMNS)
    except MODEL_CODE_ERRORS:
        return False
    return model.group.all_true(relative_difference(chunked, whole) <= error_max(whole.dtype))


def _seconds_of(
    model: CausalModel, mapper: ProbeMapper, count: int, clock: Callable[[], float]
) -> float:
    """Return the duration of the fastest of some prefills of one row of `count` tokens.

    The first one allocates and compiles, and is not among them.
    """
    tokens = torch.arange(count)[None] % model.vocab_size
    seconds: list[float] = []
    while len(seconds) < 2 or (len(seconds) <= _MEASUREMENTS and sum(seconds) < _MEASURED_S_MAX):
        mapper.map(count, 1)
        started = clock()
        # Reading a result waits for the device.
        float(model.forward(tokens, model.new_cache([count]))[0, 0])
        seconds.append(clock() - started)
    return min(seconds[1:])


def check_capture(model: CausalModel, config: EngineConfig) -> None:
    """Raise `ValueError` if `capture_steps` is set for a device or ranks without CUDA graphs."""
    if not config.capture_steps:
        return
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


def choose_capture(
    punica: PunicaWrapper,
    packed: PackedModel,
    mapper: ProbeMapper,
    config: EngineConfig,
    budget: StepBudget,
) -> CapturedDecode | None:
    """Return captured decode steps on CUDA, unless `capture_steps` is off; else None.

    The reason for capturing nothing on CUDA is logged. All slots are empty.
    """
    if packed.device.type != "cuda" or config.capture_steps is False:
        return None
    refusal = ""
    if not packed.model.group.is_trivial:
        refusal = "several ranks hold the model, and wait for one another within each step"
    elif not packed.has_kernel:
        refusal = "attention over blocks has no kernel"
    if not refusal:
        runner = GraphRunner(punica, CudaCapture(packed.device))
        return captured_or_none(packed, runner, mapper, budget)
    _log.warning("decode steps are not captured", reason=refusal)
    return None


def captured_or_none(
    packed: PackedModel, runner: StepRunner, mapper: ProbeMapper, budget: StepBudget
) -> CapturedDecode | None:
    """Return decode steps by `runner`, all captured, if the probe passes; else log the reason."""
    captured = CapturedDecode(packed, runner)
    # The tables of a mapping, whose place is part of a step, do not grow afterwards.
    most = max(budget.tokens_max, captured.rows_max)
    mapper.with_adapter(1).map(most, captured.rows_max)
    checked = CapturedDecode(packed, SyncCheckedRunner(packed.device))
    # An adapter without weights launches the same kernels as any other.
    mappers = [mapper.with_adapter(adapter) for adapter in (BASE, 1)]
    try:
        for own in mappers:
            probe_captured(packed, checked, own)
        _capture_all(captured, mapper)
        for own in mappers:
            probe_captured(packed, captured, own)
    except CaptureRefused as refusal:
        _log.warning("decode steps are not captured", reason=str(refusal))
        packed.model.record_refusal(f"decode steps are not captured: {refusal}")
        return None
    return captured


def _capture_all(captured: CapturedDecode, mapper: ProbeMapper) -> None:
    """Capture the steps of every number of rows, the largest first: it needs the most memory."""
    rows = captured.rows_max
    while rows:
        for active in mapper.active_counts(rows):
            mapper.map_active(rows, active)
            captured.run([], rows)
            if captured.runner.failure:
                raise CaptureRefused(captured.runner.failure)
        rows //= 2


def probe_captured(packed: PackedModel, captured: CapturedDecode, mapper: ProbeMapper) -> None:
    """Raise `CaptureRefused` if captured steps fail, or differ from passes that are not."""
    pool = BlockPool(packed.cache.blocks)
    lengths = _LENGTHS[: packed.sequences_max]
    tables = [BlockTable(pool, None) for _ in lengths]
    for row, (table, length) in enumerate(zip(tables, lengths, strict=True)):
        table.reserve(length + DECODE_STEPS)
        tokens = [(7 * index + row + 3) % packed.model.vocab_size for index in range(length)]
        mapper.map(length, 1)
        packed.forward([PackedChunk(tokens, table)])
        table.advance(length, list)
    for step in range(DECODE_STEPS):
        chunks = [
            PackedChunk([(row + 11 * step) % packed.model.vocab_size], table)
            for row, table in enumerate(tables)
        ]
        mapper.map(len(chunks), len(chunks))
        expected = packed.forward(chunks)
        rows = captured.padded_rows(len(chunks))
        mapper.map(rows, rows)
        try:
            found = captured.run(chunks)
        except MODEL_CODE_ERRORS as error:
            raise CaptureRefused(f"{type(error).__name__}: {error}") from error
        if captured.runner.failure:
            raise CaptureRefused(captured.runner.failure)
        distance, allowed = relative_difference(found, expected), error_max(expected.dtype)
        if not distance <= allowed:
            raise CaptureRefused(
                f"a captured step of {len(chunks)} rows differs from a pass that is not "
                f"(relative norm {distance:.1e}, at most {allowed:.0e})"
            )
        for table in tables:
            table.advance(table.length + 1, list)


def probe_packed(
    model: CausalModel, map_tokens: MapTokens, kernel: BlockAttention | None = None
) -> PackedProbe:
    """Probe packed passes of a model, and measure how far back its tokens attend.

    kernel: what attends over blocks, None for PyTorch's functions. Raises `PackedRefused` with the
    reason if they do not give the model's own logits.
    """
    if model.batching != "padded":
        reason = next(iter(model.refusals), "its layers see rows in an order of their own")
        raise PackedRefused(f"rows are run {model.batching}: {reason}")
    if "position_ids" not in model.accepts:
        raise PackedRefused("the model accepts no positions")
    tokens = [
        [
            (7 * index + 3 * row + 1) % model.vocab_size
            for index in range(length + len(_PACKED_CHUNKS))
        ]
        for row, length in enumerate(_PACKED_LENGTHS)
    ]
    packed = PackedModel(model, 8, kernel=kernel)
    try:
        found = _packed_logits(packed, tokens, map_tokens)
        map_tokens(1, 1)
        lookback = packed.measure_lookback()
    except MODEL_CODE_ERRORS as error:
        raise PackedRefused(f"{type(error).__name__}: {error}") from error
    for row, (ends, logits) in enumerate(found):
        expected = _own_logits(model, map_tokens, BatchKVCache([0]), tokens[row], ends)
        distance, allowed = relative_difference(logits, expected), error_max(expected.dtype)
        if not model.group.all_true(distance <= allowed):
            raise PackedRefused(
                f"a packed pass differs from the model's own (relative norm {distance:.1e} here, "
                f"at most {allowed:.0e} on every rank)"
            )
    return PackedProbe(packed.cache.block_bytes, lookback)


def probe_shared(model: CausalModel, map_tokens: MapTokens, kernel: BlockAttention) -> None:
    """Raise `PackedRefused` if rows that share a block have other logits in one step than alone."""
    packed = PackedModel(model, 4, kernel=kernel._replace(shared_tokens=1))
    if not packed.shared_rows:
        return
    pool = BlockPool(packed.cache.blocks)
    first, *others = tables = [BlockTable(pool, None) for _ in range(3)]
    try:
        first.reserve(BLOCK_TOKENS)
        tokens = [(7 * index + 1) % model.vocab_size for index in range(BLOCK_TOKENS)]
        map_tokens(BLOCK_TOKENS, 1)
        packed.forward([PackedChunk(tokens, first)])
        first.advance(BLOCK_TOKENS, list)
        for table in others:
            table.reuse(first.prefix, ())
        for table in tables:
            table.reserve(BLOCK_TOKENS + 1)
        chunks = [PackedChunk([3 + row], table) for row, table in enumerate(tables)]
        map_tokens(len(chunks), len(chunks))
        found = packed.forward(chunks)
        map_tokens(1, 1)
        expected = torch.cat([packed.forward([chunk]) for chunk in chunks])
    except MODEL_CODE_ERRORS as error:
        raise PackedRefused(f"{type(error).__name__}: {error}") from error
    distance, allowed = relative_difference(found, expected), error_max(expected.dtype)
    if not model.group.all_true(distance <= allowed):
        raise PackedRefused(
            "rows that share a block differ from the same rows alone (relative norm "
            f"{distance:.1e} here, at most {allowed:.0e} on every rank)"
        )


def _packed_logits(
    packed: PackedModel, tokens: SequenceOf[SequenceOf[int]], map_tokens: MapTokens
) -> list[tuple[list[int], Tensor]]:
    """Return each prompt's tokens after each pass, and its logits, [passes, vocabulary]."""
    pool = BlockPool(packed.cache.blocks)
    tables = [BlockTable(pool, None) for _ in tokens]
    # The order in which blocks are reserved makes the last prompt's blocks not adjacent.
    tables[2].reserve(1)
    tables[0].reserve(1)
    ends: list[list[int]] = [[] for _ in tokens]
    logits = []
    for counts in _PACKED_CHUNKS:
        chunks = []
        for table, known, count in zip(tables, tokens, counts, strict=True):
            table.reserve(table.length + count)
            chunks.append(PackedChunk(known[table.length : table.length + count], table))
        map_tokens(sum(counts), len(chunks))
        logits.append(packed.forward(chunks))
        for chunk, end in zip(chunks, ends, strict=True):
            chunk.table.advance(chunk.end, list)
            end.append(chunk.table.length)
    return list(zip(ends, torch.stack(logits, dim=1), strict=True))


def _own_logits(
    model: CausalModel,
    map_tokens: MapTokens,
    cache: Any,
    tokens: SequenceOf[int],
    ends: SequenceOf[int],
) -> Tensor:
    """Return a row's logits after each of these numbers of tokens, [ends, vocabulary].

    cache: of one row, which has the tokens that `cache.lengths` counts.
    """
    logits = []
    for end in ends:
        [begin], cache.lengths = cache.lengths, [end]
        map_tokens(end - begin, 1)
        logits.append(model.forward(torch.tensor([tokens[begin:end]]), cache)[0])
    return torch.stack(logits)


def _prefill(
    model: CausalModel, mapper: ProbeMapper, lengths: SequenceOf[int], cache: Any, columns: int = 0
) -> Tensor:
    """Return the logits of a left-padded batch, prefilled in chunks of `columns` or at once."""
    width = max(lengths)
    padded = torch.zeros(len(lengths), width, dtype=torch.int64)
    for row, length in enumerate(lengths):
        padded[row, width - length :] = (torch.arange(length) * 7 + row + 3) % model.vocab_size
    ends = range(columns, width, columns) if columns else ()
    for end in (*ends, width):
        chunk = padded[:, cache.width : end]
        cache.lengths = [max(0, length - (width - end)) for length in lengths]
        mapper.map(chunk.numel(), len(chunk))
        logits = model.forward(chunk, cache)
    return logits
