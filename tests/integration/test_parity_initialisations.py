"""Initialisations: an adapter is refused if PEFT changed the base weights for it, or may have.

Each of PEFT's values is trained for a step here, and its base weights are compared before and after
the start. What is served equals PEFT's model, also after PEFT's conversion to plain LoRA.
"""

import ast
import json
from collections.abc import Callable, Mapping
from copy import deepcopy
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import peft.tuners.lora
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from peft.tuners.lora.config import CordaConfig, LoraGAConfig
from peft.tuners.lora.corda import preprocess_corda
from peft.tuners.lora.loraga import preprocess_loraga
from torch import Tensor
from transformers import PreTrainedModel

from loradock.engine.adapters import LoRARequest
from loradock.engine.adapters.peft_config import (
    BASE_CHANGING_INITIALISATIONS,
    HARMLESS_INITIALISATIONS,
)
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterConfigRefused
from loradock.engine.manager import LRUCacheLoRAModelManager, LRUCacheWorkerLoRAManager
from loradock.engine.punica import LoRAMapping
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.manager_examples import PROMPT, VOCABULARY, base

torch.set_num_threads(1)
# PEFT's hooks for LoRA-GA are on modules whose inputs are token ids.
pytestmark = pytest.mark.filterwarnings("ignore:Full backward hook is firing:UserWarning")
TOKENS = torch.tensor([PROMPT])
TARGETS = ["q_proj", "down_proj"]


def train_step(model: PreTrainedModel | PeftModel) -> None:
    model(input_ids=TOKENS, labels=TOKENS).loss.backward()


def prepare_corda(model: PreTrainedModel, config: LoraConfig) -> None:
    preprocess_corda(model, config, run_model=lambda: model(input_ids=TOKENS))


def prepare_lora_ga(model: PreTrainedModel, config: LoraConfig) -> None:
    preprocess_loraga(model, config, train_step=lambda: train_step(model))


class Start(NamedTuple):
    """A value of `init_lora_weights`, and what PEFT needs for it."""

    value: bool | str
    fields: Mapping[str, Any] = MappingProxyType({})
    prepare: Callable[[PreTrainedModel, LoraConfig], None] = lambda *_: None


STARTS = (
    *(Start(value) for value in (True, False, "gaussian", "eva", "orthogonal", "mica")),
    *(Start(value) for value in ("olora", "pissa", "pissa_niter_2")),
    Start("corda", {"corda_config": CordaConfig()}, prepare_corda),
    Start("lora_ga", {"lora_ga_config": LoraGAConfig()}, prepare_lora_ga),
)
CONVERTED = [start for start in STARTS if start.value in ("olora", "pissa", "corda", "lora_ga")]


def begin(start: Start) -> tuple[PeftModel, bool]:
    """Return PEFT's model before training, and whether PEFT changed the base weights."""
    torch.manual_seed(5)
    model = deepcopy(base()).requires_grad_(True)
    before = {name: weight.clone() for name, weight in linear_weights(model).items()}
    config = LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=list(TARGETS),
        init_lora_weights=start.value,
        task_type="CAUSAL_LM",
        **start.fields,
    )
    start.prepare(model, config)
    model.zero_grad()
    tuned = get_peft_model(model, config)
    after = linear_weights(tuned)
    return tuned, any(not torch.equal(weight, after[name]) for name, weight in before.items())


def linear_weights(model: PreTrainedModel | PeftModel) -> dict[str, Tensor]:
    return {
        name.replace("base_model.model.", "").replace(".base_layer", ""): weight.detach()
        for name, weight in model.named_parameters()
        if "lora_" not in name
    }


def train(model: PeftModel) -> PeftModel:
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        optimizer.zero_grad()
        train_step(model)
        optimizer.step()
    return model.eval().requires_grad_(False)


@torch.no_grad()
def check_served(directory: Path, reference: PeftModel) -> None:
    """Serve an adapter on the model as it was before training."""
    manager = LRUCacheLoRAModelManager(
        deepcopy(base()), 4, 64, VOCABULARY, LoRAConfig(max_lora_rank=8), "cpu"
    )
    assert LRUCacheWorkerLoRAManager(manager).add_adapter(LoRARequest("a", 1, str(directory)))
    manager.set_adapter_mapping(LoRAMapping([1] * len(PROMPT), [1], is_prefill=True))
    expected = reference(input_ids=TOKENS).logits
    assert relative_error(manager.model(TOKENS).logits, expected) < 1e-4
    assert relative_error(base()(TOKENS).logits, expected) > 1e-2, "the adapter has an effect"


def config_of(directory: Path) -> dict[str, Any]:
    return json.loads((directory / "adapter_config.json").read_text())


@pytest.mark.parametrize("start", STARTS, ids=lambda start: str(start.value))
def test_an_adapter_is_served_unless_its_start_changed_the_base(
    start: Start, tmp_path: Path
) -> None:
    model, changed = begin(start)
    assert changed == (str(start.value).startswith(BASE_CHANGING_INITIALISATIONS))
    train(model).save_pretrained(tmp_path)
    assert config_of(tmp_path)["init_lora_weights"] == start.value
    if changed:
        with pytest.raises(AdapterConfigRefused, match="changing the base weights"):
            check_served(tmp_path, model)
    else:
        check_served(tmp_path, model)


@pytest.mark.parametrize("start", CONVERTED, ids=lambda start: str(start.value))
def test_a_converted_adapter_is_a_plain_one(start: Start, tmp_path: Path) -> None:
    model, _ = begin(start)
    first, converted = tmp_path / "first", tmp_path / "converted"
    model.peft_config["default"].init_lora_weights = True
    model.save_pretrained(first)
    model.peft_config["default"].init_lora_weights = start.value
    train(model).save_pretrained(converted, path_initial_model_for_weight_conversion=str(first))
    saved = config_of(converted)
    assert (saved["init_lora_weights"], saved["r"], saved["lora_alpha"]) == (True, 8, 12)
    check_served(converted, model)


def test_every_value_that_peft_knows_is_in_one_of_the_lists() -> None:
    """A new version of PEFT may have others: then this fails, and they are refused."""
    known = {*HARMLESS_INITIALISATIONS, *BASE_CHANGING_INITIALISATIONS}
    annotation = ast.parse(str(LoraConfig.__dataclass_fields__["init_lora_weights"].type))
    literals = strings_in(annotation)
    assert {*HARMLESS_INITIALISATIONS} < {*literals}
    compared = [
        name
        for path in Path(peft.tuners.lora.__file__).parent.glob("*.py")
        for name in names_compared_with(path.read_text(), "init_lora_weights")
    ]
    assert {"lora_ga", "pissa"} <= {*compared}
    for name in (*literals, *compared):
        # "pissa_niter_" and a number is a form of "pissa".
        assert name in known or "_niter_" in name, name


def names_compared_with(source: str, variable: str) -> list[str]:
    """Return the strings in comparisons, and in calls of `startswith`, that have a variable."""
    found: list[str] = []
    for node in ast.walk(ast.parse(source)):
        is_call = isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)
        if isinstance(node, ast.Compare) or (is_call and node.func.attr == "startswith"):
            names = [getattr(part, "attr", getattr(part, "id", "")) for part in ast.walk(node)]
            found += strings_in(node) if variable in names else []
    return found


def strings_in(tree: ast.AST) -> list[str]:
    constants = [node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)]
    return [value for value in constants if isinstance(value, str)]
