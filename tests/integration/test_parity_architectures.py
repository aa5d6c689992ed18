"""The engine's logits are peft's for every architecture of the table, in one mixed batch.

What a batch mixes: the base and five adapters of ranks 1, 4, 8, 24 and 64 (all linear layers,
attention with rsLoRA, patterns of rank and alpha, embedding and head, one single projection), one
in each slot, and prompts of unequal lengths; prefill, then two cached steps.
"""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from engine.config import LoRAConfig
from engine.errors import AdapterDoesNotFit, ModelRefused
from engine.models.causal_model import PreparedModel
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.parity_bench import Bench, PeftSide, Row, read
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX, Architecture

pytest_plugins = ("tests.support.engine.engine_fixtures",)

PROMPTS = ((72, 10, 18), (1, 2, 3, 4, 5, 6, 7, 8, 9), (20,))
NEXT_TOKENS = (5, 44)
SERVED = [one for one in ARCHITECTURES if not one.refused]


def name_of(architecture: Architecture) -> str:
    return architecture.model_type


def prepare(model: PreTrainedModel) -> PreparedModel:
    config = LoRAConfig(max_lora_rank=64, max_loras=5)
    return PreparedModel(model, config, context_tokens_max=CONTEXT_TOKENS_MAX)


class Comparison:
    """One architecture's mixed batch on both sides: [rows, steps, vocabulary]."""

    def __init__(self, architecture: Architecture, root: Path, **built: object) -> None:
        peft = PeftSide(architecture.build(**built), root, architecture.unwrapped)
        bench = Bench(prepare(architecture.build(**built)), root, len(peft.names), 8 << 20)
        for slot, name in enumerate(peft.names):
            bench.write(slot, name)
        self.rows: list[Row] = [
            (name, prompt) for prompt in PROMPTS for name in (None, *peft.names)
        ]
        self.ours = torch.stack(bench.steps(self.rows, NEXT_TOKENS), dim=1)
        self.theirs = torch.stack([torch.stack(peft.steps(row, NEXT_TOKENS)) for row in self.rows])


@pytest.mark.parametrize("architecture", SERVED, ids=name_of)
def test_each_row_of_a_mixed_batch_is_pefts(architecture: Architecture, tmp_path: Path) -> None:
    found = Comparison(architecture, tmp_path)
    for row, one, other in zip(found.rows, found.ours, found.theirs, strict=True):
        assert relative_error(one, other) < 1e-5, row
    longest = [at for at, (_, prompt) in enumerate(found.rows) if prompt == PROMPTS[1]]
    distances = torch.pdist(found.theirs[longest].flatten(1).double())
    assert (distances > 1e-3).all(), "adapters are alike"


@pytest.mark.parametrize("architecture", SERVED, ids=name_of)
def test_a_mixed_batch_in_bfloat16_is_pefts(architecture: Architecture, tmp_path: Path) -> None:
    """Over one layer: each more brings as much rounding of its own to either side."""
    found = Comparison(architecture, tmp_path, dtype=torch.bfloat16, layers=1)
    assert relative_error(found.ours, found.theirs) < 1e-2


@pytest.mark.parametrize("architecture", [a for a in ARCHITECTURES if a.refused], ids=name_of)
def test_what_can_not_be_served_is_refused_at_the_start(architecture: Architecture) -> None:
    with pytest.raises(ModelRefused, match=architecture.refused):
        prepare(architecture.build())


@pytest.mark.parametrize("architecture", [a for a in SERVED if a.unwrapped], ids=name_of)
def test_an_adapter_of_a_layer_that_is_not_wrapped_is_refused(
    architecture: Architecture, tmp_path: Path
) -> None:
    PeftSide(architecture.build(), tmp_path)
    with pytest.raises(AdapterDoesNotFit, match=rf"not wrapped.*{architecture.unwrapped[0]}"):
        read(prepare(architecture.build()), tmp_path, "rank8")
