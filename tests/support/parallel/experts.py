"""Cases for two ranks about mixtures of experts: together they compute what one rank would.

Every case builds the whole on each rank from one seed, shares it by columns or by experts, and
compares. Adapters of whole models come from files, of which each rank reads its part.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from loradock.engine.adapters import read_adapter
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import EngineError, ModelRefused
from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import wrapper_of, wrappers_for
from loradock.engine.layers.expert_layout import ParallelExperts
from loradock.engine.layers.experts import ExpertsWithLoRA, FusedMoE3DWithShardedLoRA
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.parallel import ParallelGroup
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage
from tests.support.engine.dummies import MODELS, run_dummy
from tests.support.engine.engine_examples import relative_error
from tests.support.models.expert_adapters import make_model
from tests.support.models.expert_examples import (
    HIDDEN,
    TOP_K,
    make_experts,
    projections_of,
)
from tests.support.parallel.sharding import shard_model

SHARDED = "fully-sharded"
SCHEMES = ("tensor", "expert", SHARDED)
"""Experts shared by columns or whole, and shared by columns with fully sharded adapters."""

PROMPT = tuple(token * 11 % 64 for token in range(5))
RANK_MAX = 8
SLICES_OF_SLOT = (slice(None), slice(None), slice(1), slice(-1, None))
"""The slices of each slot's adapter: all, all, only the first, only the last."""
EMPTY = len(SLICES_OF_SLOT)
"""A slot whose adapter contains nothing for these experts."""

IDS = (11, 12, 13, 14, 15)
SLOT_OF_ROW = (1, -1, 0, 3, 2, 0, 1, -1, 1, EMPTY, 0)


def wrapped(layer: torch.nn.Module, is_mixed: bool, scheme: str) -> ExpertsWithLoRA:
    wrapper = wrapper_of(layer, table=wrappers_for(is_mixed, scheme == SHARDED))
    assert wrapper is not None
    assert issubclass(wrapper, ExpertsWithLoRA)
    return wrapper(layer)


class AdaptedExperts:
    """A layer with adapters in its slots, drawn for the layer of a single rank."""

    def __init__(self, layer: ExpertsWithLoRA, whole: ExpertsWithLoRA, scheme: str) -> None:
        self.layer, self.kernel_calls = layer, 0
        shapes = layer.module_shapes("experts", 0)
        arena = Arena(len(IDS), shapes, 1 << 20, torch.float32, "cpu")
        arena.data.fill_(torch.nan)
        kernels = choose_kernels("cpu")
        recorded = {
            name: self._counted(getattr(kernels, name))
            for name in ("experts", "experts_shrink", "experts_expand")
        }
        self.punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, kernels._replace(**recorded))
        layer.create_lora_weights(arena, [shape.index for shape in shapes])
        layer.set_mapping(self.punica)
        torch.manual_seed(7)
        ranks = (6, 8, 2, 4) if scheme == SHARDED else (3, 8, 1, 4)
        for slot, (rank, side) in enumerate(zip(ranks, SLICES_OF_SLOT, strict=True)):
            by_name = {s.name.rpartition(".")[2]: s for s in whole.module_shapes("experts", 0)}
            # The second slot's adapter has an A and a B for each projection, also among fused ones.
            names = projections_of(by_name, is_fused=slot != 1)
            kept = sorted(names, key=lambda name: name == "down_proj")[side]
            wholes = [by_name[name] for name in names]
            all_a = [torch.randn(shape.a_shape(rank)) / shape.in_features**0.5 for shape in wholes]
            all_b = [torch.randn(shape.b_shape(rank)) / rank**0.5 for shape in wholes]
            parts = (
                [x if name in kept else None for name, x in zip(names, y, strict=True)]
                for y in (all_a, all_b)
            )
            layer.set_lora(slot, *parts)

    def _counted(self, operation: Any) -> Any:
        def run(*arguments: Any) -> None:
            self.kernel_calls += 1
            operation(*arguments)

        return run

    @torch.inference_mode()
    def output(self, slots: tuple[int, ...], index: list[list[int]]) -> Tensor:
        torch.manual_seed(len(slots))
        x, weights = torch.randn(len(slots), HIDDEN), torch.rand(len(slots), TOP_K)
        ids = torch.tensor([0 if slot < 0 else IDS[slot] for slot in slots])
        self.punica.update_metadata(LoRAMapping(ids, ids), IDS)
        return self.layer(x, torch.tensor(index), weights)

    def outputs(self) -> list[Tensor]:
        """Return outputs of every slot and the base, with all or two of the experts chosen."""
        every = self.layer.whole.up_experts
        spread = [[row % every, (row + 1) % every] for row in range(len(SLOT_OF_ROW))]
        routings = [spread, *([pair] * len(SLOT_OF_ROW) for pair in ([0, 1], [3, 2]))]
        plain = self.output((-1, EMPTY, -1), [[0, 3], [1, 2], [2, 3]])
        return [plain, *(self.output(SLOT_OF_ROW, index) for index in routings)]


def layer(group: ParallelGroup, family: str, scheme: str, is_mixed: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    module = make_experts(family)
    whole = wrapped(copy.deepcopy(module), is_mixed, "tensor")
    split = wrapped(ParallelExperts(module, group, scheme == "expert"), is_mixed, scheme)
    found = AdaptedExperts(split, whole, scheme).outputs()
    expected = AdaptedExperts(whole, whole, scheme).outputs()
    shapes, every = (one.module_shapes("experts", 0) for one in (split, whole))
    return {
        "errors": [relative_error(*both) for both in zip(found, expected, strict=True)],
        "kept": [sum(_sizes(shape)) for shape in shapes],
        "every": [sum(_sizes(shape)) for shape in every],
        "left": sum(parameter.numel() for parameter in module.parameters()),
    }


def _sizes(shape: Any) -> list[int]:
    return [torch.Size(matrix).numel() for matrix in (shape.a_shape(2), shape.b_shape(2))]


class RecordingGroup(ParallelGroup):
    """A group that records its collectives."""

    def __init__(self, group: ParallelGroup) -> None:
        super().__init__(group.rank, group.world_size, group.device_group, group.host_group)
        object.__setattr__(self, "calls", [])

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append(["sum", str(x.dtype), *x.shape])
        return super().all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls.append(["gather", str(x.dtype), *x.shape])
        return super().all_gather(x)


@torch.inference_mode()
def collectives(group: ParallelGroup, family: str, is_mixed: bool) -> dict[str, Any]:
    """Return the group's collectives and the number of kernel calls, by kind of batch."""
    torch.manual_seed(3)
    module, recorded = make_experts(family), RecordingGroup(group)
    whole = wrapped(copy.deepcopy(module), is_mixed, "tensor")
    split = wrapped(ParallelExperts(module, recorded, False), is_mixed, SHARDED)
    adapted, calls_by_batch = AdaptedExperts(split, whole, SHARDED), {}
    batches = {"base": (-1, -1), "nothing here": (EMPTY, -1), "up": (2, -1), "down": (3, EMPTY)}
    for name, slots in batches.items():
        recorded.calls.clear()
        adapted.kernel_calls = 0
        adapted.output(slots, [[0, 1], [2, 3]])
        calls_by_batch[name] = [adapted.kernel_calls, list(recorded.calls)]
    return calls_by_batch


def model(
    group: ParallelGroup, family: str, scheme: str, is_mixed: bool, root: str
) -> dict[str, Any]:
    """Compare logits of the split model with those of the whole model and of PEFT.

    Each rank reads its part of the adapters for itself.
    """
    adapters = Path(root) / "adapters"
    config = LoRAConfig(max_lora_rank=16, max_loras=4, enable_mixed_moe_lora_format=is_mixed)
    sharded = LoRAConfig(
        max_lora_rank=16,
        max_loras=4,
        enable_mixed_moe_lora_format=is_mixed,
        fully_sharded_loras=scheme == SHARDED,
    )
    split = make_model(family)
    shard_model(split, group, torch.device("cpu"), scheme == "expert")
    prepared = CausalModel(split, sharded)
    found = logits(prepared, adapters, sharded, not group.is_leader)
    expected = logits(CausalModel(make_model(family), config), adapters, config, False)
    reference = load_file(Path(root) / "reference.safetensors")["logits"]
    errors = [relative_error(*both) for both in zip(found[0], reference, strict=True)]
    kinds = sorted({type(layer).__name__ for layer in prepared.layers.values()})
    return {"error": relative_error(found, expected), "errors": errors, "kinds": kinds}


def logits(model: CausalModel, root: Path, config: LoRAConfig, is_follower: bool) -> Tensor:
    """Return logits after a prefill and a decode step, the base and every adapter in one batch."""
    config = config.resolved_for(model.model.config)
    names = sorted(path.name for path in root.iterdir())
    arena = Arena(len(names), model.shapes, 4 << 20, torch.float32, "cpu")
    punica = PunicaWrapper(torch.device("cpu"), 16, choose_kernels("cpu"))
    model.bind(arena, punica)
    for slot, name in enumerate(names):
        loaded = read_adapter(name, [root], model.adapter_target(config), is_follower=is_follower)
        arena.begin_write(slot, 1, stage(loaded.model, model.shapes, torch.float32))
        arena.finish_write(slot)
    ids = list(range(1, len(names) + 1))
    rows = torch.tensor([0, *ids])
    cache, tokens = (
        BatchKVCache([len(PROMPT)] * len(rows)),
        torch.tensor(PROMPT).repeat(len(rows), 1),
    )
    mapping = LoRAMapping(rows.repeat_interleave(len(PROMPT)), rows, is_prefill=True)
    punica.update_metadata(mapping, ids)
    first = model.forward(tokens, cache)
    cache.grow(1)
    punica.update_metadata(LoRAMapping(rows, rows), ids)
    return torch.stack([first, model.forward(rows[:, None] + 3, cache)])


def uneven(group: ParallelGroup, root: str) -> list[str]:
    """Return the errors of adapters whose rank two ranks can't share."""
    errors = []
    for is_mixed in (False, True):
        config = LoRAConfig(
            max_lora_rank=16, enable_mixed_moe_lora_format=is_mixed, fully_sharded_loras=True
        )
        split = make_model("qwen3_moe")
        shard_model(split, group, torch.device("cpu"))
        prepared = CausalModel(split, config)
        dtyped = config.resolved_for(split.config)
        for name in ("fused", "per_expert")[: 1 + is_mixed]:
            try:
                read_adapter(name, [Path(root)], prepared.adapter_target(dtyped))
            except EngineError as error:
                errors.append(str(error))
    module = ParallelExperts(make_experts("mixtral"), group, by_expert=True)
    try:
        FusedMoE3DWithShardedLoRA(module)
    except ValueError as error:
        errors.append(str(error))
    return errors


def dummy(group: ParallelGroup, kind: str, scheme: str, is_mixed: bool) -> dict[str, Any]:
    """Run a manager on every rank with a dummy adapter of a rank that all can share."""
    split = MODELS[kind]()
    shard_model(split, group, torch.device("cpu"), scheme == "expert")
    config = LoRAConfig(
        max_lora_rank=RANK_MAX,
        enable_mixed_moe_lora_format=is_mixed,
        fully_sharded_loras=scheme == SHARDED,
    )
    return run_dummy(split, config, RANK_MAX - 1)


def refusals(group: ParallelGroup) -> list[str]:
    """Return the errors of experts that can't be shared evenly, whole or by columns."""
    errors = []
    for name, by_expert in (("num_local_experts", True), ("intermediate_size", False)):
        try:
            ParallelExperts(make_experts("mixtral", **{name: 3}), group, by_expert)
        except ValueError as error:
            errors.append(str(error))
    try:
        odd = make_model("mixtral", num_local_experts=3)
        shard_model(odd, group, torch.device("cpu"), by_expert=True)
    except ModelRefused as error:
        errors.append(str(error))
    return errors
