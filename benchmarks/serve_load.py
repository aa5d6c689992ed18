"""What the figures `serve.*` share: a model and adapters made here, and a load of requests."""

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

ADAPTERS: Final = 8
"""The adapters of the load, and the slots."""
ADAPTER_FILES: Final = 2 * ADAPTERS
RANK: Final = 16
LARGE_BYTES: Final = 84_000_000
"""The size of the adapters that are loaded next to a load."""
LARGE_FILES: Final = 2
CLIENTS: Final = 16
PROMPTS: Final = 32
PROMPT_TOKENS: Final = (50, 150)
LONG_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 48
CACHE_TOKENS: Final = 8192
"""The tokens of the caches of keys and values, ours and of continuous batching: twice what
`CLIENTS` requests of 256 tokens need."""
_LAYERS: Final = {
    "self_attn": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "mlp": ("gate_proj", "up_proj", "down_proj"),
}


class Shape(NamedTuple):
    """The sizes of a Llama model with float32 random weights."""

    hidden: int
    intermediate: int
    layers: int
    heads: int
    vocabulary: int

    def config(self) -> LlamaConfig:
        """Return the model's configuration."""
        return LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.heads,
            max_position_embeddings=1024,
        )

    def widths(self, name: str) -> tuple[int, int]:
        """Return the inputs and outputs of a linear layer."""
        if name == "down_proj":
            return self.intermediate, self.hidden
        return self.hidden, self.intermediate if name in _LAYERS["mlp"] else self.hidden

    @property
    def cache_bytes(self) -> int:
        """The bytes of `CACHE_TOKENS` tokens' keys and values, in float32."""
        return CACHE_TOKENS * self.layers * 2 * self.hidden * 4

    @property
    def large_rank(self) -> int:
        """The rank of a float32 adapter of `LARGE_BYTES`."""
        per_rank = sum(sum(self.widths(name)) for names in _LAYERS.values() for name in names)
        return max(1, LARGE_BYTES // (4 * self.layers * per_rank))


SHAPE: Final = Shape(768, 2048, 12, 12, 32_000)
"""About 85 million parameters in the layers, and 49 million in the vocabulary's matrices."""

SMALL: Final = Shape(256, 688, 4, 4, 8_000)
"""For a first look; its figures do not count."""


class Prompt(NamedTuple):
    """A request of the load: its adapter by number, None for the base model, and its tokens."""

    adapter: int | None
    tokens: tuple[int, ...]


class Load(NamedTuple):
    """A measured run: the seconds of this process, and the tokens that were generated.

    They are process CPU time on a CPU, because nothing waits there and other programs don't count,
    and wall time on another device.
    """

    seconds: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """The rate of all clients together."""
        return self.tokens / self.seconds


class Prompts:
    """Prompts of the same lengths in every run, and of other tokens, so that none is reused."""

    def __init__(self, vocabulary: int) -> None:
        self._vocabulary = vocabulary
        self._tokens = random.Random(1)  # noqa: S311

    def mixed(self, adapters: Sequence[int | None], count: int = PROMPTS) -> list[Prompt]:
        """Return prompts of mixed lengths for these adapters in turn."""
        lengths = random.Random(2)  # noqa: S311
        return [
            Prompt(
                adapters[number % len(adapters)], self.of_length(lengths.randint(*PROMPT_TOKENS))
            )
            for number in range(count)
        ]

    def of_length(self, count: int) -> tuple[int, ...]:
        """Return a prompt of `count` tokens."""
        return tuple(self._tokens.randrange(3, self._vocabulary) for _ in range(count))


def adapter_name(number: int) -> str:
    """Return the name of an adapter of `write_files`."""
    return f"adapter-{number}"


def large_name(number: int) -> str:
    """Return the name of an adapter of `LARGE_BYTES`."""
    return f"large-{number}"


def device_clock() -> float:
    """Return the seconds of `Load`."""
    return time.perf_counter() if torch.cuda.is_available() else time.process_time()


@contextmanager
def model_files(shape: Shape) -> Iterator[Path]:
    """Write a model to `model` in a new directory, and its adapters next to it."""
    with tempfile.TemporaryDirectory(prefix="loradock-serve-") as directory:
        root = Path(directory)
        torch.manual_seed(0)
        LlamaForCausalLM(shape.config()).save_pretrained(root / "model")
        for number in range(ADAPTER_FILES):
            write_adapter(root / adapter_name(number), shape, RANK)
        for number in range(LARGE_FILES):
            write_adapter(root / large_name(number), shape, shape.large_rank)
        yield root


def write_adapter(directory: Path, shape: Shape, rank: int) -> None:
    """Write an adapter on all linear layers."""
    directory.mkdir()
    modules = [name for names in _LAYERS.values() for name in names]
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": rank,
        "target_modules": modules,
    }
    (directory / "adapter_config.json").write_text(json.dumps(config))
    weights = {}
    for layer in range(shape.layers):
        for part, names in _LAYERS.items():
            for name in names:
                inputs, outputs = shape.widths(name)
                path = f"base_model.model.model.layers.{layer}.{part}.{name}"
                weights[f"{path}.lora_A.weight"] = torch.randn(rank, inputs) * 0.02
                weights[f"{path}.lora_B.weight"] = torch.randn(outputs, rank) * 0.02
    save_file(weights, directory / "adapter_model.safetensors")
