"""DoRA, biases in B and trained biases are PEFT's, next to plain adapters and the base."""

from copy import deepcopy
from functools import cache
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from loradock.engine.adapters import LoRAModel, LoRARequest, PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.models.peft_adapters import save_adapter

torch.set_num_threads(1)
CONFIG = LlamaConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=1,
    max_position_embeddings=32,
    attention_bias=True,
    mlp_bias=True,
    initializer_range=0.3,
)
PROMPT = (3, 1, 4, 1, 5)
TARGETS = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]
FORMS = {
    "DoRA": {"use_dora": True},
    "DoRA with rsLoRA": {"use_dora": True, "use_rslora": True},
    "bias in B": {"lora_bias": True},
    "all biases": {"bias": "all"},
    "biases of targets": {"bias": "lora_only"},
    "DoRA and biases": {"use_dora": True, "bias": "all"},
}


@cache
def base() -> LlamaForCausalLM:
    torch.manual_seed(2)
    model = LlamaForCausalLM(CONFIG).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            nn.init.normal_(parameter, std=0.3)
    return model.requires_grad_(False)


def save(directory: Path, seed: int = 1, **fields: object) -> PeftModel:
    fields = {"r": 4, "lora_alpha": 6, "target_modules": TARGETS} | fields
    return save_adapter(deepcopy(base()), directory, seed, train=shift, **fields)


def shift(parameter: Tensor) -> None:
    parameter.add_(torch.rand_like(parameter))


def make_worker() -> LRUCacheWorkerLoRAManager:
    config = LoRAConfig(max_lora_rank=8, max_loras=3)
    manager = LRUCacheLoRAModelManager(
        deepcopy(base()), 8, 256, 31, config, "cpu", device_bytes_max=1 << 20, checked=True
    )
    return LRUCacheWorkerLoRAManager(manager)


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_outputs_are_scaled_and_shifted_as_by_peft(form: str, tmp_path: Path) -> None:
    references = {1: save(tmp_path / "1", **FORMS[form]), 2: save(tmp_path / "2", 2)}
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
    assert not worker.manager.punica_wrapper.launch_key.is_fixed


@torch.no_grad()
def test_dora_in_memory_needs_the_model(tmp_path: Path) -> None:
    reference, path = save(tmp_path, use_dora=True), str(tmp_path)
    manager, helper = make_worker().manager, PEFTHelper.from_local_dir(str(tmp_path))
    with pytest.raises(AdapterDoesNotFit, match="pass model="):
        LoRAModel.from_local_checkpoint(path, set(TARGETS), helper)
    manager.add_adapter(
        LoRAModel.from_local_checkpoint(path, set(TARGETS), helper, lora_model_id=4, model=manager)
    )
    manager.activate_adapter(4)
    manager.set_adapter_mapping(LoRAMapping([4] * len(PROMPT), [4]))
    tokens = torch.tensor([PROMPT])
    expected = reference(input_ids=tokens).logits
    assert relative_error(manager.model(tokens).logits, expected) < 1e-5


@pytest.mark.parametrize(
    ("form", "part", "text"),
    [
        ("DoRA", "q_proj.lora_magnitude", "adapted modules without a magnitude: model.layers.0"),
        ("bias in B", "q_proj.lora_B.bias", "adapted modules without a bias in B"),
        ("all biases", "q_proj.base_layer.bias", "adapted modules without their bias: model"),
        ("DoRA", "q_proj.lora_A", "lora_A"),
    ],
)
def test_half_an_adapter_is_refused(form: str, part: str, text: str, tmp_path: Path) -> None:
    save(tmp_path, **FORMS[form])
    file = tmp_path / "adapter_model.safetensors"
    save_file({name: t for name, t in load_file(file).items() if part not in name}, file)
    with pytest.raises(AdapterDoesNotFit, match=text):
        make_worker().add_adapter(LoRARequest("a", 1, str(tmp_path)))


def test_a_vector_of_another_length_or_layer_is_refused(tmp_path: Path) -> None:
    save(tmp_path, bias="all")
    file = tmp_path / "adapter_model.safetensors"
    weights = load_file(file)
    name = next(name for name in weights if name.endswith("gate_proj.bias"))
    for changed, text in (
        ({name: weights[name][:-1]}, "24 floating values are needed"),
        ({"base_model.model.lm_head.x.bias": torch.ones(16)}, "for which none is served"),
    ):
        save_file(weights | changed, file)
        with pytest.raises(AdapterDoesNotFit, match=text):
            make_worker().add_adapter(LoRARequest("a", 1, str(tmp_path)))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(4)
    config = GPT2Config(vocab_size=31, n_positions=32, n_embd=16, n_layer=1, n_head=2)
    model = GPT2LMHeadModel(config).eval()
    for name, parameter in model.named_parameters():
        if name.endswith("bias") or "ln_" in name:
            nn.init.normal_(parameter, mean=0.7, std=0.3)
    return model.requires_grad_(False)


@pytest.mark.parametrize("fields", [{"bias": "all"}, {"use_dora": True}], ids=str)
@torch.no_grad()
def test_gpt2_has_biases_in_norms_and_transposed_weights(
    fields: dict[str, object], tmp_path: Path
) -> None:
    fields = {"r": 4, "target_modules": ["c_attn", "c_fc"], "fan_in_fan_out": True} | fields
    reference = save_adapter(gpt2(), tmp_path, 5, train=shift, **fields)
    lora_config = LoRAConfig(max_lora_rank=8, max_loras=2)
    manager = LRUCacheLoRAModelManager(
        gpt2(), 8, 256, 31, lora_config, "cpu", device_bytes_max=1 << 20
    )
    worker = LRUCacheWorkerLoRAManager(manager)
    index = [0] * len(PROMPT) + [1] * len(PROMPT)
    worker.set_active_adapters([LoRARequest("a", 1, str(tmp_path))], LoRAMapping(index, [0, 1]))
    tokens = torch.tensor([PROMPT] * 2)
    found = manager.model(tokens).logits
    assert relative_error(found[0], gpt2()(tokens).logits[0]) < 1e-5
    assert relative_error(found[1], reference(input_ids=tokens).logits[1]) < 1e-5
