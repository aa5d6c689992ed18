"""The figures `models.*`: models with states of other kinds than keys and values.

One hybrid model, of convolutions and attention, runs a decode step over eight adapters and over
the base alone, with the same caches and layers.
"""

from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from transformers import Lfm2Config, Lfm2ForCausalLM

from benchmarks.figures import Figure, best_seconds, interleave
from benchmarks.rounds import threads
from loradock.engine.adapters.in_memory import dummy_adapter
from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage

ADAPTERS: Final = 8
RANK: Final = 16
SEQUENCES: Final = 16
PROMPT_TOKENS: Final = 32
ROUNDS: Final = 7
LIMIT: Final = 1.3
SHAPE: Final[dict[str, Any]] = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": 256,
    "block_auto_adjust_ff_dim": False,
    "layer_types": ["conv", "conv", "conv", "full_attention"] * 2,
}


def run() -> Iterator[Figure]:
    """Measure a decode step with one thread."""
    with threads(1):
        yield _hybrid()


@torch.inference_mode()
def _hybrid() -> Figure:
    torch.manual_seed(0)
    model = CausalModel(
        Lfm2ForCausalLM(Lfm2Config(**SHAPE)), LoRAConfig(max_lora_rank=RANK, max_loras=ADAPTERS)
    )
    if model.batching != "together":
        raise RuntimeError(f"the hybrid's rows are {model.batching}, not together")
    punica = _bound(model)
    adapters = [1 + row % ADAPTERS for row in range(SEQUENCES)]
    ours = _stepper(model, punica, adapters)
    base = _stepper(model, punica, [0] * SEQUENCES)
    seconds = interleave(lambda: best_seconds(ours, 3), lambda: best_seconds(base, 3), ROUNDS)
    ratio = seconds[0] / seconds[1]
    times = f"{ADAPTERS} adapters {seconds[0] * 1e3:.1f} ms, base {seconds[1] * 1e3:.1f} ms"
    name, target = "models.hybrid_vs_base", f"<= {LIMIT}"
    return Figure(name, ratio, "times as long", times, ratio, target, ratio <= LIMIT)


def _bound(model: CausalModel) -> PunicaWrapper:
    """Bind the model to an arena with an adapter of full size in each slot."""
    blobs = [
        stage(dummy_adapter(number, RANK, model.shapes, {}), model.shapes, torch.float32)
        for number in range(1, ADAPTERS + 1)
    ]
    size_bytes = sum(blob.size_bytes for blob in blobs)
    with torch.inference_mode(False):
        arena = Arena(ADAPTERS, model.shapes, size_bytes, torch.float32, "cpu")
        punica = PunicaWrapper(model.device, RANK, choose_kernels("cpu"))
        model.bind(arena, punica)
        for slot, blob in enumerate(blobs):
            arena.begin_write(slot, 1, blob)
            arena.finish_write(slot)
    return punica


def _stepper(model: CausalModel, punica: PunicaWrapper, ids: list[int]) -> Callable[[], None]:
    """Return one cached decode step of prefilled rows with these adapters."""
    slots = list(range(1, ADAPTERS + 1))
    cache = model.new_cache([PROMPT_TOKENS] * len(ids))
    every_token = [number for number in ids for _ in range(PROMPT_TOKENS)]
    punica.update_metadata(LoRAMapping(every_token, ids, is_prefill=True), slots)
    tokens = torch.arange(len(ids) * PROMPT_TOKENS).view(len(ids), -1)
    model.forward(tokens % model.vocab_size, cache)

    def step() -> None:
        punica.update_metadata(LoRAMapping(ids, ids), slots)
        cache.grow(1)
        model.forward(torch.full((len(ids), 1), 5), cache)

    return step
