"""Adapters over quantised bases are PEFT's over the same base: those that run on a CPU.

Models of torchao and bitsandbytes are compared by a process of its own, which alone finds them.
"""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.integrations import finegrained_fp8

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import wrapper_of
from loradock.engine.models import saved_settings
from loradock.engine.models.loading import load_model
from loradock.engine.models.saved_settings import loading_options
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.messages.engine_options import QUANTIZATIONS
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import ParityBench, PeftReference
from tests.support.models.quantized_bases import CONFIG, PROMPT, Comparison, save_example
from tests.supported import QUANTIZED_ON_CPU, ROOT

torch.set_num_threads(1)
CPU = torch.device("cpu")
LIBRARIES = Path(sys.prefix) / "quantization"
BLOCK = 128
FP8_MAX = 448
"""The largest float8_e4m3fn."""


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("quantized")
    save_example(root)
    return root


# One test, because each process that finds torchao starts slowly.
def test_quantized_bases_serve_adapters_as_peft_does(saved: Path) -> None:
    """`make quantization` installs the libraries in a folder of their own."""
    if not LIBRARIES.is_dir() and find_spec("torchao") is None:
        pytest.skip("torchao and bitsandbytes are not installed; see `make quantization`")
    process = subprocess.run(
        [sys.executable, "-m", "tests.support.models.quantized_bases", str(saved)],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(LIBRARIES)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert process.returncode == 0, process.stderr[-3000:]
    found = msgspec.json.decode(process.stdout.splitlines()[-1], type=dict[str, Comparison])
    assert found.keys() == QUANTIZED_ON_CPU.keys()
    for name, one in found.items():
        # bitsandbytes rounds activations to float16, or to bfloat16 in its product of 4 bits.
        error_max = 1e-2 if name.startswith("bitsandbytes") else 1e-5
        assert max(one.base, one.adapter, one.served) < error_max, (name, one)
        assert one.effect > 0.1, (name, "the adapter has no effect")
        assert one.wrapper == "ReplicatedLinearWithLoRA", (name, "projections are not packed")
        assert "q_proj.lora_magnitude" in one.dora, name
        assert "that are not quantised" in one.dora, name
        assert "can't be split; serve it on one rank" in one.split, name


def in_fp8(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight [128, 128 n] as `float8_e4m3fn`, and the scale of each block."""
    blocks = weight.unflatten(1, (-1, BLOCK))
    scales = blocks.abs().amax((0, 2)) / FP8_MAX
    return (blocks / scales[None, :, None]).to(torch.float8_e4m3fn).flatten(1), scales[None]


@torch.no_grad()
def test_a_model_that_was_saved_in_fp8_is_served_dequantized_on_a_cpu(saved: Path) -> None:
    """`transformers` does that; its product of FP8 weights has kernels for GPUs alone."""
    path = saved / "fp8"
    LlamaForCausalLM.from_pretrained(saved / "model").save_pretrained(path)
    weights = load_file(path / "model.safetensors")
    for name in [name for name in weights if name.endswith("_proj.weight")]:
        weights[name], weights[f"{name}_scale_inv"] = in_fp8(weights[name])
    save_file(weights, path / "model.safetensors", {"format": "pt"})
    config = json.loads((path / "config.json").read_text())
    stated = {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}
    (path / "config.json").write_text(json.dumps(config | {"quantization_config": stated}))

    served = load_model(EngineConfig(path, device="cpu"), LoRAConfig(8))
    bench = ParityBench(served, saved / "plain", slots=1, device_bytes=1 << 20)
    bench.write(0, "plain")
    base = LlamaForCausalLM.from_pretrained(path, dtype="auto")
    peft = PeftReference({"plain": PeftModel.from_pretrained(base, saved / "plain/plain").eval()})
    peft.check(bench, [("plain", PROMPT), (None, PROMPT)])
    with pytest.raises(ModelRefused, match="FP8 quantization"):
        load_model(EngineConfig(saved / "model", device="cpu", quantization="fp8"), LoRAConfig(8))


@torch.no_grad()
def test_the_fp8_layer_computes_its_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its kernel is replaced by one for CPUs; its weight is not read."""

    def product(x: Tensor, weight: Tensor, scale: Tensor, *_: object) -> Tensor:
        return linear(x, weight.to(x.dtype) * scale.repeat_interleave(BLOCK, 1))

    monkeypatch.setattr(finegrained_fp8, "fp8_linear", product)
    weight, x = torch.randn(BLOCK, 2 * BLOCK), torch.randn(3, 2 * BLOCK)
    layer = finegrained_fp8.FP8Linear(2 * BLOCK, BLOCK, (BLOCK, BLOCK)).requires_grad_(False)
    layer.weight.data, layer.weight_scale_inv.data = in_fp8(weight)
    wrapper = wrapper_of(layer)
    assert wrapper is not None
    wrapped = wrapper(layer)
    assert (wrapped.affine_shapes, wrapped.saved_shapes) == ((), ())
    shapes = wrapped.module_shapes("m", 0)
    punica = PunicaWrapper(CPU, 8, choose_kernels("cpu"))
    punica.update_metadata(LoRAMapping([0, 1, 0], [0, 1, 0]), [1])
    wrapped.create_lora_weights(Arena(1, shapes, 1 << 20, torch.float32, "cpu"), [0])
    wrapped.set_mapping(punica)
    a, b = torch.randn(2, 2 * BLOCK), torch.randn(BLOCK, 2)
    wrapped.set_lora(0, a, b)
    expected = layer(x)
    assert 0 < relative_error(expected, linear(x, weight)) < 0.1
    expected[1] += x[1] @ a.T @ b.T
    assert relative_error(wrapped(x), expected) < 1e-5


def test_wrong_quantizations_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="quantization must be one of none, torchao-int8"):
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


@pytest.mark.parametrize(("name", "saved"), [("fp8", None), ("none", {"quant_method": "fp8"})])
def test_fp8_without_its_kernels_is_refused_on_cuda_alone(
    name: str, saved: dict[str, str] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_settings, "is_kernels_available", lambda: False)
    config = SimpleNamespace(quantization_config=saved)
    with pytest.raises(ModelRefused, match="install kernels"):
        loading_options(name, config, torch.device("cuda"))
    if name == "none":
        assert loading_options(name, config, CPU) == {}
