"""The base class of served models: the wrapped layers by name, the tokenizer and the limits.

The layers' order is the directory's, so that an adapter that was packed for a model fits every
process that prepared the model from the same configuration.
"""

import warnings
from collections.abc import Mapping, Sequence
from itertools import islice
from types import MappingProxyType
from typing import Any, Final, NamedTuple, Self

import torch
from torch import Tensor, nn

from loradock.engine.adapters.saved_tokenizer import BaseTokenizer, Vocabulary
from loradock.engine.adapters.target import (
    AdapterTarget,
    BaseParameter,
    BaseWeights,
    Equivalence,
    equivalences_of,
)
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.kernels.packed_linear import PackedWeight
from loradock.engine.layers import (
    BaseLayerWithLoRA,
    VocabParallelEmbeddingWithLoRA,
    wrappers_for,
)
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.layers.packed import PackedSlice
from loradock.engine.layers.saved import ReplaceableNorm
from loradock.engine.layers.tensor_parallel import (
    ParallelLinear,
    VocabParallelEmbedding,
    missing_layers,
)
from loradock.engine.layout import ModuleShape
from loradock.engine.models.image_part import (
    NO_PUNICAS,
    ImageMapper,
    ImagePart,
    ImagePunicas,
    find_image_part,
)
from loradock.engine.models.library.names import AutoTokenizer, PreTrainedModel
from loradock.engine.models.positions import longest_context
from loradock.engine.models.preparation import WrapScope, module_shapes, prepare_layers
from loradock.engine.models.probing import ProbeSpec
from loradock.engine.models.saved_settings import Task
from loradock.engine.models.saved_weights import LOCAL
from loradock.engine.models.sharding import experts_of
from loradock.engine.parallel import SINGLE, WHOLE_PARAMETER, ParallelGroup
from loradock.engine.punica.mapping import MappingType
from loradock.engine.punica.wrapper import PunicaWrapper
from loradock.engine.residency.arena import Arena


class BasePaths(NamedTuple):
    """The paths of modules and parameters; those that are shared have several.

    `token_embedding`: its path, empty if the model has none. `tied`: the modules that share its
    weight, itself included; none if no other does.
    """

    modules: frozenset[str]
    parameters: frozenset[str]
    token_embedding: str
    tied: frozenset[str]

    @classmethod
    def of(cls, model: nn.Module) -> Self:
        """Return the paths of a model whose layers are not wrapped."""
        modules = dict(model.named_modules(remove_duplicate=False))
        parameters = dict(model.named_parameters(remove_duplicate=False))
        embedding = _token_embedding(model)
        weight = getattr(embedding, "weight", None)
        paths = [path for path, module in modules.items() if module is embedding]
        tied = {
            path
            for path, module in modules.items()
            if isinstance(weight, Tensor) and _shares(getattr(module, "weight", None), weight)
        }
        is_tied = len(tied) > len(paths)
        return cls(
            frozenset(modules),
            frozenset(parameters),
            paths[0] if paths else "",
            frozenset(tied) if is_tied else frozenset(),
        )

    def has_parameter(self, name: str) -> bool:
        """Return whether a parameter's path is, or ends in, a name."""
        return any(path == name or path.endswith(f".{name}") for path in self.parameters)

    def has_module(self, name: str) -> bool:
        """Return whether a module's path ends in a name, as PEFT compares the names of saved
        modules.
        """
        return any(path.endswith(name) for path in self.modules)


def _token_embedding(model: nn.Module) -> nn.Module | None:
    find = getattr(model, "get_input_embeddings", None)
    return find() if callable(find) else None


def _shares(weight: object, other: Tensor) -> bool:
    """Return whether a weight is another one, or rows of it, as a rank's part of a tied head is."""
    if weight is other or not isinstance(weight, Tensor):
        return weight is other
    # Quantised and other special tensors have no storage.
    have_storage = all(type(one.data) is Tensor and not one.is_meta for one in (weight, other))
    return (
        have_storage
        and weight.shape[1:] == other.shape[1:]
        and weight.untyped_storage().data_ptr() == other.untyped_storage().data_ptr() != 0
    )


def held_weight(module: nn.Module, field: str) -> BaseParameter | None:
    """Return the part of a parameter that a layer, wrapped or not, has in this process.

    None for a quantised layer, and for a part that is not a range of rows.
    """
    layer: Any = module.base_layer if isinstance(module, BaseLayerWithLoRA) else module
    values = getattr(layer, field, None)
    if not isinstance(values, Tensor) or type(values.data) not in (Tensor, PackedWeight):
        return None
    if not values.is_floating_point():
        return None
    if isinstance(layer, ParallelLinear | VocabParallelEmbedding):
        return _held_by_rank(layer, field, values)
    is_part = isinstance(layer, PackedSlice) and not layer.is_whole
    return None if is_part else BaseParameter(values, tuple(values.shape))


def _held_by_rank(
    layer: ParallelLinear | VocabParallelEmbedding, field: str, values: Tensor
) -> BaseParameter | None:
    shard = layer.shards.get(field, WHOLE_PARAMETER)
    if shard.dimension or shard.ranges is None or len(shard.ranges) != 1:
        return None
    whole = layer.num_embeddings if isinstance(layer, nn.Embedding) else _whole_rows(layer)
    return BaseParameter(values, (whole, *values.shape[1:]), shard.ranges[0].start)


def _whole_rows(layer: Any) -> int:
    """Return the outputs of a linear layer on all ranks together."""
    return int(getattr(layer, "whole_out_features", layer.out_features))


_MEDIA_TOKENS: Final = ("image_token_id", "video_token_id", "audio_token_id")

Tokenizer = Any
"""A `transformers` tokenizer; the library has no types for it."""


class ServedModel:
    """Base class of servable models; a subclass calls `_prepare` at the end of its constructor.

    `layers`: name -> wrapper, in the directory's order; `parts`: the part of the model that each of
    them belongs to; `image_layers`: the paths of those that read images, wrapped or not. `dtype`:
    the model's; `equivalences`: see `equivalences_of`. `norms`: norms that adapters can replace.
    `image_part`: the modules that read images, None if requests contain none. `image_mapper`: sets
    the adapters of images. `shapes`: one `ModuleShape` per slice, by index. `vocab_size`: the rows
    of the token embedding. `max_model_len`: the tokens of one row. `tokenizer` None: prompts
    are token ids. `media_tokens`: tokens that stand for an image, a video or a sound, which text
    alone can't contain. `no_images_reason`: why prompts can't contain images; empty if they can.
    `group`: the ranks that the model is split over. `without_head`: the model classifies, and was
    saved without the head for that. `unwrapped`:
    why some layers are not wrapped, by path. `refusals`: why faster ways to run its rows were
    refused. `fused`: the names of its norms and rotations that run as one kernel. Raises
    `ModelRefused` for a model that is not served.
    """

    task: Task
    no_images_reason: str = "a model that embeds or classifies accepts text alone"
    group: ParallelGroup = SINGLE
    without_head: bool = False
    unwrapped: Mapping[str, str] = MappingProxyType({})
    image_part: ImagePart | None
    dtype: torch.dtype
    equivalences: tuple[Equivalence, ...]
    layers: Mapping[str, BaseLayerWithLoRA]
    parts: Mapping[str, MappingType]
    image_layers: frozenset[str]
    norms: Mapping[str, ReplaceableNorm]
    shapes: tuple[ModuleShape, ...]
    refusals: tuple[str, ...]
    fused: tuple[str, ...] = ()

    def __init__(self, model: PreTrainedModel, tokenizer: Tokenizer, max_model_len: int) -> None:
        """`max_model_len` 0 selects the model's own."""
        self.model = model.eval().requires_grad_(False)
        # Before layers are wrapped, which changes paths.
        self._paths = BasePaths.of(model)
        self.tokenizer = tokenizer
        self.device: torch.device = model.device
        self.dtype = model.dtype
        self.equivalences = equivalences_of(model)
        self.image_mapper = ImageMapper(None)
        self.vocab_size = _vocab_size(model)
        self.max_model_len = longest_context(model.config, max_model_len)
        tokens = (getattr(model.config, name, None) for name in _MEDIA_TOKENS)
        self.media_tokens = frozenset(token for token in tokens if token is not None)

    def _prepare(self, specs: Sequence[ProbeSpec], lora_config: LoRAConfig) -> int:
        """Wrap the model's layers in place; return the index of the probe that was chosen."""
        self.image_part = find_image_part(self.model) if self.task == "generate" else None
        self._warn_about_unused(lora_config)
        scope = WrapScope(
            lora_config.target_modules,
            wrappers_for(lora_config.enable_mixed_moe_lora_format, lora_config.fully_sharded_loras),
            self.image_part,
            lora_config.enable_tower_connector_lora,
        )
        prepared = prepare_layers(self.model, specs, self.vocab_size, scope)
        self.layers, self.parts, self.image_layers, self.norms, chosen, self.refusals = prepared
        tokens = self.model.get_input_embeddings()
        for name, layer in self.layers.items():
            is_text = self.parts[name] is MappingType.LANGUAGE
            if isinstance(layer, VocabParallelEmbeddingWithLoRA) and is_text:
                layer.is_shared_by_rows = layer is not tokens
        self.shapes = module_shapes(self.layers, self.norms)
        return chosen

    @property
    def has_experts(self) -> bool:
        """True if adapters can have weights inside experts."""
        return any(isinstance(layer, ExpertsWithLoRA) for layer in self.layers.values())

    def _warn_about_unused(self, lora_config: LoRAConfig) -> None:
        """Warn about settings for parts that this model lacks; they are ignored."""
        unused = []
        if lora_config.enable_tower_connector_lora and self.image_part is None:
            unused.append("enable_tower_connector_lora is set, and this model reads no images")
        if lora_config.enable_mixed_moe_lora_format and not experts_of(self.model):
            unused.append("enable_mixed_moe_lora_format is set, and this model has no experts")
        for text in unused:
            warnings.warn(f"{text}; it is ignored", stacklevel=5)

    def adapter_target(self, lora_config: LoRAConfig) -> AdapterTarget:
        """Return what adapters are checked against; `lora_config` has its dtype resolved."""
        return AdapterTarget(
            {shape.name: shape for shape in self.shapes},
            lora_config,
            self.equivalences,
            self.image_layers,
            requires_head=self.without_head,
            missing_layers=tuple(missing_layers(self.model)),
            read_base=self._base_weights,
            has_parameter=self._paths.has_parameter,
            unwrapped=self.unwrapped,
            tokenizer=BaseTokenizer(self._vocabulary, self.vocab_size),
            token_embedding=self._paths.token_embedding,
            tied=self._paths.tied,
            base_parameter=self._base_parameter,
            has_module=self._paths.has_module,
        )

    def _vocabulary(self) -> Vocabulary | None:
        """Return the tokens of the model's tokenizer; None if the tokenizer is not known.

        A model that was loaded elsewhere has the tokenizer of its directory or cached model.
        """
        tokenizer, origin = self.tokenizer, getattr(self.model, "name_or_path", "")
        if tokenizer is None and origin:
            try:
                tokenizer = AutoTokenizer.from_pretrained(origin, **LOCAL)
            except (OSError, ValueError, KeyError, ImportError):
                return None
        vocabulary: Vocabulary | None = None if tokenizer is None else tokenizer.get_vocab()
        return vocabulary

    def _base_parameter(self, module: str, field: str) -> BaseParameter | None:
        """Return the rows of a module's parameter that this process has; None if unreadable."""
        return held_weight(self.model.get_submodule(module), field)

    def _base_weights(self, module: str) -> BaseWeights | None:
        """Return the base weights of a linear module or a norm; None if they can't be read."""
        if module in self.norms:
            parameters = dict(self.norms[module].norm.named_parameters())
            return BaseWeights(parameters["weight"], parameters.get("bias"))
        for name, layer in self.layers.items():
            parent = name[: len(name) - len(name.rpartition(".")[2])]
            for index, shape in enumerate(layer.affine_shapes):
                if module == (parent + shape.name if shape.name else name):
                    found = layer.base_weights(index)
                    return None if found is None else BaseWeights(*found)
        return None

    def bind(
        self, arena: Arena, punica: PunicaWrapper, image_punicas: ImagePunicas = NO_PUNICAS
    ) -> None:
        """Bind every wrapped layer to its columns of `arena`, and to its part's mapping.

        `image_punicas`: the wrappers of tower and connector; a layer of a part without a wrapper
        computes the base model alone.
        """
        columns = iter([shape.index for shape in self.shapes])
        by_part = {MappingType.LANGUAGE: punica, **image_punicas}
        for name, layer in self.layers.items():
            count = len(layer.module_shapes(name, 0))
            layer.create_lora_weights(arena, list(islice(columns, count)))
            if self.parts[name] in by_part:
                layer.set_mapping(by_part[self.parts[name]])
        for norm in self.norms.values():
            norm.bind(arena, next(columns), punica)
        self.image_mapper = ImageMapper(self.image_part, image_punicas)


def _vocab_size(model: PreTrainedModel) -> int:
    """Return the rows of the token embedding; raise `ModelRefused` if tokens have several."""
    tokens = model.get_input_embeddings()
    if not hasattr(tokens, "num_embeddings"):
        name = next(name for name, module in model.named_modules() if module is tokens)
        raise ModelRefused(
            f"{name} is a {type(tokens).__name__} of {len(list(tokens.children()))} embeddings, so "
            "a position has several tokens; a request's prompt has one token at each position"
        )
    return int(tokens.num_embeddings)
