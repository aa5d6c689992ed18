"""The figures `layers.*`: a batch over eight adapters, against the base model and against peft.

One model runs a prefill and a decode step. Nothing is timed before all variants with adapters
returned the same logits.
"""

import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from operator import truediv
from typing import Any, Final

import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from benchmarks.figures import Figure
from benchmarks.rounds import threads
from loradock.engine.adapters.layer_weights import LoRALayerWeights
from loradock.engine.adapters.lora_model import LoRAModel
from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import choose_kernels
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.library.generation import cache_argument
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import stage

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
"""Variant -> the seconds of one step, by round."""


class Variant:
    """A way to run the model: a call with tokens and a cache, whose argument is `cache_name`."""

    def __init__(
        self, call: Callable[..., Any], before: Callable[[bool], None], cache_name: str
    ) -> None:
        self._call = call
        self._before = before
        self._cache_name = cache_name

    def prefill(self) -> tuple[Tensor, DynamicCache]:
        """Return the logits after all prompts, and their cache."""
        cache = DynamicCache()
        self._before(True)
        return self._step(torch.arange(SEQUENCES * PROMPT_TOKENS).view(SEQUENCES, -1), cache), cache

    def decode(self, cache: DynamicCache) -> Tensor:
        """Return the logits after one more token per sequence; the cache is restored."""
        self._before(False)
        logits = self._step(torch.arange(SEQUENCES)[:, None], cache)
        cache.crop(-1)
        return logits

    def _step(self, tokens: Tensor, cache: DynamicCache) -> Tensor:
        arguments = {"input_ids": tokens, self._cache_name: cache}
        output = self._call(**arguments, use_cache=True, logits_to_keep=1)
        return output.logits[:, -1]


def run() -> Iterator[Figure]:
    """Measure every figure of the group."""
    variants = _variants()
    with torch.inference_mode():
        _check(variants)
        counts = sorted({1, torch.get_num_threads()})
        prefill, decode = {}, {}
        for count in counts:
            with threads(count):
                prefill[count] = _prefill_seconds(variants)
                decode[count] = _decode_seconds(variants)
    yield _slower("layers.prefill_vs_base", prefill, "base", 1.35)
    yield _slower("layers.decode_vs_base", decode, "base", 1.6)
    yield _faster("layers.prefill_vs_peft", prefill, 3)
    yield _faster("layers.decode_vs_peft", decode, 3)
    steps = {f"prefill, {count}": seconds for count, seconds in prefill.items()}
    steps |= {f"decode, {count}": seconds for count, seconds in decode.items()}
    yield _slower("layers.packed", steps, "separate", 1.02)


def _variants() -> dict[str, Variant]:
    """Return the base, ours, ours without packing, and peft's mixed batch; equal weights."""
    adapted = _peft_model()
    adapters = [_adapter(adapted, number) for number in range(ADAPTERS)]
    names = [f"a{row % ADAPTERS}" for row in range(SEQUENCES)]

    def peft(**arguments: Any) -> Any:
        return adapted(adapter_names=names, **arguments)

    base = _model()
    cache_name = cache_argument(base)
    return {
        "base": Variant(base, lambda _: None, cache_name),
        "ours": _ours(_model(), adapters),
        "separate": _ours(_with_unpackable_layers(_model()), adapters),
        "peft": Variant(peft, lambda _: None, cache_name),
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
    """Return one of peft's adapters in the engine's form."""
    parameters: Mapping[str, Tensor] = dict(adapted.named_parameters())
    suffix = f".lora_A.a{number}.weight"
    loras = {}
    for name, lora_a in parameters.items():
        if name.endswith(suffix):
            lora_b = parameters[name.replace(".lora_A.", ".lora_B.")]
            module = name.removeprefix("base_model.model.").removesuffix(suffix)
            loras[module] = LoRALayerWeights(module, RANK, RANK, lora_a.detach(), lora_b.detach())
    return LoRAModel(number + 1, RANK, loras)


class _NotPackable(nn.Linear):
    """A linear layer that is not packed, because a subclass may have its own forward."""


def _with_unpackable_layers(model: PreTrainedModel) -> PreTrainedModel:
    head = model.get_output_embeddings()
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and layer is not head:
            copy = _NotPackable(layer.in_features, layer.out_features, bias=False, device="meta")
            copy.weight = layer.weight
            model.set_submodule(name, copy)
    return model


def _ours(model: PreTrainedModel, adapters: list[LoRAModel]) -> Variant:
    prepared = CausalModel(model, LoRAConfig(max_lora_rank=RANK, max_loras=ADAPTERS))
    blobs = [stage(one, prepared.shapes, torch.float32) for one in adapters]
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

    return Variant(prepared.model, before, prepared.cache_argument)


def _check(variants: Mapping[str, Variant]) -> None:
    """Raise unless all variants with adapters agree, and the base differs."""
    logits = {}
    for name, variant in variants.items():
        first, cache = variant.prefill()
        logits[name] = torch.cat([first, variant.decode(cache)]).double()
    errors = {
        name: float((found - logits["peft"]).norm() / logits["peft"].norm())
        for name, found in logits.items()
    }
    if max(errors["ours"], errors["separate"]) > 1e-5 or errors["base"] < 1e-2:
        raise RuntimeError(f"the results differ from peft's: {errors}")


def _prefill_seconds(variants: Mapping[str, Variant]) -> Seconds:
    return _interleave({name: variant.prefill for name, variant in variants.items()}, repeats=1)


def _decode_seconds(variants: Mapping[str, Variant]) -> Seconds:
    caches = {name: variant.prefill()[1] for name, variant in variants.items()}

    def step(name: str) -> Callable[[], object]:
        return lambda: variants[name].decode(caches[name])

    return _interleave({name: step(name) for name in variants}, repeats=4)


def _interleave(works: Mapping[str, Callable[[], object]], repeats: int) -> Seconds:
    """Time the works alternately: in process time on one thread, else in wall time."""
    clock = time.process_time if torch.get_num_threads() == 1 else time.perf_counter
    taken: Seconds = {name: [] for name in works}
    for _ in range(ROUNDS):
        for name, work in works.items():
            started = clock()
            for _ in range(repeats):
                work()
            taken[name].append((clock() - started) / repeats)
    return taken


def _ratio(seconds: Seconds, numerator: str, denominator: str) -> float:
    """Return the median over the rounds of the ratio of two variants' times."""
    return statistics.median(map(truediv, seconds[numerator], seconds[denominator]))


def _slower(name: str, runs: Mapping[Any, Seconds], other: str, limit: float) -> Figure:
    """Return the ratio of our time to the other variant's, in the worst of the runs."""
    ratio = max(_ratio(seconds, "ours", other) for seconds in runs.values())
    times, target = _describe(runs, "ours", other), f"<= {limit} in each"
    return Figure(name, ratio, "times as long", times, ratio, target, ratio <= limit)


def _faster(name: str, runs: Mapping[Any, Seconds], limit: float) -> Figure:
    """Return the ratio of peft's time to ours, in the worst of the runs."""
    ratio = min(_ratio(seconds, "peft", "ours") for seconds in runs.values())
    times, target = _describe(runs, "ours", "peft", "base"), f">= {limit} in each"
    return Figure(name, ratio, "times as fast", times, ratio, target, ratio >= limit)


def _describe(runs: Mapping[Any, Seconds], *variants: str) -> str:
    """Format the median times of some variants in every run, in milliseconds."""
    return "; ".join(
        f"{run} thread{'' if str(run).endswith('1') else 's'}: "
        + ", ".join(
            f"{variant} {statistics.median(seconds[variant]) * 1e3:.1f} ms" for variant in variants
        )
        for run, seconds in runs.items()
    )
