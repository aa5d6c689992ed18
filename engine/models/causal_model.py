"""A base model that generates: its layers wrapped, verified for batching, and its forward pass.

A model that can't be batched correctly is refused when it is prepared, with the reason, before any
request.
"""

import inspect
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from loradock.engine.config import LoRAConfig
from loradock.engine.models.image_inputs import ImageInputs, image_arguments
from loradock.engine.models.image_part import NO_PUNICAS, ImagePunicas
from loradock.engine.models.image_processor import (
    ImagePromptReader,
    ImagesRefused,
    Processor,
    probe_images,
)
from loradock.engine.models.kv_cache import BatchKVCache, left_padding_mask
from loradock.engine.models.library.generation import cache_argument, generated_logits
from loradock.engine.models.library.names import Cache, PreTrainedModel
from loradock.engine.models.positions import scale_by_length
from loradock.engine.models.probing import (
    ProbeSpec,
    check_rows_alone,
    generation_probe,
    states_probe,
)
from loradock.engine.models.row_cache import (
    ModuleState,
    RowCache,
    SingleRows,
    StateCache,
    find_module_states,
)
from loradock.engine.models.served_model import ServedModel, Tokenizer
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.residency.arena import Arena

Batching = Literal["padded", "together", "single", "whole"]
"""The ways to run the rows of a model.

"padded": as one left-padded batch over keys and values. "together": prompts alone, without padding,
and then all rows together, with the states of the model's own layers. "single": each row alone,
with the state that the model returns. "whole": each row alone, all its tokens at each step, without
a state: slow, and right for any model that is causal.
"""

BATCHINGS: Final[tuple[Batching, ...]] = ("padded", "together", "single", "whole")
"""In order of preference: the first in which the model answers as for a row alone is used."""

_NO_PROCESSOR: Final = ImagesRefused("the model was prepared without a processor")


class CausalModel(ServedModel):
    """A causal language model, or the language part of an image-text model, that generates.

    `max_model_len`: prompt and output of one row together. `eos_ids`: the tokens that end an
    output. `accepts`: the names of the model's arguments; `cache_argument`: the name of its cache.
    `prompt_reader` reads prompts with images. If these are refused, it is None, and
    `no_images_reason` contains the reason.
    `row_lengths`: the lengths that scale positions.
    """

    task = "generate"

    def __init__(
        self,
        model: PreTrainedModel,
        lora_config: LoRAConfig,
        tokenizer: Tokenizer = None,
        max_model_len: int = 0,
        processor: Processor | ImagesRefused = _NO_PROCESSOR,
    ) -> None:
        """Wrap the layers of `model` in place; `processor` can be a reason to refuse images."""
        super().__init__(model, tokenizer, max_model_len)
        self.eos_ids = _eos_ids(model, tokenizer)
        self.accepts = _accepted(model)
        self.cache_argument = cache_argument(model)
        self._punica: PunicaWrapper | None = None
        self.row_lengths = scale_by_length(model)
        chosen = self._prepare([self._probe_of(one) for one in BATCHINGS], lora_config)
        self.batching = BATCHINGS[chosen]
        if self.batching in ("single", "whole"):
            forwards = self._forward_whole, self.forward, self.new_cache
            check_rows_alone(*forwards, self.vocab_size)
        self.prompt_reader, self.no_images_reason = self._make_reader(processor)

    def new_cache(self, lengths: Sequence[int] = (), offsets: Sequence[int] = ()) -> Any:
        """Return an empty `RowCache` for rows with these numbers of tokens."""
        if self.batching == "padded":
            return BatchKVCache(lengths, offsets)
        return self._cache_of(self.batching, lengths, offsets)

    def bind(
        self, arena: Arena, punica: PunicaWrapper, image_punicas: ImagePunicas = NO_PUNICAS
    ) -> None:
        """Bind the layers, and use `punica` for rows that are run alone."""
        super().bind(arena, punica, image_punicas)
        self._punica = punica

    def record_refusal(self, reason: str) -> None:
        """Append the reason why a faster way to run rows was refused."""
        self.refusals = (*self.refusals, reason)

    @torch.inference_mode()
    def forward(
        self, input_ids: Tensor, cache: Any, images: Sequence[ImageInputs | None] = ()
    ) -> Tensor:
        """Return the logits after each row's last token, [rows, vocabulary]; fill `cache` in place.

        input_ids: [rows, tokens] int64, on any device; rows with fewer tokens are padded on the
        left. cache: from `new_cache`. `cache.lengths` already counts the new tokens, and
        `cache.offsets` the images. images: in a prefill with images, one entry per row.
        """
        return self._forward(input_ids, cache, images)[:, -1]

    @torch.inference_mode()
    def forward_all(
        self, input_ids: Tensor, cache: Any, images: Sequence[ImageInputs | None] = ()
    ) -> Tensor:
        """Return the logits after every token, [rows, tokens, vocabulary], as `forward`."""
        return self._forward(input_ids, cache, images, keeps_all=True)

    def _forward(
        self,
        input_ids: Tensor,
        cache: Any,
        images: Sequence[ImageInputs | None],
        *,
        keeps_all: bool = False,
    ) -> Tensor:
        """Return at least the last column of the logits, [rows, columns, vocabulary]."""
        if not isinstance(cache, BatchKVCache):
            return self._forward_states(input_ids, cache, keeps_all)
        tokens = input_ids.shape[1]
        lengths, next_positions = torch.tensor([cache.lengths, cache.positions], device=self.device)
        mask = left_padding_mask(lengths, cache.width + tokens)
        offsets = torch.arange(-tokens, 0, device=self.device)
        positions = (next_positions[:, None] + offsets).clamp(min=0)
        image_tensors: dict[str, Tensor] = {}
        if any(images):
            arguments = image_arguments(images, positions.cpu())
            image_tensors = {name: tensor.to(self.device) for name, tensor in arguments.items()}
            positions = image_tensors.pop("position_ids")
        arguments = self._arguments(mask, positions, cache.cache, keeps_all=keeps_all)
        arguments |= image_tensors
        with self._lengths_of(cache):
            logits: Tensor = self.model(input_ids.to(self.device), **arguments).logits
        return logits

    def _lengths_of(self, cache: RowCache) -> AbstractContextManager[None]:
        prompts = [[length] for length in cache.prompt_lengths]
        longest = max([*cache.positions, *cache.prompt_lengths], default=0)
        return self.row_lengths.of(prompts, longest, self.device)

    @torch.inference_mode()
    def run(self, input_ids: Tensor, mask: Tensor, positions: Tensor, cache: Cache) -> Tensor:
        """Return the logits after the last column, [rows, vocabulary], from tensors on the device.

        input_ids: [rows, tokens] int64. mask: [rows, columns] int64, 1 for the columns that a row
        attends to. positions: [rows, tokens] int64.
        """
        with self.row_lengths.of(None, None, self.device):
            logits: Tensor = self.model(input_ids, **self._arguments(mask, positions, cache)).logits
        return logits[:, -1]

    def _arguments(
        self, mask: Tensor, positions: Tensor, cache: Cache, *, keeps_all: bool = False
    ) -> dict[str, Any]:
        """Return the arguments of a forward; `keeps_all`: logits of all columns, not of the last.

        positions: [rows, tokens] int64, or the shape that the model expects with images.
        """
        arguments: dict[str, Any] = {
            "attention_mask": mask,
            self.cache_argument: cache,
            "use_cache": True,
        }
        if "position_ids" in self.accepts:
            arguments["position_ids"] = positions
        if "logits_to_keep" in self.accepts:
            arguments["logits_to_keep"] = 0 if keeps_all else 1
        return arguments

    def _probe_of(self, batching: Batching) -> ProbeSpec:
        if batching == "padded":
            ways = self.forward, BatchKVCache, self._last_of_whole
            return generation_probe(*ways, BatchKVCache.check_columns)
        make_cache = partial(self._cache_of, batching)
        if batching == "together":
            how = "rows that are decoded together"
            return states_probe(self.forward, make_cache, self._last_of_whole, how)
        # The model's own steps are what it generates; sparse attention can choose other columns in
        # them than in a whole forward pass.
        generated = partial(generated_logits, self.model, with_cache=batching == "single")
        how = f"{batching} rows, one at a time"
        spec = states_probe(self.forward, make_cache, None, how, generated)
        return spec._replace(is_last_resort=batching == "whole")

    @torch.inference_mode()
    def _forward_whole(self, tokens: Sequence[int]) -> Tensor:
        """Return the logits after each token of a text, [tokens, vocabulary], without a cache."""
        ids = torch.tensor([list(tokens)], device=self.device)
        mask = torch.ones_like(ids)
        logits: Tensor = self.model(ids, attention_mask=mask, use_cache=False).logits[0]
        return logits

    def _last_of_whole(self, tokens: Sequence[int]) -> Tensor:
        return self._forward_whole(tokens)[-1:]

    def _cache_of(
        self, batching: Batching, lengths: Sequence[int], offsets: Sequence[int]
    ) -> StateCache | SingleRows:
        if batching == "together":
            return StateCache(self.model.config, lengths, offsets)
        states = self._module_states if batching == "single" else ()
        with_positions = "position_ids" in self.accepts
        return SingleRows(lengths, offsets, with_positions, states, batching == "single")

    @cached_property
    def _module_states(self) -> tuple[ModuleState, ...]:
        return find_module_states(self.model)

    def _forward_states(
        self, input_ids: Tensor, cache: StateCache | SingleRows, keeps_all: bool
    ) -> Tensor:
        """Run each row's new tokens alone, or all rows' next tokens together."""
        columns = input_ids.shape[1]
        if isinstance(cache, StateCache) and cache.is_together:
            logits = self._step_together(input_ids, cache)[:, None]
        else:
            logits = self._run_alone(input_ids, cache, columns if keeps_all else 1)
        cache.finish(columns)
        return logits

    def _step_together(self, input_ids: Tensor, cache: StateCache) -> Tensor:
        lengths, next_positions = torch.tensor([cache.lengths, cache.positions], device=self.device)
        mask = left_padding_mask(lengths, max(cache.lengths))
        positions = (next_positions - 1)[:, None]
        return self.run(input_ids.to(self.device), mask, positions, cache.together())

    def _run_alone(self, input_ids: Tensor, cache: StateCache | SingleRows, columns: int) -> Tensor:
        """Run each row's new tokens without padding, all of them with the row's adapter.

        Returns the last `columns` columns of the logits, zeros if a row has no new token.
        """
        logits: list[Tensor | None] = []
        for row, count in enumerate(cache.new_tokens):
            own = input_ids[row, input_ids.shape[1] - count :].to(self.device)
            only = nullcontext() if self._punica is None else self._punica.only_row(row)
            with only:
                found = self._run_row(own, cache, row, columns > 1) if count else None
            logits.append(None if found is None else found[:, -min(count, columns) :])
        known = next(one for one in logits if one is not None)
        # A row whose tokens come with a later chunk has no result yet, and none is read.
        rows = [known[:, :0] if one is None else one for one in logits]
        return torch.cat([pad(one, (0, 0, columns - one.shape[1], 0)) for one in rows])

    def _run_row(
        self, tokens: Tensor, cache: StateCache | SingleRows, row: int, keeps_all: bool
    ) -> Tensor:
        """Return at least the last one of a row's logits, [1, tokens, vocabulary]."""
        end, prompt = cache.positions[row], cache.prompt_lengths[row]
        lengths = self.row_lengths.of([[prompt]], max(end, prompt), self.device)
        if isinstance(cache, SingleRows):
            with lengths:
                return cache.forward(self.model, row, tokens)
        positions = torch.arange(end - len(tokens), end, device=self.device)
        mask = torch.ones(1, cache.lengths[row], dtype=torch.int64, device=self.device)
        own = cache.single(row)
        arguments = self._arguments(mask, positions[None], own, keeps_all=keeps_all)
        with lengths:
            logits: Tensor = self.model(tokens[None], **arguments).logits
        return logits

    def _make_reader(
        self, processor: Processor | ImagesRefused
    ) -> tuple[ImagePromptReader | None, str]:
        """Return a reader of prompts with images, or None and why they can't be batched."""
        if isinstance(processor, ImagesRefused):
            return None, str(processor)
        try:
            reader = ImagePromptReader(processor, self, self.accepts)
            probe_images(self.forward, self.new_cache, reader)
        except ImagesRefused as refusal:
            return None, str(refusal)
        return reader, ""


def _accepted(model: PreTrainedModel) -> frozenset[str]:
    """Return the arguments of a model's forward, and those that it passes on to its decoder."""
    own = inspect.signature(model.forward).parameters
    if not any(one.kind is inspect.Parameter.VAR_KEYWORD for one in own.values()):
        return frozenset(own)
    inner = inspect.signature(model.base_model.forward).parameters
    return frozenset(own) | ({"position_ids"} & set(inner))


def _eos_ids(model: PreTrainedModel, tokenizer: Tokenizer) -> frozenset[int]:
    generation = getattr(model, "generation_config", None)
    for owner in (generation, model.config, tokenizer):
        ids = getattr(owner, "eos_token_id", None)
        if ids is not None:
            return frozenset(ids if isinstance(ids, list) else [ids])
    return frozenset()
