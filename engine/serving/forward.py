"""Forward passes: of a batch under its adapters, with their failures, and packed ones over blocks.

A batch decides what a pass consists of and owns its sequences' keys and values. There are two: over
blocks of tokens (`engine/serving/paged_batch.py`), whose passes are packed, and over a padded cache
(`engine/serving/padded_batch.py`). Both report to `BatchEvents`, which the scheduler implements.
"""

import sys
from collections.abc import Callable
from collections.abc import Sequence as SequenceOf
from itertools import accumulate, chain
from typing import Any, Final, NamedTuple, Protocol

import torch
from torch import Tensor

from loradock.engine.errors import (
    MODEL_CODE_ERRORS,
    DeviceOutOfMemory,
    EngineError,
    Malformed,
    is_out_of_memory,
)
from loradock.engine.kernels.block_attention import BlockAttention, BlockOperands
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.library.names import PreTrainedConfig
from loradock.engine.punica.mapping import BASE, LoRAMapping
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.serving.attention import MaskRanges, longest_lookback, packed_attention
from loradock.engine.serving.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    blocks_of,
    root_key,
)
from loradock.engine.serving.paged_cache import (
    DeviceBlockTable,
    GatheredStep,
    KernelStep,
    PackedChunk,
    PackedStep,
    PagedKVCache,
    nothing_shared,
    places_of,
)
from loradock.engine.serving.queue import SlotTable, WaitingQueue
from loradock.engine.serving.sampling import (
    NOT_FINITE,
    PROMPT_LOGITS_BYTES_MAX,
    PromptChunk,
    sample,
    score_prompts,
)
from loradock.engine.serving.sequence import Sequence
from loradock.engine.serving.step_table import StepTable
from loradock.messages.views import KVLayout

_INPUT_WORDS: Final = 1 << 16
"""The numbers of a pass, and of its sampling, for which there is memory from the start."""


class ForwardError(Exception):
    """A forward pass that failed for its own sequences, with the error to report; others continue.

    The cache of these sequences may be half written, so none of them can continue with it.
    """

    def __init__(self, error: EngineError, has_images: bool) -> None:
        super().__init__(str(error))
        self.error = error
        self.has_images = has_images


class BatchEvents(Protocol):
    """The reports of a batch during a step."""

    def on_tokens(self, sequences: list[Sequence], tokens: list[int]) -> list[int]:
        """Accept a token per sequence; return the indices of the sequences that continue."""

    def on_failure(self, sequences: list[Sequence], failure: ForwardError) -> None:
        """Fail these sequences, which have left the batch, or let them wait again."""

    def on_preemption(self, sequences: list[Sequence]) -> None:
        """Let these sequences, which have left the batch, wait again."""


class Waiting(NamedTuple):
    """The sequences that may enter a batch.

    `sequences_max`: the most sequences that the batch may have. `one_by_one`: whether sequences are
    prefilled one at a time, because one of them may have caused a failure. `is_resident`: whether
    a sequence's adapter is in its slot; a sequence for which it is not has failed.
    """

    queue: WaitingQueue[Sequence]
    sequences_max: int
    one_by_one: bool
    is_resident: Callable[[Sequence], bool]


class KVUse(NamedTuple):
    """The bytes of keys and values, and their budget, 0 if there is none; and their layout.

    A paged cache has `blocks` of `block_tokens` tokens each. `shares_prefixes`: whether prompts
    reuse those of earlier ones.
    """

    size_bytes: int
    size_bytes_max: int
    layout: KVLayout = ""
    blocks: int = 0
    block_tokens: int = 0
    shares_prefixes: bool = False


class ForwardRunner:
    """Runs forward passes of some sequences and samples their tokens."""

    def __init__(self, model: CausalModel, punica: PunicaWrapper, slots: SlotTable) -> None:
        self.model: Final = model
        self.slots: Final = slots
        self._punica = punica
        self._sampling = StepTable(model.device, _INPUT_WORDS)

    def forward(
        self,
        sequences: SequenceOf[Sequence],
        mapping: LoRAMapping,
        forward: Callable[[], Tensor],
        images: SequenceOf[ImageInputs | None] = (),
    ) -> Tensor:
        """Call `forward` under `mapping` and return its logits.

        Raises `ForwardError` if only these sequences are affected, and the model's own error if the
        engine can't continue.
        """
        residents = self.slots.residents
        self._punica.update_metadata(mapping, residents)
        adapter_ids = [sequence.command.adapter_id for sequence in sequences]
        try:
            with self.model.image_mapper.mapped(adapter_ids, images, residents):
                return forward()
        except (*MODEL_CODE_ERRORS, MemoryError) as error:
            # A local name for the new exception would make a cycle that keeps the pass's tensors.
            raise self.failure_of(error, len(sequences), has_images=any(images)) from error

    def failure_of(
        self, error: Exception, sequences: int, *, has_images: bool = False
    ) -> ForwardError:
        """Return the failure of some sequences alone; raise the error if the engine must end."""
        if not self.model.group.is_trivial:
            # The other ranks are still in the forward pass and can't be interrupted.
            raise error
        if is_out_of_memory(error):
            reason = f"a batch of {sequences} sequences: {error}"
            return ForwardError(DeviceOutOfMemory(reason), has_images)
        if has_images:
            reason = f"the model can't process these images: {str(error)[:300]}"
            return ForwardError(Malformed(reason), has_images)
        raise error

    def prefix_root(self, sequence: Sequence) -> bytes:
        """Return the key before the first block of a sequence, for those that can share blocks."""
        version, images = self.slots.version_of(sequence.command), sequence.images
        length = self.model.row_lengths.key_of(sequence.prompt_length)
        return root_key(version, images.digest if images else b"", length)

    @property
    def scored_tokens_max(self) -> int:
        """The most tokens of a pass whose logits fit into the bound on those of prompts."""
        token_bytes = torch.float32.itemsize * self.model.vocab_size
        return max(1, PROMPT_LOGITS_BYTES_MAX // token_bytes)

    def score(self, chunks: SequenceOf[PromptChunk]) -> None:
        """Store the log-probabilities of prompts' tokens; only the leader reports them."""
        if self.model.group.is_leader:
            score_prompts(chunks)

    def sample(self, sequences: SequenceOf[Sequence], logits: Tensor) -> list[int]:
        """Return a token per sequence, the leader's on all ranks; `NOT_FINITE` if there is none.

        logits: [sequences, vocabulary].
        """
        group = self.model.group
        tokens = [NOT_FINITE] * len(sequences)
        if group.is_leader:
            samplers = [sequence.sampler for sequence in sequences]
            tokens = sample(samplers, logits, self._sampling)
        return group.broadcast_numbers(tokens)


class DecodeInputs(NamedTuple):
    """The inputs of a decode step on the device, [rows] int64 unless noted, at a fixed place.

    tokens: one per row; positions: theirs. written: their places in the memory. rows: of the table
    of blocks. firsts: the tokens of each row before this one. places, blocks: what is appended to
    the table before it is read. shared: as in `BlockOperands`, in one line; empty for none.
    """

    tokens: Tensor
    positions: Tensor
    written: Tensor
    rows: Tensor
    firsts: Tensor
    places: Tensor
    blocks: Tensor
    shared: Tensor


class PackedModel:
    """A model over a paged cache of `blocks` blocks: all new tokens in one line, without padding.

    `lookback`: how many tokens before itself a token attends to at most, in any layer; sequences
    may give up the others. `kernel`: what attends over blocks; None for PyTorch's
    functions. `sequences_max`: the most sequences of a pass. `groups_decodes`: as in
    `GatheredStep`.
    """

    def __init__(
        self,
        model: CausalModel,
        blocks: int,
        lookback: int = sys.maxsize,
        kernel: BlockAttention | None = None,
        sequences_max: int = 8,
    ) -> None:
        self.cache: Final = PagedKVCache(blocks)
        self.lookback: Final = lookback
        self.sequences_max: Final = sequences_max
        self.groups_decodes = model.device.type != "cpu"
        self.device: Final = model.device
        self.model: Final = model
        self._configs = _configs_of(model.model.config)
        self._ranges = MaskRanges(model.max_model_len, model.device)
        self._kernel = kernel
        # Rows whose first blocks are given up share none.
        shares = kernel is not None and lookback >= model.max_model_len - 1
        self.shared_rows: Final = kernel.shared_rows if kernel and shares else 0
        self._table: DeviceBlockTable | None = None
        if kernel is not None:
            width = blocks_of(model.max_model_len)
            self._table = DeviceBlockTable(sequences_max, width, blocks, model.device)
        self._inputs = StepTable(model.device, _INPUT_WORDS)

    @property
    def has_kernel(self) -> bool:
        """True if a kernel attends over blocks, so that decode steps can be captured."""
        return self._kernel is not None

    def allocate(self) -> None:
        """Make the buffers of all layers now, by a pass of one token."""
        self._run_one_token()

    def measure_lookback(self) -> int:
        """Return the longest lookback of the masks of all layers, by a pass of one token."""
        functions = self._run_one_token().mask_functions
        return longest_lookback(functions, self.model.max_model_len, self.device)

    def forward(self, chunks: SequenceOf[PackedChunk]) -> Tensor:
        """Return the logits after the last `logits` tokens of each chunk, [logits, vocabulary].

        They are in the order of the chunks, which need one each unless their tokens are scored.
        The tables have blocks for the new tokens, and do not count them yet. Raises `RuntimeError`
        if a layer attends to a token whose block its sequence has given up.
        """
        return self._run(chunks)[0]

    def decode(self, inputs: DecodeInputs) -> Tensor:
        """Return the logits after each row's token, [rows, vocabulary]; can be captured.

        Needs a kernel. Every tensor is on the device, and nothing is read back.
        """
        if self._kernel is None or self._table is None:
            raise RuntimeError("decode steps over blocks need an attention kernel")
        self._table.write(inputs.places, inputs.blocks)
        begins = torch.arange(len(inputs.rows) + 1, device=self.device)
        step = self._kernel_step(
            self._kernel,
            inputs.written,
            (begins, inputs.firsts, inputs.rows, inputs.shared),
            self.model.max_model_len,
            is_decode=True,
        )
        positions = inputs.positions[None]
        with self.model.row_lengths.of(None, None, self.device):
            return self._call(inputs.tokens[None], positions, None, step)

    def decode_numbers(self, chunks: SequenceOf[PackedChunk], rows: int) -> list[list[int]]:
        """Return the numbers of `DecodeInputs` for chunks of one token each.

        They are followed by dummies up to `rows` rows, which write and read the dummy block.
        """
        if self._table is None:
            raise RuntimeError("decode steps over blocks need an attention kernel")
        dummies = rows - len(chunks)
        dummy_place = self.cache.blocks * BLOCK_TOKENS
        table = self._table
        own, places, blocks = table.update([chunk.table for chunk in chunks])
        if len(places) > rows:
            # Sequences whose last pass was no decode step, or which are in the table again.
            self._write_table(table, places, blocks)
            places, blocks = [], []
        first_of_dummy = table.dummy_row * table.data.shape[1]
        unused = rows - len(places)
        firsts = [chunk.table.length for chunk in chunks]
        shared = self._shared_numbers(table, chunks)
        return [
            [chunk.tokens[0] for chunk in chunks] + [0] * dummies,
            [chunk.table.length + chunk.offset for chunk in chunks] + [0] * dummies,
            places_of(chunks) + [dummy_place] * dummies,
            own + [table.dummy_row] * dummies,
            firsts + [0] * dummies,
            places + [first_of_dummy] * unused,
            blocks + [self.cache.blocks] * unused,
            shared + nothing_shared(self.shared_rows) * dummies,
        ]

    def _shared_numbers(
        self, table: DeviceBlockTable, chunks: SequenceOf[PackedChunk]
    ) -> list[int]:
        """Return what the rows of a decode step share, row after row."""
        if self._kernel is None or not self.shared_rows:
            return []
        tables = [chunk.table for chunk in chunks]
        shared = table.shared(tables, self.shared_rows, self._kernel.shared_tokens)
        return [*chain.from_iterable(shared)]

    def _write_table(self, table: DeviceBlockTable, places: list[int], blocks: list[int]) -> None:
        table.write(*self._inputs.send([torch.tensor(places), torch.tensor(blocks)]))

    def _run_one_token(self) -> PackedStep:
        table = BlockTable(BlockPool(self.cache.blocks), None)
        table.reserve(1)
        _, step = self._run([PackedChunk([0], table)])
        return step

    @torch.inference_mode()
    def _run(self, chunks: SequenceOf[PackedChunk]) -> tuple[Tensor, PackedStep]:
        model = self.model
        ends = [*accumulate((len(chunk.tokens) for chunk in chunks), initial=0)]
        is_decode = ends[-1] == len(chunks)
        kept = [
            token
            for chunk, end in zip(chunks, ends[1:], strict=True)
            for token in range(end - chunk.logits, end)
        ]
        numbers = [
            [token for chunk in chunks for token in chunk.tokens],
            [
                place + chunk.offset
                for chunk in chunks
                for place in range(chunk.table.length, chunk.end)
            ],
            places_of(chunks),
            kept,
        ]
        if self._table is not None:
            own, places, blocks = self._table.update([chunk.table for chunk in chunks])
            numbers += [ends, [chunk.table.length for chunk in chunks], own]
            shared = self._shared_numbers(self._table, chunks) if is_decode else []
            # Where nothing is shared, the step may need no parts to be merged.
            numbers += [shared if any(shared[:: 1 + self.shared_rows]) else [], places, blocks]
        tokens, positions, written, kept_rows, *tables = self._inputs.send(
            [torch.tensor(one, dtype=torch.int64) for one in numbers]
        )
        if self._kernel is None or self._table is None:
            step: PackedStep = GatheredStep(chunks, written, groups_decodes=self.groups_decodes)
        else:
            self._table.write(*tables[4:])
            longest = max(chunk.end for chunk in chunks)
            step = self._kernel_step(
                self._kernel, written, tables[:4], longest, is_decode=is_decode
            )
        prompts = [chunk.prompt for chunk in chunks for _ in chunk.tokens]
        longest = max(max(chunk.end, chunk.prompt) for chunk in chunks)
        with model.row_lengths.of([prompts], longest, self.device):
            return self._call(tokens[None], positions[None], kept_rows, step), step

    def _kernel_step(
        self,
        kernel: BlockAttention,
        written: Tensor,
        rows: SequenceOf[Tensor],
        longest: int,
        *,
        is_decode: bool,
    ) -> KernelStep:
        """Return a pass by the kernel.

        rows: `begins`, `firsts`, `rows` and `shared` of `BlockOperands`, the last in one line.
        """
        if self._table is None:
            raise RuntimeError("an attention kernel needs a table of blocks")
        begins, firsts, own, line = rows
        shared = line.view(len(own), -1) if len(line) else None
        blocks = BlockOperands(
            begins, firsts, own, self._table.data, BLOCK_TOKENS, longest, is_decode, shared
        )
        return KernelStep(written, kernel, blocks, self.lookback)

    @torch.inference_mode()
    def _call(
        self, tokens: Tensor, positions: Tensor, kept: Tensor | None, step: PackedStep
    ) -> Tensor:
        """Return the logits after the tokens `kept`, or after all, [kept, vocabulary].

        tokens, positions: [1, tokens].
        """
        model = self.model
        arguments: dict[str, Any] = {model.cache_argument: self.cache.cache, "use_cache": True}
        if "position_ids" in model.accepts:
            arguments["position_ids"] = positions
        selects = "logits_to_keep" in model.accepts
        if selects:
            arguments["logits_to_keep"] = 0 if kept is None else kept
        self.cache.step = step
        try:
            with packed_attention(self._configs, step, self._ranges):
                logits: Tensor = model.model(tokens, **arguments).logits[0]
        finally:
            self.cache.step = None
        return logits if selects or kept is None else logits[kept]


def _configs_of(config: PreTrainedConfig) -> list[PreTrainedConfig]:
    """Return a configuration and those of its parts, parents first."""
    parts = (getattr(config, name, None) for name in config.sub_configs)
    return [config, *(found for part in parts if part is not None for found in _configs_of(part))]


def adapter_ids_of(sequences: SequenceOf[Sequence]) -> Tensor:
    """Return each sequence's adapter id, [sequences] int64."""
    return torch.tensor([one.command.adapter_id for one in sequences], dtype=torch.int64)


def decode_mapping(sequences: SequenceOf[Sequence], rows: int = 0) -> LoRAMapping:
    """Map each sequence's one token to its adapter, and dummies up to `rows` rows to the base."""
    ids = adapter_ids_of(sequences)
    ids = torch.cat([ids, ids.new_full((max(0, rows - len(ids)),), BASE)])
    return LoRAMapping(ids, ids)
