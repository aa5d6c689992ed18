"""A pooling model with an adapter in every slot, and PEFT's models with the same adapters.

The arena is filled with NaN outside adapters, so that a read outside its slot fails.
"""

from pathlib import Path

import torch
from peft import PeftModel
from torch import Tensor

from loradock.engine.adapters import read_adapter
from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.saved_settings import NO_OPTIONS, Pooling, PoolingOptions
from loradock.engine.parallel import SINGLE, ParallelGroup
from loradock.engine.punica import PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage
from loradock.messages.views import PoolingTask
from tests.support.models.pooling_examples import ADAPTERS, TEXTS, PoolingExample
from tests.support.parallel.sharding import shard_model

NAMES = tuple(ADAPTERS)
ROWS = tuple((name, text) for text in TEXTS for name in (None, *NAMES))
"""Every text with every adapter and with none, in one batch."""


class PoolingBench:
    """A pooling model whose slot `n` has the n-th adapter of `root`, with id n + 1."""

    def __init__(
        self,
        example: PoolingExample,
        task: PoolingTask,
        root: Path,
        options: PoolingOptions = NO_OPTIONS,
        group: ParallelGroup = SINGLE,
        **fields: object,
    ) -> None:
        config = LoRAConfig(max_lora_rank=8, max_loras=len(NAMES), lora_dtype="float32", **fields)
        base = example.make()
        if not group.is_trivial:
            shard_model(base, group, torch.device("cpu"))
        self.model = PoolingModel(base, config, task=task, options=options)
        shapes = self.model.shapes
        self.arena = Arena(len(NAMES), shapes, 1 << 20, torch.float32, "cpu")
        self.arena.data.fill_(torch.nan)
        self.punica = PunicaWrapper(self.model.device, 8, choose_kernels("cpu"))
        self.model.bind(self.arena, self.punica)
        for slot, name in enumerate(NAMES):
            adapter_target = self.model.adapter_target(config)
            loaded = read_adapter(name, [root], adapter_target, is_follower=not group.is_leader)
            self.arena.begin_write(slot, 1, stage(loaded.model, shapes, torch.float32))
            self.arena.finish_write(slot)

    def pooled(self, rows: tuple[tuple[str | None, tuple[int, ...]], ...] = ROWS) -> Tensor:
        """Return the pooled rows of one batch."""
        ids = [0 if name is None else NAMES.index(name) + 1 for name, _ in rows]
        prompts = [tokens for _, tokens in rows]
        self.punica.update_metadata(self.model.mapping(prompts, ids), [1, 2])
        return self.model.forward(prompts)


class PeftReference:
    """PEFT's models by adapter name, and the base model by None."""

    def __init__(self, example: PoolingExample, adapters: dict[str, PeftModel]) -> None:
        self.models = {None: example.make(), **adapters}

    @torch.no_grad()
    def alone(
        self, name: str | None, tokens: tuple[int, ...], pooling: Pooling | None = None
    ) -> Tensor:
        """Return the result of one row alone: a vector if `pooling` is given, else logits."""
        output = self.models[name](input_ids=torch.tensor([tokens]))
        if pooling is None:
            return output.logits[0]
        states = output.last_hidden_state[0]
        match pooling:
            case Pooling.MEAN:
                return states.mean(0)
            case Pooling.CLS:
                return states[0]
            case Pooling.LAST:
                return states[-1]
