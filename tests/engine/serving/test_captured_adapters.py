"""Captured steps with adapters, replayed for other mappings, slots and weights, without a GPU.

Kernels read the tables alone, and a tape stands in for a graph.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from loradock.engine.adapters import read_adapter
from loradock.engine.config import EngineConfig
from loradock.engine.models import binding
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import PunicaWrapper
from loradock.engine.residency.staging import stage
from loradock.engine.serving import startup
from loradock.engine.serving.decoding import DecodeStrategy, GraphRunner, StaticDecode
from loradock.messages.prompts import Sampling
from tests.support.engine.generation_bench import NAMES, PROMPTS, REQUESTS, GenerationBench
from tests.support.engine.table_kernels import table_kernels, use_fixed_tables
from tests.support.engine.tape_capture import TapeCapture

pytest_plugins = ("tests.support.engine.engine_fixtures",)

LENGTHS = [3, 14, 1, 9, 5, 16, 2, 70]
MIXED = [(*REQUESTS[at % len(REQUESTS)], Sampling(max_tokens=LENGTHS[at % 8])) for at in range(24)]

MakeBench = Callable[..., GenerationBench]


@pytest.fixture
def capture() -> TapeCapture:
    return TapeCapture()


@pytest.fixture
def make_bench(
    prepared_model: CausalModel,
    adapter_root: Path,
    engine_config: EngineConfig,
    capture: TapeCapture,
    monkeypatch: pytest.MonkeyPatch,
    no_eos: None,
) -> MakeBench:
    """Return a maker of benches; the last one that was made binds the model's layers."""

    def choose(model: CausalModel, punica: PunicaWrapper, *_: object) -> DecodeStrategy:
        use_fixed_tables(punica.grouper, monkeypatch)
        return StaticDecode(model, GraphRunner(punica, capture))

    def make(is_captured: bool, **lora_fields: object) -> GenerationBench:
        if is_captured:
            monkeypatch.setattr(startup, "choose_decode", choose)
            monkeypatch.setattr(binding, "choose_kernels", lambda *_, **__: table_kernels())
        config = replace(engine_config, paged_attention=False)
        return GenerationBench(prepared_model, adapter_root, config, **lora_fields)

    return make


@pytest.mark.parametrize("specialize_active", [False, True])
def test_rows_with_adapters_that_join_and_leave_answer_as_alone(
    make_bench: MakeBench, capture: TapeCapture, specialize_active: bool
) -> None:
    bench = make_bench(is_captured=False)
    expected = [bench.alone(*request) for request in MIXED]
    bench = make_bench(is_captured=True, specialize_active_lora=specialize_active)
    for _ in range(2):
        assert bench.outputs(MIXED, steps_between=2) == expected
    assert capture.captures < capture.replays / 4


def test_an_adapter_that_replaces_another_in_its_slot_is_the_one_that_is_used(
    make_bench: MakeBench, adapter_root: Path, capture: TapeCapture
) -> None:
    """The same steps are replayed for adapters of other ranks, modules and places."""
    names, sampling = ("everything", "output", "mlp", "patterns"), Sampling(max_tokens=9)
    bench = make_bench(is_captured=False)
    expected = [bench.alone(name, prompt, sampling) for name in names for prompt in PROMPTS]
    bench, ops, captures = make_bench(is_captured=True), [], set()
    target = bench.model.adapter_target(bench.lora_config)
    for generation, name in enumerate(names, 2):
        loaded = read_adapter(name, [adapter_root], target)
        bench.blob = stage(loaded.model, bench.model.shapes, torch.float32, False)
        fields = {"adapter_id": 10 * generation, "generation": generation}
        bench.arena.reset(0, generation - 1)
        bench.write(0, **fields)
        ops += [bench.start(NAMES[0], prompt, sampling, **fields) for prompt in PROMPTS]
        bench.run()
        captures.add(capture.captures)
    assert [bench.output(op) for op in ops] == expected
    assert len(captures) == 1
