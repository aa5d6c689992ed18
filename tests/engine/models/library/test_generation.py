"""A library whose names changed is served right: by names that were found, or more slowly."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers.cache_utils import Cache
from transformers.modeling_outputs import CausalLMOutputWithPast

from loradock.engine.config import LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.library.generation import cache_argument, generated_logits
from tests.support.engine.engine_bench import PROMPT as PROMPT_OF_BENCH
from tests.support.models.renamed_library import Served
from tests.support.sources import ROOT

pytest_plugins = ("tests.support.engine.engine_fixtures",)
torch.set_num_threads(1)

CONFIG = LlamaConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    max_position_embeddings=64,
    eos_token_id=5,
)
PROMPT, STEPS = [9, 8, 7, 6], [5, 4, 0]
CACHE = cache_argument(LlamaForCausalLM(CONFIG))
"""The name in this version of the library."""
LORA = LoRAConfig(max_lora_rank=8, max_loras=1, lora_dtype="float32")


class Renamed(LlamaForCausalLM):
    """The argument of the cache has another name."""

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        memory: Cache | None = None,
        use_cache: bool | None = None,
        logits_to_keep: Any = 0,
    ) -> CausalLMOutputWithPast:
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            **{CACHE: memory},
        )


class OwnCache(DynamicCache):
    """A cache that only the model makes."""


class Misread(LlamaForCausalLM):
    """Its own loop keeps the state in one place, and returns it under a name that it ignores."""

    def _prepare_cache_for_generation(
        self, generation_config: Any, model_kwargs: dict[str, Any], *_: object, **__: object
    ) -> None:
        if generation_config.use_cache:
            model_kwargs[CACHE] = OwnCache()

    def _update_model_kwargs_for_generation(
        self, outputs: Any, model_kwargs: dict[str, Any], *_: object, **__: object
    ) -> dict[str, Any]:
        mask = model_kwargs.get("attention_mask")
        if mask is not None:
            model_kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(1, 1)], dim=1)
        positions = model_kwargs.get("position_ids")
        if positions is not None:
            model_kwargs["position_ids"] = torch.cat([positions, positions[:, -1:] + 1], dim=1)
        return model_kwargs | {"memory": outputs.memory}

    def forward(
        self,
        input_ids: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
        use_cache: bool | None = None,
        memory: object = None,
        **options: Any,
    ) -> CausalLMOutputWithPast:
        del memory
        cache = options.pop(CACHE, None)
        if cache is not None and type(cache) is not OwnCache:
            raise ValueError("the model accepts its own cache alone")
        if use_cache and cache is None:
            cache = OwnCache()
        if cache is None or not cache.get_seq_length():
            attention_mask = (
                None if attention_mask is None else attention_mask[:, -input_ids.shape[1] :]
            )
        output = super().forward(
            input_ids,
            attention_mask,
            position_ids,
            use_cache=use_cache,
            **{CACHE: cache},
            **options,
        )
        returned = CausalLMOutputWithPast(logits=output.logits)
        returned.memory = cache
        return returned


def served_logits(model: CausalModel) -> torch.Tensor:
    """Return the logits after the prompt and after each step, as the engine computes them."""
    cache = model.new_cache([len(PROMPT)])
    found = [model.forward(torch.tensor([PROMPT]), cache)]
    for step in STEPS:
        cache.grow(1)
        found.append(model.forward(torch.tensor([[step]]), cache))
    return torch.cat(found)


def reference() -> LlamaForCausalLM:
    torch.manual_seed(3)
    return LlamaForCausalLM(CONFIG).eval()


def made(cls: type[LlamaForCausalLM]) -> LlamaForCausalLM:
    model = cls(CONFIG).eval()
    model.load_state_dict(reference().state_dict())
    return model


@pytest.mark.parametrize(
    ("cls", "batching", "argument"),
    [
        (LlamaForCausalLM, "padded", CACHE),
        (Renamed, "padded", "memory"),
        (Misread, "whole", CACHE),
    ],
)
def test_a_model_is_served_right_whatever_its_state_is_called(
    cls: type[LlamaForCausalLM], batching: str, argument: str
) -> None:
    """In the fastest way that a startup check finds right."""
    expected = generated_logits(reference(), PROMPT, STEPS)
    model = CausalModel(made(cls), LORA, max_model_len=64)
    assert (model.batching, model.cache_argument) == (batching, argument)
    assert torch.allclose(served_logits(model), expected, atol=1e-5)
    if batching == "whole":
        assert any("it is not what generate() computes" in reason for reason in model.refusals)


def test_a_library_with_other_names_runs_rows_one_by_one_and_says_why(
    model_directory: Path,
) -> None:
    """Arguments, layers and functions are renamed in its source, at import."""
    command = [sys.executable, "-m", "tests.support.models.renamed_library", model_directory, "12"]
    output = subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout
    found = msgspec.json.decode(output.splitlines()[-1], type=Served)
    model = LlamaForCausalLM.from_pretrained(model_directory).eval()
    expected = model.generate(torch.tensor([PROMPT_OF_BENCH]), max_new_tokens=12, do_sample=False)
    tokens = expected[0, len(PROMPT_OF_BENCH) :].tolist()
    assert len(tokens) > 4
    assert found.tokens == tokens[: len(found.tokens)]
    assert tokens[len(found.tokens) :] in ([], [model.config.eos_token_id])
    assert found.batching == "single"
    assert "this version of transformers has no Cache" in found.refusal


def test_the_forced_tokens_of_generate_may_end_a_text() -> None:
    """The steps of a startup check are any tokens, also the end token of the model."""
    model = reference()
    text = [*PROMPT, *STEPS]
    whole = model(torch.tensor([text])).logits[0, len(PROMPT) - 1 :]
    found = generated_logits(model, PROMPT, [CONFIG.eos_token_id, *STEPS[1:]])
    assert STEPS[0] == CONFIG.eos_token_id
    assert torch.allclose(found, whole, atol=1e-5)
