"""Cases for two ranks about whole models: the same logits as one rank, with and without adapters.

Every case builds a tiny model from one seed on each rank, prepares it twice (whole, and split over
the ranks), puts the same adapters into both, and compares a prefill and a decode step.
"""

import copy
from pathlib import Path
from types import EllipsisType
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    DiffLlamaConfig,
    Gemma3TextConfig,
    GemmaConfig,
    GPT2Config,
    GPTNeoXConfig,
    LlamaConfig,
    Olmo2Config,
    Phi3Config,
    PretrainedConfig,
    PreTrainedModel,
    Qwen2Config,
    Qwen3Config,
)

from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.adapters.reader import read_adapter
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit, ModelRefused
from loradock.engine.kernels import choose_kernels
from loradock.engine.layers.tensor_parallel import ParallelHead, VocabParallelEmbedding
from loradock.engine.layout import ModuleKind, ModuleShape, columns_of_one_adapter
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.saved_weights import SavedTensor, WeightsSource
from loradock.engine.models.sharding import Sharding
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage
from tests.support.engine.engine_examples import relative_error
from tests.support.models.causal_configs import build_model
from tests.support.models.causal_fields import FIELDS
from tests.support.parallel.sharding import shard_model

VOCABULARY = 67
RANK_MAX = 8
RANKS = (4, 8, 2)
IDS = (5, 6, 7)
ROWS = ((5, 0), (6, 3), (0, 2), (7, 1), (5, 4), (0, 0))
"""An adapter id and a left padding for each row."""

TOKENS = (3, 1, 66, 40, 5, 66)
"""A prompt with tokens of both ranks."""

SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "initializer_range": 0.3,
}
CONFIGS: dict[str, tuple[type[PretrainedConfig], dict[str, Any]]] = {
    "llama": (LlamaConfig, {"tie_word_embeddings": False}),
    "llama-one-kv-head": (LlamaConfig, {"num_key_value_heads": 1, "attention_bias": True}),
    "llama-tied": (LlamaConfig, {"tie_word_embeddings": True}),
    "qwen2": (Qwen2Config, {}),
    "qwen3": (Qwen3Config, {}),
    "gemma": (GemmaConfig, {"num_key_value_heads": 1}),
    "gemma3": (Gemma3TextConfig, {"sliding_window": 4}),
    "olmo2": (Olmo2Config, {}),
    "phi3": (Phi3Config, {}),
    "gpt-neox": (GPTNeoXConfig, {}),
    "gpt2": (GPT2Config, {}),
    "diffllama": (DiffLlamaConfig, {}),
    "llama-three-heads": (
        LlamaConfig,
        {"num_attention_heads": 3, "num_key_value_heads": 3, "hidden_size": 24},
    ),
    "llama-odd-mlp": (LlamaConfig, {"intermediate_size": 49}),
}


def build(name: str) -> PreTrainedModel:
    """Return a tiny model of `CONFIGS`, or of one of the causal types with fields of their own."""
    if name in FIELDS:
        return build_model(name)
    kind, changes = CONFIGS[name]
    sizes = SIZES | changes
    if kind is GPTNeoXConfig:
        del sizes["head_dim"]
    torch.manual_seed(11)
    return AutoModelForCausalLM.from_config(kind(**sizes)).eval()


def adapter(slot: int, shapes: tuple[ModuleShape, ...]) -> LoRAModel:
    """Return random whole tensors for four modules of five; the adapter lacks the others."""
    torch.manual_seed(200 + slot)
    rank, loras = RANKS[slot], {}
    for shape in sorted(shapes, key=lambda shape: shape.name):
        stack = (shape.experts,) if shape.kind is ModuleKind.EXPERTS else ()
        a = torch.randn(*stack, rank, shape.in_features) / shape.in_features**0.5
        b = torch.randn(*stack, shape.out_features, rank) / rank**0.5
        if (sum(shape.name.encode()) + slot) % 5:
            weights = LoRALayerWeights(shape.name, rank, 0.5 * rank, a, b, kind=shape.kind)
            loras[shape.name] = weights
    return LoRAModel(slot + 1, rank, loras)


class ShardedBench:
    """A prepared model with an adapter in every slot."""

    def __init__(self, model: PreTrainedModel, fully_sharded: bool) -> None:
        config = LoRAConfig(
            max_lora_rank=RANK_MAX, max_loras=len(RANKS), fully_sharded_loras=fully_sharded
        )
        self.model = CausalModel(model, config)
        shapes = self.model.shapes
        arena = Arena(len(RANKS), shapes, 4 << 20, torch.float32, "cpu")
        self.punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, choose_kernels("cpu"))
        self.model.bind(arena, self.punica)
        by_name = {shape.name: shape for shape in shapes}
        for slot in range(len(RANKS)):
            blob = stage(
                adapter(slot, columns_of_one_adapter(shapes)).sharded(by_name),
                shapes,
                torch.float32,
            )
            arena.begin_write(slot, 1, blob)
            arena.finish_write(slot)

    def logits(self) -> Tensor:
        """Return logits after a prefill and a decode step, every slot and the base in one batch."""
        torch.manual_seed(5)
        width = 6
        tokens = torch.randint(3, VOCABULARY, (len(ROWS), width + 1))
        ids = torch.tensor([row[0] for row in ROWS])
        mask = torch.arange(width) >= torch.tensor([row[1] for row in ROWS])[:, None]
        cache = self.model.new_cache([width - row[1] for row in ROWS])
        prefill = LoRAMapping((mask * ids[:, None]).flatten(), ids, is_prefill=True)
        self.punica.update_metadata(prefill, IDS)
        first = self.model.forward(tokens[:, :width], cache)
        cache.grow(1)
        self.punica.update_metadata(LoRAMapping(ids, ids), IDS)
        return torch.stack([first, self.model.forward(tokens[:, width:], cache)])


def same_logits(group: ParallelGroup, name: str, fully_sharded: bool) -> dict[str, Any]:
    """Return the distance of the split model's logits from the whole's, and facts of the split."""
    whole = build(name)
    split = copy.deepcopy(whole)
    shard_model(split, group, torch.device("cpu"))
    bench = ShardedBench(split, fully_sharded)
    expected, found = ShardedBench(whole, False).logits(), bench.logits()
    shapes = columns_of_one_adapter(bench.model.shapes)
    kept = sum(torch.tensor(shape.b_shape(2)).prod() for shape in shapes)
    every = sum(shape.out_features * 2 for shape in shapes)
    return {
        "error": relative_error(found, expected),
        "layers": len(bench.model.layers),
        "kinds": sorted({type(layer).__name__ for layer in bench.model.layers.values()}),
        "kept": float(kept / every),
        "tied": _is_tied(split),
        "weights": sum(parameter.numel() for parameter in split.parameters()),
    }


def with_adapter(group: ParallelGroup, name: str, directory: str) -> str | list[float]:
    """Return the split model's logits with the adapter in a directory, or why it is refused."""
    split = build(name)
    shard_model(split, group, torch.device("cpu"))
    config = LoRAConfig(max_lora_rank=RANK_MAX, max_loras=1)
    model = CausalModel(split, config)
    target = model.adapter_target(config.resolved_for(model))
    try:
        path, is_follower = Path(directory), not group.is_leader
        loaded = read_adapter(path.name, [path.parent], target, is_follower=is_follower)
        problem = ""
    except AdapterDoesNotFit as error:
        problem = str(error)
    # As the engine does: what fails on one rank fails on all.
    if not group.all_true(not problem):
        return problem
    arena = Arena(1, model.shapes, 4 << 20, torch.float32, "cpu")
    punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, choose_kernels("cpu"))
    model.bind(arena, punica)
    arena.begin_write(0, 1, stage(loaded.model, model.shapes, torch.float32))
    arena.finish_write(0)
    punica.update_metadata(LoRAMapping([5] * len(TOKENS), [5], is_prefill=True), [5])
    with torch.inference_mode():
        logits = split(input_ids=torch.tensor([TOKENS]), use_cache=False).logits
    return logits.flatten().tolist()


def read_in_parts(group: ParallelGroup, directory: str, by_expert: bool = False) -> dict[str, Any]:
    """Return what a rank read of a saved model, what it holds, and the split model's logits."""

    def split(model: PreTrainedModel) -> Sharding:
        sharding = Sharding(model, group, by_expert)
        sharding.apply()
        return sharding

    config = AutoConfig.from_pretrained(directory)
    source = WeightsSource(Path(directory), AutoModelForCausalLM, config)
    sizes, read = list[int](), SavedTensor.__getitem__

    def counted(tensor: SavedTensor, index: EllipsisType) -> Tensor:
        found = read(tensor, index)
        sizes.append(0 if tensor.shard.is_zero else found.nbytes)
        return found

    with mock.patch.object(SavedTensor, "__getitem__", counted):
        sharding, missing = source.read_parts(split)
    model = sharding.model
    embedding, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    start = head.data_ptr() - embedding.data_ptr()
    shared = head.nbytes if 0 <= start < embedding.nbytes and head is not embedding else 0
    saved = model.state_dict()
    buffers = [buffer for name, buffer in model.named_buffers() if name in saved]
    sharding.check(torch.device("cpu"))
    with torch.inference_mode():
        logits = model(input_ids=torch.arange(3, 9)[None], use_cache=False).logits
    return {
        "read": sum(sizes),
        "held": sum(tensor.nbytes for tensor in (*model.parameters(), *buffers)) - shared,
        "missing": sorted(missing),
        "kind": type(model).__qualname__,
        "logits": logits.flatten().tolist(),
    }


def _is_tied(model: PreTrainedModel) -> bool:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    embedding = getattr(embedding, "base_layer", embedding)
    head = getattr(head, "base_layer", head)
    assert isinstance(head, ParallelHead)
    if isinstance(embedding, VocabParallelEmbedding):
        return head.weight is embedding.weight
    start = head.tokens.start * embedding.embedding_dim * head.weight.itemsize
    return head.weight.data_ptr() == embedding.weight.data_ptr() + start


def refusal(group: ParallelGroup, name: str) -> str:
    try:
        shard_model(build(name), group, torch.device("cpu"))
    except ModelRefused as error:
        return str(error)
    return "not refused"


def wrong_plan(group: ParallelGroup) -> str:
    """Split a model whose plan runs and changes its outputs."""
    model = build("llama")
    for layer in model.model.layers:
        # It mixes the outputs that the plan splits, which no plan can express.
        layer.mlp.act_fn = Mixed()
    try:
        shard_model(model, group, torch.device("cpu"))
    except ModelRefused as error:
        return str(error)
    return "not refused"


class Mixed(torch.nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean(-1, keepdim=True)
