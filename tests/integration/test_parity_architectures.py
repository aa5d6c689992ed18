"""The engine's logits are PEFT's for every architecture of the table, in one mixed batch.

A batch mixes the base and five adapters of ranks 1, 4, 8, 24 and 64 (all linear layers, attention
with rsLoRA, patterns of rank and alpha, embedding and head, one single projection), one per slot,
and prompts of unequal lengths. A prefill is followed by two cached steps. Every row is computed in
one padded pass per step, and in chunks: in packed passes where the trial at start chooses them.
"""

from pathlib import Path

import pytest
import torch
import transformers
from transformers import PreTrainedModel

from loradock.engine.config import LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import ParityBench, ParityRow, PeftDecodeReference
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX, Architecture

pytest_plugins = ("tests.support.engine.engine_fixtures",)

PROMPTS = ((72, 10, 18), (1, 2, 3, 4, 5, 6, 7, 8, 9), (20,))
NEXT_TOKENS = (5, 44)


def is_newer(architecture: Architecture) -> bool:
    """Whether this version of the library gives the architecture flat passes."""
    numbers = [
        version.split(".")[:2] for version in (transformers.__version__, architecture.padded_before)
    ]
    found, before = (tuple(map(int, number)) if all(number) else () for number in numbers)
    return bool(before) and found >= before


def name_of(architecture: Architecture) -> str:
    return architecture.model_type


def prepare(model: PreTrainedModel) -> CausalModel:
    config = LoRAConfig(max_lora_rank=64, max_loras=5)
    return CausalModel(model, config, max_model_len=CONTEXT_TOKENS_MAX)


class Comparison:
    """One architecture's mixed batch by both libraries: [rows, steps, vocabulary]."""

    def __init__(self, architecture: Architecture, root: Path, **built: object) -> None:
        peft = PeftDecodeReference(architecture.build(**built), root)
        bench = ParityBench(prepare(architecture.build(**built)), root, len(peft.names), 8 << 20)
        for slot, name in enumerate(peft.names):
            bench.write(slot, name)
        self.rows: list[ParityRow] = [
            (name, prompt) for prompt in PROMPTS for name in (None, *peft.names)
        ]
        self.engine_logits = torch.stack(bench.steps(self.rows, NEXT_TOKENS), dim=1)
        self.refusal_of_flat_passes = bench.refusal_of_flat_passes()
        chunked = bench.steps if self.refusal_of_flat_passes else bench.flat_steps
        self.chunked_logits = torch.stack(chunked(self.rows, NEXT_TOKENS, columns=4), dim=1)
        self.peft_logits = torch.stack(
            [torch.stack(peft.steps(row, NEXT_TOKENS)) for row in self.rows]
        )


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=name_of)
def test_each_row_of_a_mixed_batch_matches_peft(architecture: Architecture, tmp_path: Path) -> None:
    found = Comparison(architecture, tmp_path)
    for engine_logits in (found.engine_logits, found.chunked_logits):
        for row, engine, peft in zip(found.rows, engine_logits, found.peft_logits, strict=True):
            assert relative_error(engine, peft) < 1e-5, row
    if architecture.padded and not is_newer(architecture):
        assert architecture.padded in found.refusal_of_flat_passes
    else:
        assert not found.refusal_of_flat_passes
    longest = [index for index, (_, prompt) in enumerate(found.rows) if prompt == PROMPTS[1]]
    distances = torch.pdist(found.peft_logits[longest].flatten(1).double())
    assert (distances > 1e-3).all(), "adapters are alike"


@pytest.mark.parametrize("architecture", ARCHITECTURES, ids=name_of)
def test_a_mixed_batch_in_bfloat16_matches_peft(architecture: Architecture, tmp_path: Path) -> None:
    """Over one layer, because each further layer adds rounding of its own to both results."""
    found = Comparison(architecture, tmp_path, dtype=torch.bfloat16, layers=1)
    assert relative_error(found.engine_logits, found.peft_logits) < 1e-2
