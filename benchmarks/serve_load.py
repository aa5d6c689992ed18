"""What the figures `serve.*` share: a model and adapters made here, an engine, and a load.

The engine runs in this process, without sockets: what is measured is its own work.
"""

import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

import torch
from msgspec import structs
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

from engine.config import EngineConfig, LoRAConfig
from engine.models.loading import load_model
from engine.worker.engine import Engine
from messages import commands, reports
from messages.prompts import Sampling
from messages.requests import TokensStreamed

ADAPTERS: Final = 8
RANK: Final = 16
CLIENTS: Final = 16
PROMPTS: Final = 32
PROMPT_TOKENS: Final = (50, 150)
OUTPUT_TOKENS: Final = 48
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


SHAPE: Final = Shape(768, 2048, 12, 12, 32_000)
"""About 85 million parameters in the layers, and 49 million in the vocabulary's matrices."""

SMALL: Final = Shape(256, 688, 4, 4, 8_000)
"""For a first look; its figures do not count."""


class Load(NamedTuple):
    """A measured run: the seconds of this process, and the tokens that were streamed.

    They are process CPU time on a CPU, because the engine never waits there and other programs
    don't count, and wall time on another device.
    """

    seconds: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        """The rate of all clients together."""
        return self.tokens / self.seconds


class ServedEngine:
    """An engine whose adapters 1 to `ADAPTERS` are in the slots 0 to `ADAPTERS - 1`."""

    def __init__(self, config: EngineConfig) -> None:
        lora = LoRAConfig(max_lora_rank=RANK, max_loras=ADAPTERS, lora_dtype="float32")
        model = load_model(config, lora)
        self._engine = Engine(model, config, lora, "benchmark")
        self._vocabulary = model.vocab_size
        self._clock = time.process_time if model.device.type == "cpu" else time.perf_counter
        self._op = 0
        for number in range(ADAPTERS):
            self._activate(number)

    def run(self, adapters: Sequence[int], sampling: Sampling, seed: int = 0) -> Load:
        """Run `PROMPTS` requests for these adapters in turn, `CLIENTS` at a time; 0: the base."""
        source = random.Random(seed)  # noqa: S311 - the same prompts in every run
        waiting = [
            (adapters[number % len(adapters)], self._prompt(source)) for number in range(PROMPTS)
        ]
        sampling = structs.replace(sampling, max_tokens=OUTPUT_TOKENS, ignore_eos=True)
        running, tokens = 0, 0
        started = self._clock()
        while waiting or running:
            while waiting and running < CLIENTS:
                adapter, prompt = waiting.pop()
                self._start(adapter, prompt, sampling)
                running += 1
            self._engine.step()
            for report in self._engine.poll():
                if isinstance(report, TokensStreamed):
                    tokens += len(report.tokens)
                else:
                    assert isinstance(report, reports.GenerationEnded), report
                    running -= 1
        return Load(self._clock() - started, tokens)

    def _prompt(self, source: random.Random) -> tuple[int, ...]:
        count = source.randint(*PROMPT_TOKENS)
        return tuple(source.randrange(3, self._vocabulary) for _ in range(count))

    def _start(self, adapter: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        self._op += 1
        slot, generation = (adapter - 1, 1) if adapter else (-1, 0)
        self._engine.submit(
            commands.StartGeneration(
                self._op, f"r-{self._op}", adapter, slot, generation, prompt, sampling
            )
        )

    def _activate(self, number: int) -> None:
        name, adapter_id = adapter_name(number), number + 1
        checked = self._do(commands.CheckAdapter, adapter_id, name, name)
        assert isinstance(checked, reports.AdapterChecked), checked
        self._do(commands.LoadWeights, adapter_id, name, name, checked.fingerprint)
        self._do(commands.StageWeights, adapter_id)
        self._do(commands.WriteSlot, adapter_id, number, 1)

    def _do(self, kind: type, *fields: object) -> reports.Report:
        """Execute a command and wait for its report."""
        self._op += 1
        self._engine.submit(kind(self._op, *fields))
        while not (found := self._engine.poll()):
            time.sleep(0.001)
        assert not isinstance(found[0], reports.OperationFailed), found[0]
        return found[0]


def adapter_name(number: int) -> str:
    """Return the name of an adapter of `write_files`."""
    return f"adapter-{number}"


@contextmanager
def served_engine(shape: Shape) -> Iterator[ServedEngine]:
    """Write the files of a model and of its adapters, and serve them."""
    with tempfile.TemporaryDirectory(prefix="loradock-serve-") as directory:
        root = Path(directory)
        write_files(root, shape)
        config = EngineConfig(root / "model", (root,), max_num_seqs=CLIENTS)
        yield ServedEngine(config)


def write_files(root: Path, shape: Shape) -> None:
    """Write the model to `root/model`, and `ADAPTERS` adapters on all linear layers next to it."""
    torch.manual_seed(0)
    LlamaForCausalLM(shape.config()).save_pretrained(root / "model")
    for number in range(ADAPTERS):
        directory = root / adapter_name(number)
        directory.mkdir()
        modules = [name for names in _LAYERS.values() for name in names]
        config = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": modules}
        (directory / "adapter_config.json").write_text(json.dumps(config))
        save_file(_weights(shape), directory / "adapter_model.safetensors")


def _weights(shape: Shape) -> dict[str, torch.Tensor]:
    sizes = {
        "gate_proj": (shape.hidden, shape.intermediate),
        "down_proj": (shape.intermediate, shape.hidden),
    }
    sizes["up_proj"] = sizes["gate_proj"]
    found = {}
    for layer in range(shape.layers):
        for part, names in _LAYERS.items():
            for name in names:
                inputs, outputs = sizes.get(name, (shape.hidden, shape.hidden))
                path = f"base_model.model.model.layers.{layer}.{part}.{name}"
                found[f"{path}.lora_A.weight"] = torch.randn(RANK, inputs) * 0.02
                found[f"{path}.lora_B.weight"] = torch.randn(outputs, RANK) * 0.02
    return found
