"""The figures `experts.*`: a decode step over adapters of a mixture of experts.

The model is small; its experts, attention and routers are adapted. A mixed batch is compared with
the base, with one forward per adapter, and with more resident adapters. All variants compute the
same rows of the same prepared model.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Final

import torch
from transformers import OlmoeConfig, OlmoeForCausalLM

from benchmarks.figures import Figure, best_seconds, interleave
from benchmarks.rounds import threads
from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.layout import blob_bytes, columns_of_one_adapter
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage

SEQUENCES: Final = 16
ADAPTERS: Final = 8
RANK: Final = 8
COUNTS: Final = (1, 8, 64)
ROUNDS: Final = 7

VS_BASE_MAX: Final = 1.8
VS_LOOP_MIN: Final = 3.0


class Bench:
    """A model with 64 experts, 8 of them active, and `adapters` resident adapters."""

    def __init__(self, adapters: int) -> None:
        torch.manual_seed(1)
        config = OlmoeConfig(
            vocab_size=1024,
            hidden_size=256,
            intermediate_size=128,
            num_hidden_layers=2,
            num_attention_heads=8,
            num_experts=64,
            num_experts_per_tok=8,
            max_position_embeddings=128,
            dtype="float32",
        )
        targets = ("q_proj", "k_proj", "v_proj", "o_proj", "gate", "experts")
        lora_config = LoRAConfig(max_lora_rank=RANK, max_loras=adapters, target_modules=targets)
        self.model = CausalModel(OlmoeForCausalLM(config), lora_config)
        shapes = self.model.shapes
        touched = [shape.name for shape in columns_of_one_adapter(shapes)]
        each = blob_bytes(dict.fromkeys(touched, RANK), shapes, torch.float32)
        self.arena = Arena(adapters, shapes, each * adapters, torch.float32, "cpu")
        self.punica = PunicaWrapper(torch.device("cpu"), RANK, choose_kernels("cpu"))
        self.model.bind(self.arena, self.punica)
        self.ids = list(range(1, adapters + 1))
        for slot, id_ in enumerate(self.ids):
            blob = stage(self._adapter(id_), shapes, torch.float32)
            self.arena.begin_write(slot, 1, blob)
            self.arena.finish_write(slot)

    def _adapter(self, id_: int) -> LoRAModel:
        """Return random weights for every wrapped module."""
        loras = {}
        for shape in columns_of_one_adapter(self.model.shapes):
            a = torch.randn(shape.a_shape(RANK)) / shape.in_features**0.5
            b = torch.randn(shape.b_shape(RANK)) / RANK**0.5
            loras[shape.name] = LoRALayerWeights(shape.name, RANK, RANK, a, b, kind=shape.kind)
        return LoRAModel(id_, RANK, loras)

    def step(self, rows: Sequence[int]) -> None:
        """Run one step in which row `i` uses the adapter `rows[i]`, 0 for the base."""
        ids = torch.tensor(rows)
        self.punica.update_metadata(LoRAMapping(ids, ids), self.ids)
        tokens = torch.arange(len(rows))[:, None] * 37 % self.model.vocab_size
        self.model.forward(tokens, BatchKVCache([1] * len(rows)))


def run() -> Iterator[Figure]:
    """Measure every figure of the group, on one thread."""
    with threads(1):
        yield from _figures()


def _figures() -> Iterator[Figure]:
    bench = Bench(ADAPTERS)
    mixed = _rows(ADAPTERS)

    def loop() -> None:
        for id_ in range(1, ADAPTERS + 1):
            bench.step([adapter for adapter in mixed if adapter == id_])

    together, base = _interleave(lambda: bench.step(mixed), lambda: bench.step([0] * SEQUENCES))
    yield Figure(
        name="experts.vs_base",
        value=together * 1e3,
        unit="ms a step",
        yardstick=f"the same rows of the base: {base * 1e3:.1f} ms",
        ratio=together / base,
        target=f"ratio <= {VS_BASE_MAX:g}",
        reached=together / base <= VS_BASE_MAX,
    )
    together, looped = _interleave(lambda: bench.step(mixed), loop)
    yield Figure(
        name="experts.vs_loop",
        value=together * 1e3,
        unit="ms a step",
        yardstick=f"one forward for each of {ADAPTERS} adapters: {looped * 1e3:.1f} ms",
        ratio=looped / together,
        target=f"ratio >= {VS_LOOP_MIN:g}",
        reached=looped / together >= VS_LOOP_MIN,
    )
    yield _as_adapters_grow()


def _as_adapters_grow() -> Figure:
    """Return the figure of a batch with 1, 8 and 64 resident adapters; 16 rows use at most 16."""
    bench = Bench(COUNTS[-1])
    costs = [
        _interleave(partial(bench.step, _rows(n)), partial(bench.step, [0] * SEQUENCES))
        for n in COUNTS
    ]
    times = ", ".join(
        f"{n} adapters {together * 1e3:.1f} ms"
        for n, (together, _) in zip(COUNTS, costs, strict=True)
    )
    together, base = costs[-1]
    return Figure(
        name="experts.adapters_1_8_64",
        value=together * 1e3,
        unit=f"ms a step with {COUNTS[-1]}",
        yardstick=f"base {base * 1e3:.1f} ms; {times}",
        ratio=together / costs[0][0],
        target="reported, no target",
        reached=True,
    )


def _rows(adapters: int) -> list[int]:
    """Return the adapter of each sequence, spread over all resident ones."""
    return [1 + row * adapters // SEQUENCES % adapters for row in range(SEQUENCES)]


def _interleave(first: Callable[[], None], second: Callable[[], None]) -> list[float]:
    """Time both alternately, after an untimed run of each."""
    first()
    second()
    return interleave(lambda: best_seconds(first, 3), lambda: best_seconds(second, 3), ROUNDS)
