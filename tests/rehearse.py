"""The budgets of a decode step on the simulated CUDA device, counted without a clock.

`make rehearse` prints the table and compares it with `tests/golden/rehearsal.json`: it fails if a
figure rises, and stores the table if not. The tiny model in bfloat16 runs sequences of several
adapters with all kinds of sampling. Triton's kernels are counted and not run.
"""

import json
import sys
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any, Final

from torch import nn

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.messages import commands as cm
from loradock.messages.ids import GPU_SLOT
from loradock.messages.prompts import Sampling
from tests.support.device import RECORD, simulated_device
from tests.support.device.tensors import skipped_kernels
from tests.support.engine.engine_bench import EngineBench
from tests.support.kernels.interpreted_bfloat16 import correct_products
from tests.support.sources import ROOT

STORED: Final = ROOT / "tests" / "golden" / "rehearsal.json"
TINY: Final = ROOT / "examples" / "tiny"
ADAPTERS: Final = ("upper", "reverse", "caesar", "double")
SAMPLINGS: Final = (
    {},
    {"temperature": 0.7, "top_k": 9, "seed": 1},
    {"temperature": 1.0, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.1},
    {"presence_penalty": 0.5, "frequency_penalty": 0.5, "logprobs": 2, "logit_bias": ((65, -1.0),)},
)
STARTED: Final = (
    *("write_kernel", "attend_kernel", "merge_kernel"),
    *("rms_norm_kernel", "add_norm_kernel", "gate_kernel", "rotate_kernel"),
)
TOKENS: Final = 100
STEPS: Final = 16
LONG_PROMPT: Final = tuple(range(1, 81))
MODES: Final = {"eager": False, "captured": True}


class LayerCounter:
    """Counts the launches within one decoder layer, by hooks around it."""

    def __init__(self, layer: nn.Module) -> None:
        self.counts: list[tuple[int, int]] = []
        layer.register_forward_pre_hook(self._begin, with_kwargs=True)
        layer.register_forward_hook(self._end, with_kwargs=True)

    def _begin(self, *_: Any) -> None:
        self._before = _launches()

    def _end(self, *_: Any) -> None:
        torch_launches, triton = _launches()
        self.counts.append((torch_launches - self._before[0], triton - self._before[1]))


def _launches() -> tuple[int, int]:
    return RECORD.launches.total(), RECORD.triton.total()


class Rehearsal:
    """An engine with adapters in its slots, and its counts since the start."""

    def __init__(self, is_captured: bool) -> None:
        config = EngineConfig(
            *(TINY / "model", (TINY / "adapters",)),
            device="cuda",
            dtype="bfloat16",
            device_bytes_max=8 << 20,
            capture_steps=is_captured,
            max_num_seqs=16,
        )
        lora_config = LoRAConfig(max_lora_rank=64, max_loras=len(ADAPTERS))
        model = load_model(config, lora_config)
        self.layer = LayerCounter(model.model.get_submodule("model.layers.1"))
        # The start compares what they compute with the model's own.
        with skipped_kernels(runs=STARTED):
            self.bench = EngineBench(model, config, lora_config)
        self._at_start = set(RECORD.variants)
        RECORD.reset()
        for number, name in enumerate(ADAPTERS, start=1):
            self.bench.promote(number, name, GPU_SLOT, number - 1, number)

    @property
    def new_variants(self) -> int:
        """The variants of Triton kernels that were first launched after the start."""
        return len(set(RECORD.variants) - self._at_start)

    def start(
        self, row: int, prompt: Any = "word>", tokens: int = TOKENS, *, is_greedy: bool = False
    ) -> int:
        """Start to generate with the adapter of a row, and its kind of sampling unless greedy."""
        number = row % len(ADAPTERS)
        options = SAMPLINGS[0 if is_greedy else number]
        return self.bench.submit(
            cm.StartGeneration,
            adapter_id=number + 1,
            slot=number,
            generation=number + 1,
            request_id=str(row),
            prompt=prompt,
            sampling=Sampling(max_tokens=tokens, ignore_eos=True, **options),
        )

    def step(self, steps: int) -> None:
        """Run steps of the engine."""
        for _ in range(steps):
            self.bench.engine.step()
            self.bench.poll()


def measure(mode: str) -> dict[str, int]:
    """Return the figures of an engine in a mode."""
    correct_products()
    with simulated_device(), skipped_kernels():
        return _measure(MODES[mode])


def _measure(is_captured: bool) -> dict[str, int]:
    rehearsal = Rehearsal(is_captured)
    # Each regime of the kernels: one row, a long group, more rows than adapters.
    rehearsal.bench.wait(rehearsal.start(0, LONG_PROMPT, tokens=2))
    for row in range(1, 10):
        rehearsal.start(row, LONG_PROMPT[row:], tokens=8)
    rehearsal.step(24)
    for row in range(len(ADAPTERS)):
        rehearsal.start(row, tokens=8, is_greedy=True)
    rehearsal.step(4)
    before = sum(_launches())
    rehearsal.step(1)
    greedy_launches = sum(_launches()) - before
    rehearsal.step(8)
    for row in range(len(ADAPTERS)):
        rehearsal.start(row)
    rehearsal.step(4)
    variants, pinned = rehearsal.new_variants, RECORD.pinned.total()
    rehearsal.layer.counts.clear()
    RECORD.reset()
    rehearsal.step(STEPS)
    layer = rehearsal.layer.counts[-1] if rehearsal.layer.counts else (0, 0)
    figures = {
        "torch launches per layer": layer[0],
        "Triton launches per layer": layer[1],
        "launches per step": round(sum(_launches()) / STEPS),
        "launches per step of greedy sampling": greedy_launches,
        "replays per step": round(RECORD.replays / STEPS),
        "copies to the device per step": round(RECORD.to_device.total() / STEPS),
        "reads and waits of the host per step": round(
            (RECORD.reads.total() + RECORD.to_host.total() + RECORD.waits.total()) / STEPS
        ),
        f"attention shapes in {STEPS} steps": len(RECORD.shapes),
        "page-locked allocations after start": pinned,
        "kernels first launched after start": variants + rehearsal.new_variants,
    }
    rehearsal.bench.engine.close()
    return figures


def measure_all() -> dict[str, dict[str, int]]:
    """Return the figures of every mode, each measured in a process of its own."""
    with ProcessPoolExecutor(len(MODES), mp_context=get_context("spawn")) as pool:
        return dict(zip(MODES, pool.map(measure, MODES), strict=True))


def risen(found: dict[str, dict[str, int]], stored: dict[str, dict[str, int]]) -> list[str]:
    """Return a line for each figure that is above the stored one."""
    return [
        f"{mode}: {name} {value}, at most {stored[mode].get(name)}"
        for mode, figures in found.items()
        for name, value in figures.items()
        if value > stored[mode].get(name, value)
    ]


def main() -> int:
    """Print the table; store it unless a figure has risen."""
    found = measure_all()
    for name in found["eager"]:
        print(f"{name:40}", *(f"{figures[name]:10}" for figures in found.values()))
    above = risen(found, json.loads(STORED.read_text())) if STORED.exists() else []
    print(*above, sep="\n")
    if not above:
        STORED.write_text(json.dumps(found, indent=2) + "\n")
    return bool(above)


if __name__ == "__main__":
    sys.exit(main())
