"""Generation by captured steps answers as without capture; skipped without a CUDA device."""

from dataclasses import replace
from pathlib import Path

import pytest
import structlog
import torch

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.loading import load_model
from loradock.engine.parallel import SINGLE
from loradock.engine.punica import PunicaWrapper
from loradock.engine.serving import startup
from loradock.engine.serving.budget import StepBudget
from loradock.engine.serving.decoding import CudaCapture, GraphRunner
from loradock.engine.serving.forward import PackedModel
from loradock.engine.serving.startup import (
    PackedRefused,
    ProbeMapper,
    captured_or_none,
    probe_packed,
)
from loradock.messages.prompts import Sampling
from tests.support.engine.decode_examples import NOT_CAPTURED
from tests.support.engine.generation_bench import NAMES, REQUESTS, GenerationBench
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX

pytest_plugins = ("tests.support.engine.engine_fixtures",)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device is here"),
]

DEVICE = "cuda"


@pytest.fixture(scope="module")
def gpu_config(engine_config: EngineConfig) -> EngineConfig:
    return replace(engine_config, device=DEVICE)


@pytest.fixture(scope="module")
def gpu_model(gpu_config: EngineConfig, lora_config: LoRAConfig) -> CausalModel:
    model = load_model(gpu_config, lora_config)
    model.eos_ids = frozenset()
    return model


@pytest.fixture
def captured(monkeypatch: pytest.MonkeyPatch) -> list[GraphRunner]:
    """Return the list of all runners that engines capture with from now on."""
    made: list[GraphRunner] = []

    def make(*arguments: object) -> GraphRunner:
        made.append(GraphRunner(*arguments))
        return made[-1]

    monkeypatch.setattr(startup, "GraphRunner", make)
    return made


def run_all(bench: GenerationBench, requests: list[tuple]) -> list[tuple[list[int], str]]:
    """Start a row every second step, run all rows to their ends, and return their outputs."""
    ops = []
    for request in requests:
        ops.append(bench.start(*request))
        bench.run(steps=2)
    bench.run()
    return [bench.output(op) for op in ops]


@pytest.mark.parametrize(
    "lora_fields", [{}, {"specialize_active_lora": True}, {"dual_stream": True}]
)
def test_captured_generation_equals_dynamic_generation(
    gpu_model: CausalModel,
    adapter_root: Path,
    gpu_config: EngineConfig,
    captured: list[GraphRunner],
    lora_fields: dict[str, bool],
) -> None:
    lengths = [3, 14, 1, 9, 5, 16, 2, 90]
    requests = [
        (*REQUESTS[at % len(REQUESTS)], Sampling(max_tokens=lengths[at % 8])) for at in range(24)
    ]
    config = replace(gpu_config, capture_steps=False)
    dynamic = GenerationBench(gpu_model, adapter_root, config, **lora_fields)
    expected = [dynamic.alone(*request) for request in requests]
    bench = GenerationBench(gpu_model, adapter_root, gpu_config, **lora_fields)
    for _ in range(2):
        assert run_all(bench, requests) == expected
    (steps,) = captured
    found = [key.launches.tokens for key in steps.keys]
    groups = {bounds.groups for bounds in found if bounds is not None and bounds.tokens >= 8}
    if "specialize_active_lora" in lora_fields:
        # Five slots: five active adapters are rounded up to them, and not to eight.
        assert len(groups) > 1
        assert groups <= {1, 2, 4, len(NAMES)}
    else:
        assert groups == {len(NAMES)}


@pytest.mark.parametrize("model_type", [one.model_type for one in ARCHITECTURES])
def test_every_served_architecture_is_captured_or_logs_why_not(model_type: str) -> None:
    one = next(one for one in ARCHITECTURES if one.model_type == model_type)
    model = CausalModel(one.build().to(DEVICE), LoRAConfig(), max_model_len=CONTEXT_TOKENS_MAX)
    punica = PunicaWrapper(model.device, 16, choose_kernels(model.device.type))
    mapper = ProbeMapper(punica, 2)
    if model_type in NOT_CAPTURED:
        with pytest.raises(PackedRefused):
            probe_packed(model, mapper.map, punica.attention)
        return
    probe_packed(model, mapper.map, punica.attention)
    packed = PackedModel(model, 8, kernel=punica.attention, sequences_max=4)
    mapper.map(1, 1)
    packed.allocate()
    runner = GraphRunner(punica, CudaCapture(model.device))
    with structlog.testing.capture_logs() as logs:
        captured = captured_or_none(packed, runner, mapper, StepBudget(64, SINGLE))
    assert captured is not None, logs
    assert logs == []
