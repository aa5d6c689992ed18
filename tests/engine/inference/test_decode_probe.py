"""Which models' decode steps can be captured is asked of the models; the rest is told why not."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import structlog
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from engine.config import EngineConfig, LoRAConfig
from engine.inference.cuda_graphs import CapturedSteps, Step, WatchedSteps
from engine.inference.decode import FixedSteps, GrowingSteps
from engine.inference.decode_probe import (
    StepsRefused,
    TrialMapper,
    choose_steps,
    fixed_or_growing,
    try_fixed_steps,
)
from engine.inference.runner import inference_of
from engine.kernels import choose_kernels
from engine.models.causal_model import PreparedModel
from engine.models.pooling_model import PooledModel
from engine.punica import PunicaWrapper
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.engine_examples import tiny_config
from tests.support.engine.replayed_steps import TapeCapture
from tests.support.engine.step_examples import GROWING
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX, Architecture
from tests.support.models.expert_adapters import make_model
from tests.support.models.expert_examples import SERVED_FAMILIES
from tests.support.models.pooling_examples import EMBEDDERS

pytest_plugins = ("tests.support.engine.engine_fixtures",)

CPU = torch.device("cpu")

SERVED = [one.model_type for one in ARCHITECTURES if not one.refused]


def architecture(model_type: str) -> Architecture:
    return next(one for one in ARCHITECTURES if one.model_type == model_type)


def refusal(model: PreparedModel) -> str:
    """Why a model's steps can't be captured; empty where they can, and are right when replayed."""
    punica = PunicaWrapper(model.device, 16, choose_kernels("cpu"))
    try:
        for runner in (WatchedSteps(CPU), CapturedSteps(punica, TapeCapture())):
            try_fixed_steps(model, TrialMapper(punica, 2), runner)
    except StepsRefused as error:
        return str(error)
    return ""


def prepare(model: object, context: int = CONTEXT_TOKENS_MAX) -> PreparedModel:
    return PreparedModel(model, LoRAConfig(), context_tokens_max=context)


@pytest.mark.parametrize("model_type", SERVED)
def test_every_served_architecture_is_tried(model_type: str) -> None:
    found = refusal(prepare(architecture(model_type).build()))
    assert GROWING.get(model_type, "") in found
    assert bool(found) == (model_type in GROWING)


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_experts_are_routed_without_the_host(family: str) -> None:
    assert refusal(prepare(make_model(family))) == ""


def test_a_window_that_is_wider_than_the_trial_is_found_by_the_most_columns() -> None:
    row = architecture("gpt_neo")
    fields = {**row.fields, "window_size": 64, "max_position_embeddings": 256}
    model = prepare(replace(row, fields=fields).build(), context=256)
    assert "256 fixed columns answers otherwise" in refusal(model)


def dynamic_rope() -> LlamaForCausalLM:
    """A model whose frequencies follow the longest position so far, which the host looks at."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return LlamaForCausalLM(tiny_config(rope_parameters=parameters))


class AsksForAToken(LlamaForCausalLM):
    """Looks at what the tokens are, on the host."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **others: object) -> object:
        if input_ids.shape[1] == 1 and bool((input_ids == 255).any()):
            attention_mask = attention_mask.clone()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)


class CountsColumns(LlamaForCausalLM):
    """Needs the number of columns so far, as a number."""

    def forward(self, input_ids: Tensor, past_key_values: object, **others: object) -> object:
        assert isinstance(past_key_values.get_seq_length(), int)
        return super().forward(input_ids=input_ids, past_key_values=past_key_values, **others)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dynamic_rope, "HostRead: aten.item"),
        (lambda: AsksForAToken(tiny_config()), "HostRead: aten.item"),
        (lambda: CountsColumns(tiny_config()), "AssertionError"),
    ],
)
def test_a_model_that_asks_the_host_is_refused(make: Callable[[], object], reason: str) -> None:
    torch.manual_seed(0)
    assert reason in refusal(prepare(make()))


@pytest.fixture
def punica(prepared_model: PreparedModel) -> PunicaWrapper:
    return PunicaWrapper(prepared_model.device, 16, choose_kernels("cpu"))


def test_steps_are_captured_only_where_it_is_said(
    prepared_model: PreparedModel, punica: PunicaWrapper, engine_config: EngineConfig
) -> None:
    assert isinstance(choose_steps(prepared_model, punica, 2, engine_config), GrowingSteps)


def test_a_cpu_captures_nothing(
    make_engine: Callable[..., EngineBench], engine_config: EngineConfig
) -> None:
    with pytest.raises(ValueError, match="capture_steps is on, on device 'cpu'"):
        make_engine(capture_steps=True)


def test_ranks_and_models_that_embed_capture_nothing(
    prepared_model: PreparedModel,
    punica: PunicaWrapper,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(engine_config, capture_steps=True)

    class Two:
        is_single = False

    monkeypatch.setattr(prepared_model, "group", Two())
    with pytest.raises(ValueError, match="several ranks"):
        choose_steps(prepared_model, punica, 2, config)
    embedder = PooledModel(EMBEDDERS[0].make(), LoRAConfig(), task="embed")
    with pytest.raises(ValueError, match="served to embed"):
        inference_of(embedder, punica, None, config, None, None)


@pytest.mark.parametrize(("model_type", "kind"), [("llama", FixedSteps), ("mpt", GrowingSteps)])
def test_the_engine_says_why_it_captures_nothing(
    punica: PunicaWrapper, model_type: str, kind: type
) -> None:
    model = prepare(architecture(model_type).build())
    with structlog.testing.capture_logs() as logs:
        steps = fixed_or_growing(model, punica, 2, WatchedSteps(CPU))
    assert isinstance(steps, kind)
    if kind is GrowingSteps:
        (log,) = logs
        assert log["event"] == "decode steps are not captured"
        assert "HostRead" in log["reason"]
    else:
        assert logs == []


def test_a_step_that_is_not_captured_at_start_is_not_captured_later(
    punica: PunicaWrapper,
) -> None:
    def capture(step: Step) -> Step:
        raise RuntimeError("no graphs today")

    model = prepare(architecture("llama").build())
    with structlog.testing.capture_logs() as logs:
        steps = fixed_or_growing(model, punica, 2, CapturedSteps(punica, capture))
    assert isinstance(steps, GrowingSteps)
    assert "no graphs today" in logs[-1]["reason"]


def test_the_switch_is_on_or_off(engine_config: EngineConfig) -> None:
    with pytest.raises(ValueError, match="capture_steps is 1"):
        replace(engine_config, capture_steps=1)
