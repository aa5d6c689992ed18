"""Architectures on the simulated device: their logits are PEFT's, and no operation mixes devices.

A prefill is followed by two decode steps. Logits are compared in float32, with all kernels run by
Triton's interpreter: packed passes attend by the kernel. In bfloat16, whose arithmetic is wrong
there, kernels are counted and not run, and what is checked is what the device reports.
"""

import os
from pathlib import Path

import pytest
import torch

from loradock.engine.config import LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from tests.support.device.tensors import skipped_kernels
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import ParityBench, ParityRow, PeftDecodeReference
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX, Architecture

pytestmark = pytest.mark.simulated

CHOSEN = (
    *("llama", "mistral", "qwen3", "gemma2", "gemma3_text"),
    *("phi3", "gpt_neox", "gpt2", "cohere2", "olmo3"),
)
"""Those of every run; `LORADOCK_ARCHITECTURES=all` runs the others too."""

NEXT_TOKENS = (5, 44)
PROMPTS = ((72, 10, 18), (1, 2, 3, 4, 5, 6, 7, 8, 9))


def architectures() -> list[Architecture]:
    every = os.environ.get("LORADOCK_ARCHITECTURES") == "all"
    return [one for one in ARCHITECTURES if every or one.model_type in CHOSEN]


def make_bench(architecture: Architecture, root: Path, dtype: torch.dtype) -> ParityBench:
    config = LoRAConfig(max_lora_rank=64, max_loras=5)
    built = architecture.build(dtype).to("cuda")
    model = CausalModel(built, config, max_model_len=CONTEXT_TOKENS_MAX)
    return ParityBench(model, root, 5, 8 << 20)


def steps(bench: ParityBench, rows: list[ParityRow], architecture: Architecture) -> torch.Tensor:
    """Return the logits by the way that the architecture is served: [rows, steps, vocabulary]."""
    if architecture.padded:
        found = bench.steps(rows, NEXT_TOKENS)
    else:
        found = bench.flat_steps(rows, NEXT_TOKENS, columns=8)
    return torch.stack([one.cpu() for one in found], dim=1)


@pytest.mark.parametrize("architecture", architectures(), ids=lambda one: one.model_type)
def test_the_logits_on_the_device_are_pefts(architecture: Architecture, tmp_path: Path) -> None:
    peft = PeftDecodeReference(architecture.build(), tmp_path)
    bench = make_bench(architecture, tmp_path, torch.float32)
    for slot, name in enumerate(peft.names):
        bench.write(slot, name)
    names = (None, *peft.names)
    rows = [(name, PROMPTS[row % len(PROMPTS)]) for row, name in enumerate(names)]
    for row, found in zip(rows, steps(bench, rows, architecture), strict=True):
        assert relative_error(found, torch.stack(peft.steps(row, NEXT_TOKENS))) < 1e-5, row
    with skipped_kernels():
        bench = make_bench(architecture, tmp_path, torch.bfloat16)
        for slot, name in enumerate(peft.names):
            bench.write(slot, name)
        steps(bench, rows, architecture)
