"""The choices at start: models whose decode steps can be captured, and the budget of a step."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import structlog
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.kernels.block_attention import BlockAttention, write_tokens
from loradock.engine.kernels.reference import reference_kernels
from loradock.engine.kernels.reference.attention import attend_reference
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.loading import load_model
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.parallel import SINGLE
from loradock.engine.punica import PunicaWrapper
from loradock.engine.serving.budget import StepBudget
from loradock.engine.serving.decoding import CapturedDecode, DecodeStep, GraphRunner
from loradock.engine.serving.forward import PackedModel
from loradock.engine.serving.scheduler import choose_scheduler
from loradock.engine.serving.startup import (
    STEP_S_CPU,
    PackedRefused,
    ProbeMapper,
    captured_or_none,
    check_capture,
    choose_attention,
    choose_budget,
    probe_packed,
)
from tests.support.engine.decode_examples import NOT_CAPTURED
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.engine_examples import tiny_config
from tests.support.engine.table_kernels import table_kernels, use_fixed_tables
from tests.support.engine.tape_capture import TapeCapture
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX, Architecture
from tests.support.models.expert_adapters import make_model
from tests.support.models.expert_examples import SERVED_FAMILIES
from tests.support.models.pooling_examples import EMBEDDERS

pytest_plugins = ("tests.support.engine.engine_fixtures",)

CPU = torch.device("cpu")

SERVED = [one.model_type for one in ARCHITECTURES]


def architecture(model_type: str) -> Architecture:
    return next(one for one in ARCHITECTURES if one.model_type == model_type)


@pytest.fixture
def punica(monkeypatch: pytest.MonkeyPatch) -> PunicaWrapper:
    wrapper = PunicaWrapper(CPU, 16, table_kernels())
    use_fixed_tables(wrapper.grouper, monkeypatch)
    return wrapper


def capture(
    model: CausalModel,
    punica: PunicaWrapper,
    make_capture: Callable[[DecodeStep], DecodeStep] | None = None,
) -> tuple[CapturedDecode | None, str]:
    """Return a model's captured steps, and why there are none."""
    mapper, runner = ProbeMapper(punica, 2), GraphRunner(punica, make_capture or TapeCapture())
    try:
        probe_packed(model, mapper.map, punica.attention)
    except PackedRefused as error:
        return None, str(error)
    packed = PackedModel(model, 8, kernel=punica.attention, sequences_max=4)
    mapper.map(1, 1)
    packed.allocate()
    with structlog.testing.capture_logs() as logs:
        captured = captured_or_none(packed, runner, mapper, StepBudget(64, SINGLE))
    reasons = [log["reason"] for log in logs if log["event"] == "decode steps are not captured"]
    assert list(model.refusals[-1:]) == [f"decode steps are not captured: {r}" for r in reasons]
    return captured, "".join(reasons)


def prepare(model: object, context: int = CONTEXT_TOKENS_MAX) -> CausalModel:
    return CausalModel(model, LoRAConfig(), max_model_len=context)


@pytest.mark.parametrize("model_type", SERVED)
def test_every_architecture_with_packed_passes_is_captured(
    model_type: str, punica: PunicaWrapper
) -> None:
    model = prepare(architecture(model_type).build())
    captured, reason = capture(model, punica)
    assert (captured is None) == (model_type in NOT_CAPTURED), reason
    assert NOT_CAPTURED.get(model_type, "") in reason
    assert bool(reason) == (captured is None)


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_experts_are_routed_without_a_host_sync(family: str, punica: PunicaWrapper) -> None:
    _, reason = capture(prepare(make_model(family)), punica)
    assert bool(reason) == (family in NOT_CAPTURED), reason
    assert NOT_CAPTURED.get(family, "") in reason


def dynamic_rope() -> LlamaForCausalLM:
    """Return a model whose frequencies follow the length of each row, read by the host."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return LlamaForCausalLM(tiny_config(rope_parameters=parameters))


class ReadsTokens(LlamaForCausalLM):
    """Reads the tokens on the host."""

    def forward(self, input_ids: Tensor, **others: object) -> object:
        if bool((input_ids == 255).any()):
            input_ids = input_ids.clone()
        return super().forward(input_ids=input_ids, **others)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dynamic_rope, "HostSync: aten._unique2"),
        (lambda: ReadsTokens(tiny_config()), "HostSync: aten.item"),
    ],
)
def test_a_model_that_reads_on_the_host_is_refused(
    make: Callable[[], object], reason: str, punica: PunicaWrapper
) -> None:
    torch.manual_seed(0)
    assert reason in capture(prepare(make()), punica)[1]


def test_a_cpu_captures_nothing(
    make_engine: Callable[..., EngineBench], engine_config: EngineConfig
) -> None:
    with pytest.raises(ValueError, match="capture_steps is on, and the device is 'cpu'"):
        make_engine(capture_steps=True)


def test_ranks_and_models_that_embed_capture_nothing(
    prepared_model: CausalModel, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(engine_config, capture_steps=True)

    class Two:
        is_trivial = False

    monkeypatch.setattr(prepared_model, "group", Two())
    with pytest.raises(ValueError, match="several ranks"):
        check_capture(prepared_model, config)
    embedder = PoolingModel(EMBEDDERS[0].make(), LoRAConfig(), task="embed")
    with pytest.raises(ValueError, match="served to embed"):
        choose_scheduler(embedder, punica, None, config, None, None)


def test_steps_of_the_base_and_of_an_adapter_are_captured(punica: PunicaWrapper) -> None:
    """They launch different kernels."""
    captured, _ = capture(prepare(architecture("llama").build()), punica)
    assert captured is not None
    assert isinstance(captured.runner, GraphRunner)
    launched = {key.launches.tokens is not None for key in captured.runner.keys}
    assert launched == {False, True}


def test_a_step_whose_capture_fails_at_start_is_never_captured(punica: PunicaWrapper) -> None:
    def fail(step: DecodeStep) -> DecodeStep:
        raise RuntimeError("no graphs today")

    model = prepare(architecture("llama").build())
    captured, reason = capture(model, punica, fail)
    assert captured is None
    assert "no graphs today" in reason


PROBED_TOKENS_MAX = 32
"""More than the tokens of any sequence that is run to compare a kernel."""


def attend_wrongly(y: Tensor, *operands: Any) -> None:
    attend_reference(y, *operands)
    y.mul_(1.01)


def attend_wrongly_in_parts(y: Tensor, *operands: Any) -> None:
    """Attend as a kernel whose variant for long sequences is wrong."""
    attend_reference(y, *operands)
    if operands[3].longest > PROBED_TOKENS_MAX:
        y.mul_(1.01)


def attend_shared_wrongly(y: Tensor, *operands: Any) -> None:
    """Attend as a kernel that is wrong for rows that share tokens."""
    attend_reference(y, *operands)
    if (shared := operands[3].shared) is not None and shared[:, 0].any():
        y.mul_(1.01)


def refuse(*_: Any) -> None:
    raise RuntimeError("no kernel today")


@pytest.mark.parametrize(
    ("attend", "backend", "is_used", "reason"),
    [
        (attend_reference, "auto", True, ""),
        (attend_reference, "torch", False, ""),
        (attend_wrongly, "auto", False, "differs from the model's own"),
        (attend_wrongly_in_parts, "auto", False, "differs from the model's own"),
        (attend_shared_wrongly, "auto", False, "rows that share a block differ"),
        (refuse, "auto", False, "no kernel today"),
    ],
)
def test_a_kernel_attends_if_its_logits_are_the_models_own(
    attend: Any, backend: str, is_used: bool, reason: str, engine_config: EngineConfig
) -> None:
    model = prepare(architecture("llama").build())
    kernel = BlockAttention(attend, write_tokens, shared_rows=2)
    punica = PunicaWrapper(CPU, 16, reference_kernels(False)._replace(attention=kernel))
    config = replace(engine_config, attention_backend=backend)
    with structlog.testing.capture_logs() as logs:
        chosen, _ = choose_attention(model, punica, ProbeMapper(punica, 2), config)
    assert chosen is (kernel if is_used else None)
    assert [reason in log["reason"] for log in logs] == [True] * bool(reason)
    assert any(reason in one for one in model.refusals) == bool(reason)


@pytest.fixture
def model(engine_config: EngineConfig, lora_config: LoRAConfig) -> CausalModel:
    """A model of its own, which no engine has bound, so that its forward needs no mapping."""
    return load_model(engine_config, lora_config)


@pytest.mark.parametrize("durations", [(3.0, 0.02, 0.7, 0.4), (3.0, 0.4, 0.7, 0.02)])
def test_a_prefill_that_others_slow_down_does_not_lower_the_budget(
    durations: Sequence[float],
    model: CausalModel,
    engine_config: EngineConfig,
) -> None:
    """The fastest of each of two sizes counts, without what a step of any size takes."""
    scaled = (*durations, durations[0], *(5 * duration for duration in durations[1:]))
    readings = [reading for duration in scaled for reading in (0.0, duration / 10)]
    mapper = SimpleNamespace(map=lambda *_: None)
    budget = choose_budget(
        model,
        mapper,  # type: ignore[arg-type]
        engine_config,
        is_packed=True,
        clock=iter(readings).__next__,
    )
    each_s = (0.01 - 0.002) / (128 - 16)
    step_s = 0.002 - 16 * each_s
    assert budget.tokens == pytest.approx((STEP_S_CPU - step_s) / each_s, abs=1)


def test_prompts_are_divided_only_if_no_rank_sees_a_difference(
    model: CausalModel, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapper = SimpleNamespace(map=lambda *_: None)
    assert choose_budget(model, mapper, engine_config).chunks  # type: ignore[arg-type]
    monkeypatch.setattr(type(model.group), "all_true", lambda *_: False)
    assert not choose_budget(model, mapper, engine_config).chunks  # type: ignore[arg-type]
