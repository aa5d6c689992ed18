"""Adapters that replace modules whole (`modules_to_save`) are PEFT's, next to plain ones."""

from copy import deepcopy
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.manager_examples import PROMPT, VOCABULARY, base
from tests.support.engine.parity_bench import ParityBench, ParityRow, PeftReference, read
from tests.support.models.causal_configs import build_config, build_model
from tests.support.models.common_fields import POSITIONS
from tests.support.models.peft_adapters import save_adapter

torch.set_num_threads(1)
TEXT = (3, 14, 15, 92, 65, 35, 89, 79, 32, 38)
SAVED = {
    "head and embedding": ["lm_head", "embed_tokens"],
    "unpacked": ["o_proj", "down_proj"],
    "packed": ["k_proj", "up_proj"],
    "a whole block": ["mlp"],
    "norms": ["norm"],
    "a norm and the head": ["model.norm", "lm_head"],
}


HEAD_NORMS = ("qwen3", "qwen3_moe")
"""Models with a norm over each head of queries and of keys."""


def save(
    directory: Path,
    saved: list[str] | None,
    seed: int = 1,
    model: PreTrainedModel | None = None,
) -> PeftModel:
    """Save an adapter that was trained on q_proj and on whole modules; return PEFT's model."""
    fields = {"r": 4, "lora_alpha": 6, "target_modules": ["q_proj"], "modules_to_save": saved}
    normal = partial(nn.init.normal_, std=0.3)
    return save_adapter(model or deepcopy(base()), directory, seed, train=normal, **fields)


def make_worker() -> LRUCacheWorkerLoRAManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3)
    manager = LRUCacheLoRAModelManager(
        deepcopy(base()), 8, 256, VOCABULARY, config, "cpu", device_bytes_max=1 << 20, checked=True
    )
    return LRUCacheWorkerLoRAManager(manager)


def make_model(model: PreTrainedModel) -> CausalModel:
    return CausalModel(model, LoRAConfig(max_lora_rank=64, max_loras=2), max_model_len=POSITIONS)


@pytest.mark.parametrize("name", SAVED)
@torch.no_grad()
def test_whole_modules_are_replaced_for_the_rows_of_their_adapter(
    name: str, tmp_path: Path
) -> None:
    references = {1: save(tmp_path / "1", SAVED[name]), 2: save(tmp_path / "2", ["lm_head"], 2)}
    worker = make_worker()
    requests = [LoRARequest(str(at), at, str(tmp_path / str(at))) for at in (1, 2)]
    rows = (2, 0, 1, 1)
    index = [row for row in rows for _ in PROMPT]
    worker.set_active_adapters(requests, LoRAMapping(index, rows, is_prefill=True))
    tokens = torch.tensor([PROMPT])
    found = worker.manager.model(tokens.expand(len(rows), -1)).logits
    for at, row in enumerate(rows):
        model = references.get(row, base())
        assert relative_error(found[at], model(input_ids=tokens).logits[0]) < 1e-5, row


@pytest.mark.parametrize("model_type", HEAD_NORMS)
@pytest.mark.parametrize("names", [(0, 0), (1, 0), (1, 1), (None, 0, 1)])
@torch.no_grad()
def test_norms_of_heads_are_replaced_in_packed_and_padded_passes(
    model_type: str, names: tuple[int | None, ...], tmp_path: Path
) -> None:
    """Their inputs have a row per head of each token; PEFT saves them where "norm" is named."""
    saved = {"norms": ["norm"], "plain": None}
    models = {
        name: save(tmp_path / name, modules, seed, build_model(model_type))
        for seed, (name, modules) in enumerate(saved.items(), start=1)
    }
    reference = PeftReference(models)
    bench = ParityBench(make_model(build_model(model_type)), tmp_path, 2, 1 << 20)
    for slot, name in enumerate(saved):
        bench.write(slot, name)
    assert not bench.refusal_of_flat_passes()
    adapters = [None if at is None else [*saved][at] for at in names]
    rows: list[ParityRow] = [(name, TEXT[row : 2 * row + 4]) for row, name in enumerate(adapters)]
    steps = TEXT[:2]
    expected = [
        torch.stack([reference.logits(name, (*prompt, *steps[:at])) for name, prompt in rows])
        for at in range(len(steps) + 1)
    ]
    for found in (bench.flat_steps(rows, steps, 3), bench.steps(rows, steps)):
        assert max(map(relative_error, found, expected)) < 1e-5


@pytest.mark.parametrize("heads", [(4, 2), (16, 1)])
def test_norms_over_transposed_heads_can_not_be_replaced(
    heads: tuple[int, int], tmp_path: Path
) -> None:
    """A packed pass can't map their rows, also where there are as many heads as tokens."""
    config = build_config("apertus")
    config.dtype = "float32"
    config.num_attention_heads, config.num_key_value_heads = heads
    model = make_model(AutoModelForCausalLM.from_config(config))
    norms = {name.rpartition(".")[2] for name in model.norms}
    assert norms == {"attention_layernorm", "feedforward_layernorm", "norm"}
    save(tmp_path / "norms", ["norm"], model=deepcopy(build_model("apertus")))
    with pytest.raises(AdapterDoesNotFit, match="norm"):
        read(model, tmp_path, "norms")


@torch.no_grad()
def test_a_saved_module_is_loaded_in_memory_and_leaves_with_its_adapter(tmp_path: Path) -> None:
    reference, path = save(tmp_path, ["model.norm", "lm_head"]), str(tmp_path)
    worker = make_worker()
    manager = worker.manager
    # Modules with A and B, as `supported_lora_modules` lists them.
    expected = {"q_proj"}
    helper = PEFTHelper.from_local_dir(path)
    manager.add_adapter(LoRAModel.from_local_checkpoint(path, expected, helper, lora_model_id=5))
    manager.activate_adapter(5)
    manager.set_adapter_mapping(LoRAMapping([5] * len(PROMPT), [5]))
    assert not manager.punica_wrapper.launch_key.is_fixed, "such a step must not be replayed"
    tokens = torch.tensor([PROMPT])
    expected_logits = reference(input_ids=tokens).logits
    assert relative_error(manager.model(tokens).logits, expected_logits) < 1e-5
    assert manager.get_adapter(5).loras.keys() == {
        "model.layers.0.self_attn.q_proj",
        "model.norm.saved",
        "lm_head.saved",
    }
    manager.set_adapter_mapping(LoRAMapping([0] * len(PROMPT), [0]))
    assert manager.punica_wrapper.launch_key.is_fixed
    assert relative_error(manager.model(tokens).logits, base()(tokens).logits) < 1e-5


@pytest.mark.parametrize(
    ("saved", "text"),
    [
        (["lm_head", "embed_tokens"], "modules_to_save names 'embed_tokens', but no tensor"),
        (["lm_head"], r"lm_head has a weight \[30, 16\]; in this model it has 16 inputs and 31"),
    ],
)
def test_what_can_not_be_replaced_is_refused(saved: list[str], text: str, tmp_path: Path) -> None:
    save(tmp_path, saved)
    weights = load_file(tmp_path / "adapter_model.safetensors")
    if len(saved) > 1:
        weights = {name: tensor for name, tensor in weights.items() if "embed" not in name}
    elif saved == ["lm_head"]:
        name = "base_model.model.lm_head.weight"
        weights[name] = weights[name][:-1].contiguous()
    save_file(weights, tmp_path / "adapter_model.safetensors")
    with pytest.raises(AdapterDoesNotFit, match=text):
        make_worker().add_adapter(LoRARequest("a", 1, str(tmp_path)))
