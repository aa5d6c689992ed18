"""Fixtures of the engine's tests: the tiny model and its adapters, made once per session.

A pytest plugin that tests name in `pytest_plugins`, so that other tests don't import torch.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import LlamaForCausalLM

from examples.tiny_recipe import build_tokenizer
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.loading import load_model
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.engine_examples import ADAPTERS, tiny_config
from tests.support.engine.generation_bench import GenerationBench
from tests.support.models.peft_adapters import save_adapter


@pytest.fixture(scope="session", autouse=True)
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A saved random model with a tokenizer whose ids are bytes."""
    directory = tmp_path_factory.mktemp("model")
    torch.manual_seed(7)
    LlamaForCausalLM(tiny_config()).save_pretrained(directory)
    build_tokenizer().save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def adapter_root(model_directory: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One directory per adapter, as peft saves it."""
    root = tmp_path_factory.mktemp("adapters")
    for seed, (name, fields) in enumerate(ADAPTERS.items()):
        base = LlamaForCausalLM.from_pretrained(model_directory)
        save_adapter(base, root / name, seed, task_type="CAUSAL_LM", **fields)
    return root


@pytest.fixture(scope="session")
def peft_models(model_directory: Path, adapter_root: Path) -> dict[str, PeftModel]:
    """The reference: each adapter on its own copy of the base model, by peft."""
    return {
        name: PeftModel.from_pretrained(
            LlamaForCausalLM.from_pretrained(model_directory), adapter_root / name
        ).eval()
        for name in ADAPTERS
    }


@pytest.fixture(scope="session")
def engine_config(model_directory: Path, adapter_root: Path) -> EngineConfig:
    return EngineConfig(model_directory, (adapter_root,), device="cpu", device_bytes_max=1 << 20)


@pytest.fixture(scope="session")
def lora_config() -> LoRAConfig:
    return LoRAConfig(max_lora_rank=16, max_loras=4)


@pytest.fixture(scope="session")
def prepared_model(engine_config: EngineConfig, lora_config: LoRAConfig) -> CausalModel:
    """The model as the engine prepares it; each engine that a test makes binds it again."""
    return load_model(engine_config, lora_config)


@pytest.fixture
def no_eos(prepared_model: CausalModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let outputs run to their limit: the model has no end-of-sequence token."""
    monkeypatch.setattr(prepared_model, "eos_ids", frozenset())


@pytest.fixture
def make_engine(
    prepared_model: CausalModel, engine_config: EngineConfig, lora_config: LoRAConfig
) -> Iterator[Callable[..., EngineBench]]:
    benches = []

    def make(**changes: object) -> EngineBench:
        benches.append(EngineBench(prepared_model, replace(engine_config, **changes), lora_config))
        return benches[-1]

    yield make
    for bench in benches:
        bench.engine.close()


@pytest.fixture
def bench_of(
    prepared_model: CausalModel, adapter_root: Path, engine_config: EngineConfig
) -> Callable[..., GenerationBench]:
    """Return a maker of schedulers with these changes of the configuration."""
    return lambda **changes: GenerationBench(
        prepared_model, adapter_root, replace(engine_config, **changes)
    )


@pytest.fixture
def bench(bench_of: Callable[..., GenerationBench]) -> GenerationBench:
    return bench_of()
