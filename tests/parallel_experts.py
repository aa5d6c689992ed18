"""What two ranks are asked about mixtures of experts: do they together compute what one would?

Every case builds the whole on each rank from one seed, shares it by columns or by experts, and
compares; adapters of whole models come from files, of which each rank reads its part.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from engine.adapters import read_adapter
from engine.arena import Arena
from engine.config import LoRAConfig
from engine.errors import ModelRefused
from engine.kernels import choose_kernels
from engine.kv_cache import RowCache
from engine.layers import MIXED_WRAPPERS, WRAPPERS, wrapper_of
from engine.layers.experts import ExpertsWithLoRA
from engine.layers.parallel_experts import ParallelExperts
from engine.model import PreparedModel
from engine.parallel import ParallelGroup
from engine.punica import LoRAMapping, PunicaWrapper
from engine.sharding import shard_model
from engine.staging import stage
from tests.engine_examples import relative_error
from tests.expert_adapters import make_model
from tests.expert_examples import EXPERTS, HIDDEN, TOP_K, make_experts
from tests.ranks import serve

RANKS = (3, 8)
IDS = (11, 12)
SLOT_OF_ROW = (1, -1, 0, 0, 1, -1, 1, 0)


def wrapped(layer: torch.nn.Module, is_mixed: bool) -> ExpertsWithLoRA:
    wrapper = wrapper_of(layer, table=MIXED_WRAPPERS if is_mixed else WRAPPERS)
    assert wrapper is not None
    assert issubclass(wrapper, ExpertsWithLoRA)
    return wrapper(layer)


@torch.inference_mode()
def answer(layer: ExpertsWithLoRA, whole: ExpertsWithLoRA) -> tuple[Tensor, Tensor]:
    """What the layer says with adapters in every slot, and without; they are made for `whole`."""
    shapes = layer.module_shapes("experts", 0)
    arena = Arena(len(RANKS), shapes, 1 << 20, torch.float32, "cpu")
    punica = PunicaWrapper(torch.device("cpu"), max(RANKS), choose_kernels("cpu"))
    layer.create_lora_weights(arena, [shape.index for shape in shapes])
    layer.set_mapping(punica)
    torch.manual_seed(7)
    for slot, rank in enumerate(RANKS):
        every = whole.module_shapes("experts", 0)
        all_a = [torch.randn(shape.a_shape(rank)) / shape.in_features**0.5 for shape in every]
        all_b = [torch.randn(shape.b_shape(rank)) / rank**0.5 for shape in every]
        layer.set_lora(slot, all_a, all_b)
    x, weights = torch.randn(len(SLOT_OF_ROW), HIDDEN), torch.rand(len(SLOT_OF_ROW), TOP_K)
    # The last two rows go to the second rank's experts alone.
    index = [[row % EXPERTS, (row + 1) % EXPERTS] for row in range(len(x) - 2)] + [[2, 3], [3, 2]]
    plain = layer(x, torch.tensor(index), weights)
    ids = torch.tensor([0 if slot < 0 else IDS[slot] for slot in SLOT_OF_ROW])
    punica.update_metadata(LoRAMapping(ids, ids), IDS)
    return layer(x, torch.tensor(index), weights), plain


def layer(group: ParallelGroup, family: str, by_expert: bool, is_mixed: bool) -> dict[str, Any]:
    torch.manual_seed(3)
    module = make_experts(family)
    whole = wrapped(copy.deepcopy(module), is_mixed)
    split = wrapped(ParallelExperts(module, group, by_expert), is_mixed)
    found, expected = answer(split, whole), answer(whole, whole)
    shapes = split.module_shapes("experts", 0)
    return {
        "errors": [relative_error(*both) for both in zip(found, expected, strict=True)],
        "kept": sum(torch.tensor(shape.b_shape(2)).prod().item() for shape in shapes),
        "every": sum(shape.experts * shape.out_features * 2 for shape in shapes),
        "left": sum(parameter.numel() for parameter in module.parameters()),
    }


def model(
    group: ParallelGroup, family: str, by_expert: bool, is_mixed: bool, root: str
) -> dict[str, Any]:
    """Logits of the split model with adapters that each rank read for itself, and of the whole."""
    config = LoRAConfig(max_lora_rank=16, max_loras=4, enable_mixed_moe_lora_format=is_mixed)
    split = make_model(family)
    shard_model(split, group, torch.device("cpu"), by_expert)
    found = logits(PreparedModel(split, config), Path(root), config, not group.leads)
    expected = logits(PreparedModel(make_model(family), config), Path(root), config, False)
    return {"error": relative_error(found, expected)}


def logits(model: PreparedModel, root: Path, config: LoRAConfig, is_follower: bool) -> Tensor:
    config = config.verify_with_model_config(model.model.config)
    shapes = {shape.name: shape for shape in model.shapes}
    names = sorted(path.name for path in root.iterdir())
    arena = Arena(len(names), model.shapes, 4 << 20, torch.float32, "cpu")
    punica = PunicaWrapper(torch.device("cpu"), 16, choose_kernels("cpu"))
    model.bind(arena, punica)
    for slot, name in enumerate(names):
        loaded = read_adapter(name, [root], shapes, config, is_follower=is_follower)
        arena.begin_write(slot, 1, stage(loaded.model, model.shapes, torch.float32, False))
        arena.finish_write(slot)
    ids = list(range(1, len(names) + 1))
    rows = torch.tensor([0, *ids])
    mapping = LoRAMapping(rows.repeat_interleave(5), rows, is_prefill=True)
    punica.update_metadata(mapping, ids)
    tokens = torch.arange(5).repeat(len(rows), 1) * 11 % 64
    return model.forward(tokens, RowCache([5] * len(rows)))


def refusals(group: ParallelGroup) -> list[str]:
    """Experts that can't be shared evenly, either way."""
    said = []
    for name, by_expert in (("num_local_experts", True), ("intermediate_size", False)):
        try:
            ParallelExperts(make_experts("mixtral", **{name: 3}), group, by_expert)
        except ValueError as error:
            said.append(str(error))
    try:
        odd = make_model("mixtral", num_local_experts=3)
        shard_model(odd, group, torch.device("cpu"), by_expert=True)
    except ModelRefused as error:
        said.append(str(error))
    return said


CASES = {case.__name__: case for case in (layer, model, refusals)}

if __name__ == "__main__":
    serve(CASES)
