"""Adapters over quantised bases are PEFT's over the same base: torchao and bitsandbytes on a CPU.

A library that is not installed skips its cases; `make quantization` installs all of them.
"""

import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from engine.adapters import LoRARequest
from engine.config import QUANTIZATIONS, EngineConfig, LoRAConfig
from engine.errors import AdapterDoesNotFit, ModelRefused
from engine.layers import ReplicatedLinearWithLoRA
from engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from engine.models.loading import load_model
from engine.models.quantization import loading_options
from engine.parallel import ParallelGroup
from engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.supported import QUANTIZED_ON_CPU

torch.set_num_threads(1)
CPU = torch.device("cpu")
CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=128,
    intermediate_size=128,
    num_hidden_layers=1,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
)
TARGETS = [f"{name}_proj" for name in ("q", "k", "v", "o", "gate", "up", "down")]
PROMPT = (5, 1, 44, 3)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a directory with a whole model and an adapter for it."""
    root = tmp_path_factory.mktemp("quantized")
    torch.manual_seed(3)
    LlamaForCausalLM(CONFIG).save_pretrained(root / "model")
    model = LlamaForCausalLM.from_pretrained(root / "model")
    peft = get_peft_model(
        model, LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS, init_lora_weights=False)
    )
    peft.peft_config["default"].init_lora_weights = True
    peft.save_pretrained(root / "adapter")
    return root


def needs(library: str) -> None:
    pytest.importorskip(library, reason=f"{library} is not installed; see `make quantization`")


def quantized(root: Path, name: str) -> LlamaForCausalLM:
    needs(QUANTIZED_ON_CPU[name])
    options = loading_options(name, CONFIG, CPU)
    path = root / "model"
    return LlamaForCausalLM.from_pretrained(path, dtype=torch.float32, **options).eval()


@pytest.mark.parametrize("name", QUANTIZED_ON_CPU)
@torch.no_grad()
def test_a_quantized_base_serves_adapters_as_peft_does(name: str, saved: Path) -> None:
    manager = LRUCacheLoRAModelManager(
        quantized(saved, name), 4, 64, CONFIG.vocab_size, LoRAConfig(8, 2), "cpu"
    )
    # Before its first forward, in which a library may pack the weights anew.
    reference = PeftModel.from_pretrained(quantized(saved, name), saved / "adapter").eval()
    base = quantized(saved, name)
    layer = manager.modules["model.layers.0.self_attn.q_proj"]
    assert isinstance(layer, ReplicatedLinearWithLoRA), "quantised projections are not packed"
    worker = LRUCacheWorkerLoRAManager(manager)
    index = [0] * len(PROMPT) + [1] * len(PROMPT)
    worker.set_active_adapters(
        [LoRARequest("a", 1, str(saved / "adapter"))], LoRAMapping(index, [0, 1], is_prefill=True)
    )
    tokens = torch.tensor([PROMPT] * 2)
    found = manager.model(tokens).logits
    # bitsandbytes with 8 bits rounds activations to float16, which a batch's order may change.
    error_max = 1e-2 if name in ("bitsandbytes-8bit", "bitsandbytes-4bit") else 1e-5
    assert relative_error(found[0], base(tokens).logits[0]) < error_max
    expected = reference(input_ids=tokens).logits[1]
    assert relative_error(found[1], expected) < error_max
    assert relative_error(found[1], found[0]) > 0.1, "the adapter has no effect"


@pytest.mark.parametrize("name", ["torchao-int8", "bitsandbytes-4bit"])
def test_a_model_is_quantized_while_it_is_served(name: str, saved: Path) -> None:
    needs(QUANTIZED_ON_CPU[name])
    model = load_model(
        EngineConfig(saved / "model", device="cpu", quantization=name), LoRAConfig(8)
    )
    assert "model.layers.0.self_attn.q_proj" in model.layers


def test_dora_over_a_quantized_base_is_refused_by_layer(saved: Path, tmp_path: Path) -> None:
    needs("torchao")
    plain = LlamaForCausalLM.from_pretrained(saved / "model")
    get_peft_model(
        plain, LoraConfig(r=2, target_modules=["q_proj"], use_dora=True)
    ).save_pretrained(tmp_path)
    manager = LRUCacheLoRAModelManager(
        quantized(saved, "torchao-int8"), 4, 64, CONFIG.vocab_size, LoRAConfig(8, 2), "cpu"
    )
    with pytest.raises(AdapterDoesNotFit, match=r"q_proj\.lora_magnitude.* that are not quantised"):
        LRUCacheWorkerLoRAManager(manager).add_adapter(LoRARequest("a", 1, str(tmp_path)))


def test_a_quantized_model_is_not_split(saved: Path) -> None:
    needs("torchao")
    config = EngineConfig(saved / "model", device="cpu", quantization="torchao-int8")
    with pytest.raises(ModelRefused, match="can't be split; serve it on one rank"):
        load_model(config, LoRAConfig(8), ParallelGroup(0, 2))


def test_wrong_quantizations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantization is 'int3'; none, or one of torchao-int8"):
        EngineConfig(tmp_path, quantization="int3")
    config = LlamaConfig(quantization_config={"quant_method": "fp8"})
    for name in QUANTIZATIONS:
        with pytest.raises(ModelRefused, match="the model was saved quantised"):
            loading_options(name, config, CPU)
    assert loading_options("none", config, CPU) == {}


def test_a_missing_library_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torchao.quantization", None)
    with pytest.raises(ModelRefused, match=r"loradock\[quantization\]"):
        loading_options("torchao-int8", CONFIG, CPU)
