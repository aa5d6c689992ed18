"""The budget of a step follows the model's own speed, also next to other programs."""

from collections.abc import Sequence
from types import SimpleNamespace

import pytest

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.loading import load_model
from loradock.engine.serving import startup
from loradock.engine.serving.startup import STEP_S_CPU, choose_budget

pytest_plugins = ("tests.support.engine.engine_fixtures",)

MEASURED_TOKENS = 64


@pytest.fixture
def model(engine_config: EngineConfig, lora_config: LoRAConfig) -> CausalModel:
    """A model of its own, which no engine has bound, so that its forward needs no mapping."""
    return load_model(engine_config, lora_config)


@pytest.mark.parametrize("durations", [(9.0, 0.1, 0.7, 0.4), (9.0, 0.4, 0.7, 0.1)])
def test_a_prefill_that_others_slow_down_does_not_lower_the_budget(
    durations: Sequence[float],
    model: CausalModel,
    engine_config: EngineConfig,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    readings = iter([reading for duration in durations for reading in (0.0, duration)])
    clock = SimpleNamespace(perf_counter=lambda: next(readings))
    monkeypatch.setattr(startup, "time", clock)
    mapper = SimpleNamespace(map=lambda *_: None)
    budget = choose_budget(model, mapper, engine_config, is_packed=True)  # type: ignore[arg-type]
    assert budget.tokens == int(MEASURED_TOKENS * STEP_S_CPU / min(durations))


def test_prompts_are_divided_only_if_no_rank_sees_a_difference(
    model: CausalModel, engine_config: EngineConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    mapper = SimpleNamespace(map=lambda *_: None)
    assert choose_budget(model, mapper, engine_config).chunks  # type: ignore[arg-type]
    monkeypatch.setattr(type(model.group), "all_true", lambda *_: False)
    assert not choose_budget(model, mapper, engine_config).chunks  # type: ignore[arg-type]
