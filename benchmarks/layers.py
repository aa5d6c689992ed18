"""Wrapped layers: what a batch over eight adapters costs, against the base model and against peft.

What it is: the figures named `layers.*`. What it is not: the kernels alone, or a service; one model
runs one prefill and one decode step. One rule: nothing is timed before all sides gave the same
logits.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from operator import truediv
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.figures import Figure
from engine.adapters.lora_model import LoRALayerWeights, LoRAModel
from engine.config import LoRAConfig
from engine.kernels import choose_kernels
from engine.models.causal_model import PreparedModel
from engine.punica import LoRAMapping, PunicaWrapper
from engine.residency.arena import Arena
from engine.residency.staging import stage

ADAPTERS: Final = 8
RANK: Final = 16
SEQUENCES: Final = 16
PROMPT_TOKENS: Final = 32
CONTEXT_TOKENS: Final = 64
ROUNDS: Final = 7
SHAPE: Final = {
    "vocab_size": 4096,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "max_position_embeddings": CONTEXT_TOKENS,
}

Seconds = dict[str, list[float]]
"""Side -> what one step took, round by round."""


class Side:
    """One way to run the model: a call that takes tokens and a cache."""

    def __init__(self, call: Callable[..., Any], before: Callable[[bool], None]) -> None:
        self._call = call
        self._before = before

    def prefill(self) -> tuple[Tensor, DynamicCache]:
        """The logits after all prompts, and their cache."""
        cache = DynamicCache()
        self._before(True)
        return self._step(torch.arange(SEQUENCES * PROMPT_TOKENS).view(SEQUENCES, -1), cache), cache

    def decode(self, cache: DynamicCache) -> Tensor:
        """The logits after one more token of each sequence; the cache is as it was afterwards."""
        self._before(False)
        logits = self._step(torch.arange(SEQUENCES)[:, None], cache)
        cache.crop(-1)
        return logits

    def _step(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        output = self._call(
            input_ids=tokens, past_key_values=cache, use_cache=True, logits_to_keep=1
        )
        return output.logits[:, -1]


def run() -> Iterator[Figure]:
    """Every figure of the group."""
    sides = _sides()
    with torch.inference_mode():
        _check(sides)
        threads = sorted({1, torch.get_num_threads()})
        prefill, decode = {}, {}
        for count in threads:
            with _threads(count):
                prefill[count] = _prefill_seconds(sides)
                decode[count] = _decode_seconds(sides)
    yield _slower("layers.prefill_vs_base", prefill, "base", 1.35)
    yield _slower("layers.decode_vs_base", decode, "base", 1.6)
    yield _faster("layers.prefill_vs_peft", prefill, 3)
    yield _faster("layers.decode_vs_peft", decode, 3)
    steps = {f"prefill, {count}": own for count, own in prefill.items()}
    steps |= {f"decode, {count}": own for count, own in decode.items()}
    yield _slower("layers.packed", steps, "separate", 1.02)


def _sides() -> dict[str, Side]:
    """The base alone, ours, ours without packing, and peft's mixed batch; the same weights."""
    adapted = _peft_model()
    adapters = [_adapter(adapted, number) for number in range(ADAPTERS)]
    names = [f"a{row % ADAPTERS}" for row in range(SEQUENCES)]

    def peft(**arguments: Any) -> Any:
        return adapted(adapter_names=names, **arguments)

    return {
        "base": Side(_model(), lambda _: None),
        "ours": _ours(_model(), adapters),
        "separate": _ours(_unpackable(_model()), adapters),
        "peft": Side(peft, lambda _: None),
    }


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SHAPE)).eval().requires_grad_(False)


def _peft_model() -> nn.Module:
    config = LoraConfig(r=RANK, lora_alpha=RANK, target_modules="all-linear")
    config.init_lora_weights = False
    model = get_peft_model(_model(), config, adapter_name="a0")
    for number in range(1, ADAPTERS):
        model.add_adapter(f"a{number}", config)
    return model.eval()


def _adapter(adapted: nn.Module, number: int) -> LoRAModel:
    """One of peft's adapters as the engine keeps it."""
    parameters: Mapping[str, Tensor] = dict(adapted.named_parameters())
    suffix = f".lora_A.a{number}.weight"
    loras = {}
    for name, lora_a in parameters.items():
        if name.endswith(suffix):
            lora_b = parameters[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(suffix)
            loras[module] = LoRALayerWeights(module, RANK, RANK, lora_a.detach(), lora_b.detach())
    return LoRAModel(number + 1, RANK, loras)


class _Unpackable(nn.Linear):
    """A linear layer that is not packed, because it could have a forward of its own."""


def _unpackable(model: PreTrainedModel) -> PreTrainedModel:
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not head:
            twin = _Unpackable(layer.in_features, layer.out_features, bias=False, device="meta")
            twin.weight = layer.weight
            model.set_submodule(name, twin)
    return model


def _ours(model: PreTrainedModel, adapters: list[LoRAModel]) -> Side:
    prepared = PreparedModel(model, LoRAConfig(max_lora_rank=RANK, max_loras=ADAPTERS))
    blobs = [stage(one, prepared.shapes, torch.float32, pin=False) for one in adapters]
    size_bytes = sum(blob.size_bytes for blob in blobs)
    arena = Arena(ADAPTERS, prepared.shapes, size_bytes, torch.float32, "cpu")
    punica = PunicaWrapper(prepared.device, RANK, choose_kernels("cpu"))
    prepared.bind(arena, punica)
    for slot, blob in enumerate(blobs):
        arena.begin_write(slot, 1, blob)
        arena.finish_write(slot)
    ids = torch.tensor([1 + row % ADAPTERS for row in range(SEQUENCES)])
    layout = list(range(1, ADAPTERS + 1))

    def before(is_prefill: bool) -> None:
        tokens = ids.repeat_interleave(PROMPT_TOKENS) if is_prefill else ids
        punica.update_metadata(LoRAMapping(tokens, ids, is_prefill), layout)

    return Side(prepared.model, before)


def _check(sides: Mapping[str, Side]) -> None:
    """Raise unless all sides with adapters agree, and the base does not."""
    logits = {}
    for name, side in sides.items():
        first, cache = side.prefill()
        logits[name] = torch.cat([first, side.decode(cache)]).double()
    errors = {
        name: float((found - logits["peft"]).norm() / logits["peft"].norm())
        for name, found in logits.items()
    }
    if max(errors["ours"], errors["separate"]) > 1e-5 or errors["base"] < 1e-2:
        raise RuntimeError(f"the sides do not answer as peft does: {errors}")


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _prefill_seconds(sides: Mapping[str, Side]) -> Seconds:
    return _in_turns({name: side.prefill for name, side in sides.items()}, repeats=1)


def _decode_seconds(sides: Mapping[str, Side]) -> Seconds:
    caches = {name: side.prefill()[1] for name, side in sides.items()}

    def step(name: str) -> Callable[[], object]:
        return lambda: sides[name].decode(caches[name])

    return _in_turns({name: step(name) for name in sides}, repeats=4)


def _in_turns(works: Mapping[str, Callable[[], object]], repeats: int) -> Seconds:
    """The time of each, measured in turns; the process's own time where one thread works."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: Seconds = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            started = clock()
            for _ in range(repeats):
                work()
            taken[name].append((clock() - started) / repeats)
    return taken


def _ratio(own: Seconds, above: str, below: str) -> float:
    """The median over the rounds of one side's time by another's."""
    return statistics.median(map(truediv, own[above], own[below]))


def _slower(name: str, runs: Mapping[Any, Seconds], other: str, limit: float) -> Figure:
    """How many times the other side's time ours takes, in the worst of the runs."""
    ratio = max(_ratio(own, "ours", other) for own in runs.values())
    told = _told(runs, "ours", other)
    return Figure(name, ratio, "times as long", told, ratio, f"<= {limit} in each", ratio <= limit)


def _faster(name: str, runs: Mapping[Any, Seconds], limit: float) -> Figure:
    """How many times as fast as peft ours is, in the worst of the runs."""
    ratio = min(_ratio(own, "peft", "ours") for own in runs.values())
    told = _told(runs, "ours", "peft", "base")
    return Figure(name, ratio, "times as fast", told, ratio, f">= {limit} in each", ratio >= limit)


def _told(runs: Mapping[Any, Seconds], *sides: str) -> str:
    """The median times of some sides in every run, in milliseconds."""
    return "; ".join(
        f"{run} thread{'' if str(run).endswith('1') else 's'}: "
        + ", ".join(f"{side} {statistics.median(own[side]) * 1e3:.1f} ms" for side in sides)
        for run, own in runs.items()
    )
