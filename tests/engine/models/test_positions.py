"""Rows of a batch have the positions that they have alone, regardless of the others' lengths."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.jobs import InlineJobs
from loradock.engine.models.binding import bind_lora
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.positions import CONTEXT_TOKENS_DEFAULT
from loradock.engine.serving.scheduler import GenerationScheduler
from loradock.messages.prompts import Sampling
from tests.support.engine.engine_examples import relative_error
from tests.support.engine.generation_bench import SchedulerDriver
from tests.support.models.architectures import COMMON

TRAINED: Final = 32
"""The length that the schemes extend."""

FACTORS: Final = {"short_factor": [1.0] * 4, "long_factor": [3.0, 9.0, 2.0, 5.0]}
LONGROPE: Final = {"rope_type": "longrope", "original_max_position_embeddings": TRAINED, **FACTORS}

PROMPTS: Final = (3, 31, 32, 33, 50)
"""The lengths of the prompts; the last two rows are preempted once."""

STEPS: Final = 4


@dataclass(frozen=True)
class Scheme:
    """A model with a position scheme; `context`: its longest row."""

    model_type: str
    context: int
    rope: dict[str, Any] | None = None
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def has_lengths(self) -> bool:
        """Whether a row's length changes its positions."""
        return (self.rope or {}).get("rope_type") in {"longrope", "dynamic"}

    def build(self) -> PreTrainedModel:
        """Return a new random instance, the same every time."""
        torch.manual_seed(5)
        own = {**COMMON, "num_hidden_layers": 2, "max_position_embeddings": 128, **self.fields}
        if self.rope is not None:
            own["rope_parameters"] = {"rope_theta": 10_000.0, **self.rope}
        config_class = CONFIG_MAPPING[self.model_type]
        present = {name: value for name, value in own.items() if value is not None}
        return AutoModelForCausalLM.from_config(config_class(**present)).eval()


SCHEMES: Final = {
    "longrope, computed again": Scheme(
        "phi3", 128, LONGROPE, {"original_max_position_embeddings": TRAINED}
    ),
    "longrope": Scheme("llama", 128, LONGROPE),
    "longrope of experts": Scheme(
        "phimoe",
        128,
        {**LONGROPE, "short_mscale": 1.0, "long_mscale": 1.7},
        {"original_max_position_embeddings": TRAINED, "num_local_experts": 2},
    ),
    "yarn": Scheme(
        "qwen2",
        128,
        {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": TRAINED},
        {"max_position_embeddings": TRAINED},
    ),
    "dynamic": Scheme(
        "llama",
        128,
        {"rope_type": "dynamic", "factor": 4.0},
        {"max_position_embeddings": TRAINED},
    ),
    "linear": Scheme("llama", 128, {"rope_type": "linear", "factor": 4.0}),
    "llama3": Scheme(
        "llama",
        128,
        {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": TRAINED,
        },
    ),
    "ALiBi": Scheme("bloom", CONTEXT_TOKENS_DEFAULT, fields={"max_position_embeddings": None}),
}


def references(scheme: Scheme, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
    """Return what the model's own `generate` returns for each row alone."""
    model, found = scheme.build(), []
    for prompt in prompts:
        # A model with dynamic scaling keeps the frequencies of the longest row so far.
        own = copy.deepcopy(model)
        tokens = own.generate(
            torch.tensor([prompt]),
            attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
            max_new_tokens=STEPS,
            do_sample=False,
            eos_token_id=-1,
            pad_token_id=0,
        )
        found.append(tokens[0, len(prompt) :].tolist())
    return found


def driver_of(scheme: Scheme, **fields: Any) -> SchedulerDriver:
    model = CausalModel(scheme.build(), LoRAConfig())
    arena, punica, _ = bind_lora(model, LoRAConfig(), 1 << 16)
    config = EngineConfig(Path(), device="cpu", **fields)
    return SchedulerDriver(model, punica, arena, [None], config, [], InlineJobs())


def preempt(scheduler: GenerationScheduler, op: int) -> bool:
    """Let a sequence wait again that has generated tokens; return False before it has any."""
    found = [one for one in scheduler.batch.running if one.command.op == op]
    scheduler.batch.keep(lambda one: one not in found)
    scheduler.on_preemption(found)
    return bool(found)


@pytest.mark.parametrize("name", SCHEMES)
def test_rows_below_across_and_above_the_trained_length_are_those_alone(name: str) -> None:
    scheme, sampling = SCHEMES[name], Sampling(max_tokens=STEPS, ignore_eos=True)
    # Prompts with one beginning, so that blocks would be shared among rows of unlike lengths.
    prompts = [tuple((7 * n + n * n) % 80 + 3 for n in range(length)) for length in PROMPTS]
    expected = references(scheme, prompts)
    for is_paged in (True, False) if scheme.has_lengths else (True,):
        driver = driver_of(scheme, paged_attention=is_paged, max_num_batched_tokens=16)
        assert driver.model.max_model_len == scheme.context
        assert (driver.model.row_lengths.limit == TRAINED) == scheme.has_lengths
        ops = [driver.start(None, prompt, sampling) for prompt in prompts]
        left = ops[-2:]
        while left:
            assert not driver.scheduler.is_idle
            driver.run(steps=1)
            left = [op for op in left if not preempt(driver.scheduler, op)]
        driver.run()
        assert [driver.output(op)[0] for op in ops] == expected, is_paged


@pytest.mark.parametrize("name", ["longrope", "dynamic"])
def test_vectors_of_rows_beyond_the_trained_length_are_those_alone(name: str) -> None:
    scheme = SCHEMES[name]
    model = PoolingModel(scheme.build().base_model, LoRAConfig(), task="embed")
    prompts = [[5 + (11 * n + n * n) % 80 for n in range(length)] for length in PROMPTS]
    found = model.forward(prompts)
    for prompt, vector in zip(prompts, found, strict=True):
        with torch.no_grad():
            alone = scheme.build().base_model(torch.tensor([prompt])).last_hidden_state[0, -1]
        assert relative_error(vector, alone) < 1e-5, len(prompt)
