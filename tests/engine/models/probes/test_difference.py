"""Refusals name the module that differs or fails, in any order of rows and tokens."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from transformers import BertConfig, BertModel, LlamaForCausalLM

from loradock.engine.config import LoRAConfig
from loradock.engine.errors import ModelNotRun, ModelRefused
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.probes.comparison import Aligned, first_difference
from tests.support.models.causal_configs import build_model

HIDDEN = 4


class Averaged(nn.Module):
    """Adds the average over all tokens of the batch, later ones and padding included."""

    def forward(self, x: Tensor) -> Tensor:
        return x + x.mean(dim=tuple(range(x.ndim - 1)), keepdim=True)


class Counted(nn.Module):
    """Adds the number of its calls, so that no run repeats another."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return x + self.calls


class Failing(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("no kernel for this")


def planted(layer: int, module: nn.Module) -> LlamaForCausalLM:
    model = build_model("llama")
    model.model.layers[layer].mlp = module
    return model


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("kind", [Averaged, Counted])
def test_a_refusal_of_generation_names_the_layer_that_differs(
    layer: int, kind: type[nn.Module]
) -> None:
    text = rf"differ from the row alone .*; model.layers.{layer}.mlp \({kind.__name__}\) is the"
    with pytest.raises(ModelRefused, match=text) as refused:
        CausalModel(planted(layer, kind()), LoRAConfig())
    assert f"layers.{1 - layer}" not in str(refused.value)


def test_a_refusal_of_pooling_names_the_layer_that_differs() -> None:
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    model = BertModel(BertConfig(vocab_size=50, num_hidden_layers=2, **sizes))
    model.encoder.layer[1].intermediate.dense = Averaged()
    with pytest.raises(ModelRefused, match=r"; encoder.layer.1.intermediate.dense \(Averaged\) is"):
        PoolingModel(model, LoRAConfig(), task="embed")


def test_a_model_that_does_not_run_names_the_module_that_fails() -> None:
    with pytest.raises(ModelNotRun, match=r"no kernel for this \(in model.layers.1.mlp\)"):
        CausalModel(planted(1, Failing()), LoRAConfig())


class Permuted(nn.Module):
    """Runs `before` and a layer on states in an order of its own."""

    def __init__(self, order: Callable[[Tensor], Tensor], before: nn.Module) -> None:
        super().__init__()
        self.embed = nn.Embedding(30, HIDDEN)
        self.before, self.after = before, nn.Linear(HIDDEN, HIDDEN)
        self._order = order

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self._order(self.embed(input_ids))
        y: Tensor = self.after(self.before(x))
        return y


ORDERS = {
    "rows": lambda x: x,
    "tokens": lambda x: x.transpose(0, 1),
    "flat": lambda x: x.reshape(-1, HIDDEN),
}
TEXT = (5, 9, 2, 7)


@pytest.mark.parametrize("at_start", [False, True], ids=["padded-left", "padded-right"])
@pytest.mark.parametrize("row", [0, 1])
@pytest.mark.parametrize("order", ORDERS)
def test_rows_and_tokens_are_compared_in_any_order(order: str, row: int, at_start: bool) -> None:
    padding = [1, 1, 1]
    own = [*TEXT, *padding] if at_start else [*padding, *TEXT]
    other = list(range(11, 18))
    together = torch.tensor([own, other] if row == 0 else [other, own])
    alone = torch.tensor([TEXT])

    def difference(before: nn.Module) -> str:
        torch.manual_seed(2)
        model = Permuted(ORDERS[order], before)
        runs = (lambda: model(together)), (lambda: model(alone))
        return first_difference(model, *runs, Aligned(row, 2, at_start), 1e-4)

    assert difference(nn.Identity()) == ""
    assert difference(Averaged()).startswith("; before (Averaged) is the first that differs (by ")


def test_runs_with_other_forwards_have_no_first_difference() -> None:
    model = Permuted(ORDERS["rows"], Averaged())
    ids = torch.tensor([TEXT])

    def thrice() -> None:
        for _ in range(3):
            model(ids)

    def twice() -> None:
        for _ in range(2):
            model(ids[:, 1:])

    assert first_difference(model, thrice, twice, Aligned(), 1e-4) == ""
    assert first_difference(model, thrice, lambda: model(ids[:, 1:]), Aligned(), 1e-4) != ""
