"""A prepared model whose slots are written by hand, and its adapters as PEFT makes and runs them.

Adapters are made and saved by PEFT, and read by the engine's own reader.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from loradock.engine.adapters import LoRAModel, read_adapter
from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.library.generation import cache_argument
from loradock.engine.models.row_cache import RowCache
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import Blob, stage
from loradock.engine.serving.blocks import BlockPool, BlockTable
from loradock.engine.serving.forward import PackedModel
from loradock.engine.serving.paged_cache import PackedChunk
from loradock.engine.serving.startup import PackedRefused, probe_packed
from tests.support.engine.engine_examples import relative_error

ParityRow = tuple[str | None, tuple[int, ...]]
"""An adapter's name (None: the base model) and a prompt."""


def read(model: CausalModel, root: Path, name: str) -> LoRAModel:
    """Read the adapter `name` under `root` with the engine's reader."""
    config = LoRAConfig(max_lora_rank=64).resolved_for(model.model.config)
    return read_adapter(name, [root], model.adapter_target(config)).model


class ParityBench:
    """A prepared model with slots that are written and reset by hand."""

    def __init__(self, model: CausalModel, root: Path, slots: int, device_bytes: int) -> None:
        self.model = model
        config = LoRAConfig(max_lora_rank=64, max_loras=slots)
        config = config.resolved_for(model.model.config)
        self.arena = Arena(slots, model.shapes, device_bytes, config.dtype, model.device)
        self.arena.data.fill_(torch.nan)
        kernels = choose_kernels(model.device.type)
        self.punica = PunicaWrapper(model.device, config.max_lora_rank, kernels)
        model.bind(self.arena, self.punica)
        names = sorted(path.parent.name for path in root.glob("*/adapter_config.json"))
        self.ids = {name: number for number, name in enumerate(names, start=1)}
        self.blobs: dict[str, Blob] = {
            name: stage(read(model, root, name), model.shapes, config.dtype) for name in self.ids
        }
        self.generations = [0] * slots
        self.residents: list[str | None] = [None] * slots

    def write(self, slot: int, name: str) -> None:
        self.arena.begin_write(slot, self.generations[slot] + 1, self.blobs[name])
        self.arena.finish_write(slot)
        self.generations[slot] += 1
        self.residents[slot] = name

    def reset(self, slot: int) -> None:
        self.arena.reset(slot, self.generations[slot])
        self.residents[slot] = None

    def logits(self, rows: list[ParityRow]) -> Tensor:
        """Return the logits after each prompt, all rows in one left-padded batch."""
        return self.steps(rows, [])[0]

    @torch.inference_mode()
    def steps(
        self, rows: list[ParityRow], next_tokens: Sequence[int], columns: int = 1 << 20
    ) -> list[Tensor]:
        """Return the logits after each prompt and after each of `next_tokens`, with a cache.

        The prompts are prefilled in chunks of `columns` columns.
        """
        width = max(len(tokens) for _, tokens in rows)
        ids = [0 if name is None else self.ids[name] for name, _ in rows]
        padding = [width - len(tokens) for _, tokens in rows]
        padded = torch.tensor(
            [[1] * gap + list(tokens) for gap, (_, tokens) in zip(padding, rows, strict=True)]
        )
        cache = self.model.new_cache([0] * len(rows))
        for end in (*range(columns, width, columns), width):
            first = cache.width
            cache.lengths = [max(0, end - gap) for gap in padding]
            index = [
                0 if column < padding[row] else ids[row]
                for row in range(len(rows))
                for column in range(first, end)
            ]
            self._map(LoRAMapping(index, ids, is_prefill=True))
            prefilled = self.model.forward(padded[:, first:end], cache)
        logits = [prefilled]
        for token in next_tokens:
            cache.grow(1)
            self._map(LoRAMapping(ids, ids))
            logits.append(self.model.forward(torch.full((len(rows), 1), token), cache))
        return logits

    @torch.inference_mode()
    def flat_steps(
        self, rows: list[ParityRow], next_tokens: Sequence[int], columns: int
    ) -> list[Tensor]:
        """Return what `steps` returns, from packed passes: chunks of `columns` tokens per row.

        Rows that are done with their prompts decode while others are not.
        """
        ids = [0 if name is None else self.ids[name] for name, _ in rows]
        kernel = self.punica.attention if self.model.device.type == "cuda" else None
        blocks = 4 * len(rows)
        flat, pool = PackedModel(self.model, blocks, kernel=kernel), BlockPool(blocks)
        tables = [BlockTable(pool, None) for _ in rows]
        found: list[list[Tensor]] = [[] for _ in rows]
        wanted = [[*prompt, *next_tokens] for _, prompt in rows]
        while any(table.length < len(tokens) for table, tokens in zip(tables, wanted, strict=True)):
            step = []
            for row, (table, tokens) in enumerate(zip(tables, wanted, strict=True)):
                begin, prompt = table.length, len(rows[row][1])
                end = min(begin + columns, prompt) if begin < prompt else begin + 1
                if begin < len(tokens):
                    table.reserve(end)
                    step.append((row, PackedChunk(tokens[begin:end], table)))
            index = [ids[row] for row, part in step for _ in part.tokens]
            self._map(LoRAMapping(index, [ids[row] for row, _ in step], is_prefill=True))
            for (row, part), logits in zip(step, flat.forward([p for _, p in step]), strict=True):
                part.table.advance(part.end, list)
                if part.table.length >= len(rows[row][1]):
                    found[row].append(logits)
        return list(torch.stack([torch.stack(logits) for logits in found], dim=1))

    def refusal_of_flat_passes(self) -> str:
        """Return why the model can't be run in packed passes; empty if it can."""
        try:
            probe_packed(
                self.model, lambda tokens, rows: self._map(LoRAMapping([0] * tokens, [0] * rows))
            )
        except PackedRefused as refusal:
            return str(refusal)
        return ""

    def _map(self, mapping: LoRAMapping) -> None:
        layout = [None if name is None else self.ids[name] for name in self.residents]
        self.punica.update_metadata(mapping, layout)


class PeftReference:
    """PEFT's logits for the same rows, one at a time, without a cache."""

    def __init__(self, models: Mapping[str, PreTrainedModel | PeftModel]) -> None:
        self._models = models
        self._cached: dict[ParityRow, Tensor] = {}

    @torch.no_grad()
    def logits(self, name: str | None, tokens: tuple[int, ...]) -> Tensor:
        if (name, tokens) not in self._cached:
            ids = torch.tensor([tokens])
            if name is None:
                model = next(iter(self._models.values()))
                with model.disable_adapter():
                    logits = model(input_ids=ids).logits[0, -1]
            else:
                logits = self._models[name](input_ids=ids).logits[0, -1]
            self._cached[name, tokens] = logits
        return self._cached[name, tokens]

    def check(self, bench: ParityBench, rows: list[ParityRow], error_max: float = 1e-5) -> None:
        for row, found in zip(rows, bench.logits(rows), strict=True):
            assert relative_error(found, self.logits(*row)) < error_max, row


def linear_suffixes(model: PreTrainedModel) -> tuple[list[str], list[str]]:
    """Return the last two names of linear layers except the head: in attention, and elsewhere."""
    head = model.get_output_embeddings()
    is_attention_by_name = {
        ".".join(name.split(".")[-2:]): "att" in name.lower()
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear | Conv1D) and layer is not head
    }
    attention = [name for name, is_attention in is_attention_by_name.items() if is_attention]
    return attention, [name for name in is_attention_by_name if name not in attention]


def adapter_configs(model: PreTrainedModel) -> dict[str, dict[str, Any]]:
    """Return configs of five kinds of adapters of five ranks, for any model, by adapter name.

    All linear layers; attention only; one layer of each kind with patterns; both ends of the model;
    and one single layer, whose siblings' slices stay empty.
    """
    attention, others = linear_suffixes(model)
    names = {module: name for name, module in model.named_modules()}
    ends = [names[model.get_input_embeddings()], names[model.get_output_embeddings()]]
    one = [name for name in names.values() if name.endswith(attention[0])][-1]
    transposed = {"fan_in_fan_out": any(isinstance(module, Conv1D) for module in names)}
    return {
        "rank8": {"r": 8, "lora_alpha": 16, "target_modules": "all-linear", **transposed},
        "rank4": {
            "r": 4,
            "lora_alpha": 6,
            "target_modules": attention,
            "use_rslora": True,
            **transposed,
        },
        "rank64": {
            "r": 64,
            "lora_alpha": 32,
            "target_modules": [attention[-1], others[-1]],
            "rank_pattern": {others[-1]: 24},
            "alpha_pattern": {others[-1]: 9},
            **transposed,
        },
        "rank24": {"r": 24, "lora_alpha": 24, "target_modules": ends},
        "rank1": {"r": 1, "lora_alpha": 2, "target_modules": [one], **transposed},
    }


class PeftDecodeReference:
    """The same base with every adapter in PEFT, saved under `root`, and its cached steps."""

    def __init__(self, model: PreTrainedModel, root: Path) -> None:
        configs = {
            name: LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **fields)
            for name, fields in adapter_configs(model).items()
        }
        torch.manual_seed(3)
        first, *rest = configs
        self.model = get_peft_model(model, configs[first], adapter_name=first)
        for name in rest:
            self.model.add_adapter(name, configs[name])
        self._round_to_dtype()
        for config in self.model.peft_config.values():
            # PEFT records that a random start leaves the base weights unchanged.
            config.init_lora_weights = True
        self.model.save_pretrained(root, selected_adapters=list(configs))
        self.model.eval()
        self.names = tuple(configs)

    def _round_to_dtype(self) -> None:
        """Round A and B to values of the base's dtype, as those of a published adapter.

        Embeddings are scaled to the size of the others first; PEFT draws them from N(0, 1).
        """
        for name, parameter in self.model.named_parameters():
            if "lora_" in name:
                size = 0.2 if "lora_embedding" in name else 1.0
                parameter.data = (parameter.data * size).to(self.model.dtype).to(parameter.dtype)

    @torch.no_grad()
    def steps(self, row: ParityRow, next_tokens: Sequence[int]) -> list[Tensor]:
        """Return one row's logits after its prompt and after each of `next_tokens`, cached."""
        name, prompt = row
        if name is None:
            with self.model.disable_adapter():
                return self._steps(prompt, next_tokens)
        self.model.set_adapter(name)
        return self._steps(prompt, next_tokens)

    def _steps(self, prompt: Sequence[int], next_tokens: Sequence[int]) -> list[Tensor]:
        cached = {cache_argument(self.model.get_base_model()): DynamicCache(), "use_cache": True}
        found = []
        for tokens in (prompt, *([token] for token in next_tokens)):
            output = self.model(input_ids=torch.tensor([list(tokens)]), **cached)
            found.append(output.logits[0, -1])
        return found


class ServerBench(ParityBench):
    """A bench that runs rows as the server does: prefilled, joined, decoded and dropped."""

    def generate(self, rows: list[ParityRow], tokens: Sequence[Sequence[int]]) -> list[Tensor]:
        """Return each row's logits, [its steps, vocabulary], when it continues with `tokens`.

        The first half is prefilled together and decoded for a third of the steps. Then the others
        join, and after another third two rows leave.
        """
        steps, half = len(tokens[0]), len(rows) // 2
        running = list(range(half))
        cache = self._prefilled([rows[row] for row in running])
        found: list[list[Tensor]] = [[] for _ in rows]
        self._collect(found, running, cache.logits)
        running_cache = cache.cache
        for step in range(1, steps):
            if step == steps // 3:
                joining = list(range(half, len(rows)))
                prefilled = self._prefilled([rows[row] for row in joining])
                running_cache.join(prefilled.cache)
                running += joining
                self._collect(found, joining, prefilled.logits)
            if step == 2 * steps // 3:
                kept = [at for at, row in enumerate(running) if row not in {0, half + 1}]
                running_cache.keep(kept)
                running = [running[at] for at in kept]
            running_cache.grow(1)
            ids = [self.id_of(rows[row][0]) for row in running]
            self._map(LoRAMapping(ids, ids))
            last = torch.tensor([[tokens[row][len(found[row]) - 1]] for row in running])
            self._collect(found, running, self.model.forward(last, running_cache))
        return [torch.stack(logits) for logits in found]

    def id_of(self, name: str | None) -> int:
        """Return an adapter's id, 0 for the base."""
        return 0 if name is None else self.ids[name]

    def _prefilled(self, rows: list[ParityRow]) -> "_Prefilled":
        width = max(len(prompt) for _, prompt in rows)
        padded = torch.tensor([[0] * (width - len(prompt)) + list(prompt) for _, prompt in rows])
        ids = [self.id_of(name) for name, _ in rows]
        index = [
            0 if column < width - len(prompt) else self.id_of(name)
            for name, prompt in rows
            for column in range(width)
        ]
        cache = self.model.new_cache([len(prompt) for _, prompt in rows])
        self._map(LoRAMapping(index, ids, is_prefill=True))
        return _Prefilled(cache, self.model.forward(padded, cache))

    @staticmethod
    def _collect(found: list[list[Tensor]], rows: Sequence[int], logits: Tensor) -> None:
        for row, one in zip(rows, logits, strict=True):
            found[row].append(one.clone())


class _Prefilled(NamedTuple):
    """The cache of some prefilled rows, and the logits after each of them."""

    cache: RowCache
    logits: Tensor
