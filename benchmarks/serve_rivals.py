"""Other ways to serve the load of `serve.*`: `transformers` and PEFT, on a model of their own.

They serve static batches of `CLIENTS` prompts, padded on the left, or `transformers`' continuous
batching. The same prompts, numbers of tokens and greedy sampling as in our run.
"""

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import torch
from peft import PeftModel
from transformers import ContinuousBatchingConfig, GenerationConfig, LlamaForCausalLM

from benchmarks.serve_load import (
    ADAPTERS,
    CACHE_TOKENS,
    CLIENTS,
    OUTPUT_TOKENS,
    Load,
    Prompt,
    adapter_name,
    device_clock,
)

_BLOCK_TOKENS: Final = 256
"""The tokens of a block of continuous batching."""
_BATCH_TOKENS: Final = 512

_BASE: Final = "__base__"
"""PEFT's name for rows without an adapter."""


class Rivals:
    """The model below `root` in `transformers`, and the same with adapters in PEFT."""

    def __init__(self, root: Path) -> None:
        self._device = "cuda" if torch.cuda.is_available() else "cpu"
        self._base = self._load(root)
        names = [adapter_name(number) for number in range(ADAPTERS)]
        # PEFT changes the layers of its base model, so it has a copy of its own.
        self._peft = PeftModel.from_pretrained(self._load(root), root / names[0], names[0])
        for name in names[1:]:
            self._peft.load_adapter(root / name, name)
        self._peft.eval()

    def generate(self, prompts: Sequence[Prompt]) -> Load:
        """Run the prompts without adapters through `generate`."""
        return self._run_static(self._base, prompts, with_adapters=False)

    def peft(self, prompts: Sequence[Prompt]) -> Load:
        """Run the prompts with their adapters through PEFT's `generate`."""
        return self._run_static(self._peft, prompts, with_adapters=True)

    def continuous(self, prompts: Sequence[Prompt]) -> Load:
        """Run the prompts without adapters through `transformers`' continuous batching."""
        logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
        implementation = self._base.config._attn_implementation
        started = device_clock()
        outputs = self._base.generate_batch(
            [list(prompt.tokens) for prompt in prompts],
            _config(),
            # Without these it takes most of the memory, which makes it slower on a CPU.
            ContinuousBatchingConfig(
                num_blocks=CACHE_TOKENS // _BLOCK_TOKENS,
                max_batch_tokens=_BATCH_TOKENS,
                max_requests_per_batch=CLIENTS,
            ),
        )
        seconds = device_clock() - started
        self._base.set_attn_implementation(implementation)
        return Load(seconds, sum(len(one.generated_tokens) for one in outputs.values()))

    def _load(self, root: Path) -> LlamaForCausalLM:
        model = LlamaForCausalLM.from_pretrained(root / "model", dtype=torch.float32)
        model.generation_config.eos_token_id = None
        return model.to(self._device).eval()

    def _run_static(self, model: Any, prompts: Sequence[Prompt], *, with_adapters: bool) -> Load:
        started, tokens = device_clock(), 0
        for start in range(0, len(prompts), CLIENTS):
            batch = prompts[start : start + CLIENTS]
            named: dict[str, Any] = {}
            if with_adapters:
                named["adapter_names"] = [
                    _BASE if one.adapter is None else adapter_name(one.adapter) for one in batch
                ]
            ids, mask = (tensor.to(self._device) for tensor in _left_padded(batch))
            with torch.inference_mode():
                output = model.generate(
                    input_ids=ids, attention_mask=mask, generation_config=_config(), **named
                )
            tokens += (output.shape[1] - ids.shape[1]) * len(batch)
        return Load(device_clock() - started, tokens)


def _config() -> GenerationConfig:
    return GenerationConfig(max_new_tokens=OUTPUT_TOKENS, do_sample=False, pad_token_id=0)


def _left_padded(prompts: Sequence[Prompt]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the prompts' tokens and their mask, [prompts, longest] int64."""
    width = max(len(prompt.tokens) for prompt in prompts)
    rows = [[0] * (width - len(one.tokens)) + list(one.tokens) for one in prompts]
    mask = [[0] * (width - len(one.tokens)) + [1] * len(one.tokens) for one in prompts]
    return torch.tensor(rows), torch.tensor(mask)
