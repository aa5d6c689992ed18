"""The choices at start: models whose decode steps can be captured, and the budget of a step."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import structlog
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.library.generation import cache_argument
from loradock.engine.models.loading import load_model
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.punica import PunicaWrapper
from loradock.engine.serving.decoding import (
    DecodeStep,
    DynamicDecode,
    GraphRunner,
    StaticDecode,
    SyncCheckedRunner,
)
from loradock.engine.serving.scheduler import choose_scheduler
from loradock.engine.serving.startup import (
    STEP_S_CPU,
    ProbeMapper,
    StaticDecodeRefused,
    choose_budget,
    choose_decode,
    probe_static_decode,
    static_or_dynamic,
)
from tests.support.engine.decode_examples import NOT_STATIC
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.engine_examples import tiny_config
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


def refusal(model: CausalModel) -> str:
    """Return why a model's steps can't be captured; empty where they can and replay correctly."""
    punica = PunicaWrapper(model.device, 16, choose_kernels("cpu"))
    try:
        for runner in (SyncCheckedRunner(CPU), GraphRunner(punica, TapeCapture())):
            probe_static_decode(model, ProbeMapper(punica, 2), runner)
    except StaticDecodeRefused as error:
        return str(error)
    return ""


def prepare(model: object, context: int = CONTEXT_TOKENS_MAX) -> CausalModel:
    return CausalModel(model, LoRAConfig(), max_model_len=context)


@pytest.mark.parametrize("model_type", SERVED)
def test_every_served_architecture_is_probed(model_type: str) -> None:
    found = refusal(prepare(architecture(model_type).build()))
    assert NOT_STATIC.get(model_type, "") in found
    assert bool(found) == (model_type in NOT_STATIC)


@pytest.mark.parametrize("family", SERVED_FAMILIES)
def test_experts_are_routed_without_a_host_sync(family: str) -> None:
    assert refusal(prepare(make_model(family))) == ""


def test_a_window_wider_than_the_short_probe_is_found_with_the_most_columns() -> None:
    row = architecture("gpt_neo")
    fields = {**row.fields, "window_size": 64, "max_position_embeddings": 256}
    model = prepare(replace(row, fields=fields).build(), context=256)
    assert "static step over 256 columns differs" in refusal(model)


def dynamic_rope() -> LlamaForCausalLM:
    """Return a model whose frequencies follow the length of each row, read by the host."""
    parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 2.0}
    return LlamaForCausalLM(tiny_config(rope_parameters=parameters))


class ReadsTokens(LlamaForCausalLM):
    """Reads the tokens on the host."""

    def forward(self, input_ids: Tensor, attention_mask: Tensor, **others: object) -> object:
        if input_ids.shape[1] == 1 and bool((input_ids == 255).any()):
            attention_mask = attention_mask.clone()
        return super().forward(input_ids=input_ids, attention_mask=attention_mask, **others)


class CountsColumns(LlamaForCausalLM):
    """Needs the number of columns so far as a Python number."""

    def forward(self, input_ids: Tensor, **others: object) -> object:
        cache = others.get(cache_argument(self))
        assert cache is None or isinstance(cache.get_seq_length(), int)
        return super().forward(input_ids=input_ids, **others)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (dynamic_rope, "HostSync: aten._unique2"),
        (lambda: ReadsTokens(tiny_config()), "HostSync: aten.item"),
        (lambda: CountsColumns(tiny_config()), "AssertionError"),
    ],
)
def test_a_model_that_reads_on_the_host_is_refused(make: Callable[[], object], reason: str) -> None:
    torch.manual_seed(0)
    assert reason in refusal(prepare(make()))


@pytest.fixture
def punica(prepared_model: CausalModel) -> PunicaWrapper:
    return PunicaWrapper(prepared_model.device, 16, choose_kernels("cpu"))


def test_a_cpu_captures_nothing(
    make_engine: Callable[..., EngineBench], engine_config: EngineConfig
) -> None:
    with pytest.raises(ValueError, match="capture_steps is on, and the device is 'cpu'"):
        make_engine(capture_steps=True)


def test_ranks_and_models_that_embed_capture_nothing(
    prepared_model: CausalModel,
    punica: PunicaWrapper,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = replace(engine_config, capture_steps=True)

    class Two:
        is_trivial = False

    monkeypatch.setattr(prepared_model, "group", Two())
    with pytest.raises(ValueError, match="several ranks"):
        choose_decode(prepared_model, punica, 2, config)
    embedder = PoolingModel(EMBEDDERS[0].make(), LoRAConfig(), task="embed")
    with pytest.raises(ValueError, match="served to embed"):
        choose_scheduler(embedder, punica, None, config, None, None)


def test_steps_of_the_base_and_of_an_adapter_are_tried(punica: PunicaWrapper) -> None:
    """They launch different kernels."""
    launched = set()

    class Noting(SyncCheckedRunner):
        def run(self, step: DecodeStep, shape: Hashable) -> Tensor:
            launched.add(punica.launch_key.tokens is not None)
            return super().run(step, shape)

    model = prepare(architecture("llama").build())
    assert isinstance(static_or_dynamic(model, punica, 2, Noting(CPU)), StaticDecode)
    assert launched == {False, True}


@pytest.mark.parametrize(("model_type", "kind"), [("llama", StaticDecode), ("mpt", DynamicDecode)])
def test_the_reason_for_capturing_nothing_is_logged(
    punica: PunicaWrapper, model_type: str, kind: type
) -> None:
    model = prepare(architecture(model_type).build())
    with structlog.testing.capture_logs() as logs:
        strategy = static_or_dynamic(model, punica, 2, SyncCheckedRunner(CPU))
    assert isinstance(strategy, kind)
    if kind is DynamicDecode:
        (log,) = logs
        assert log["event"] == "decode steps are not captured"
        assert "HostSync" in log["reason"]
    else:
        assert logs == []


def test_a_step_whose_capture_fails_at_start_is_never_captured(
    punica: PunicaWrapper,
) -> None:
    def capture(step: DecodeStep) -> DecodeStep:
        raise RuntimeError("no graphs today")

    model = prepare(architecture("llama").build())
    with structlog.testing.capture_logs() as logs:
        strategy = static_or_dynamic(model, punica, 2, GraphRunner(punica, capture))
    assert isinstance(strategy, DynamicDecode)
    assert "no graphs today" in logs[-1]["reason"]


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
