"""The figures `adapters.*`: reading and checking an adapter, against reading only its bytes.

The files are in the page cache, so no disk is measured. The yardstick also ends with the bytes in
new memory, because a file that is only mapped was not read; both start without reusable memory.
"""

import ctypes
import json
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import torch
from safetensors.torch import load_file, save_file

from benchmarks.figures import Figure, interleave
from benchmarks.rounds import threads
from loradock.engine.adapters import read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import LoRAConfig
from loradock.engine.layout import ModuleShape

HIDDEN, INNER, KEYS, LAYERS, RANK = 4096, 14336, 1024, 32, 16
"""An 8-billion-parameter Llama's shapes."""

WIDTHS: Final = {
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HIDDEN, KEYS),
    "self_attn.v_proj": (HIDDEN, KEYS),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (HIDDEN, INNER),
    "mlp.up_proj": (HIDDEN, INNER),
    "mlp.down_proj": (INNER, HIDDEN),
}
ROUNDS: Final = 11
RATIO_MAX: Final = 2.0

Clock = Callable[[], float]
"""Process time on one thread; wall time on several."""


def run() -> Iterator[Figure]:
    """Measure every figure of the group."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        modules = write_adapter(Path(name) / "adapter")
        with threads(1):
            yield _read(Path(name), modules, "adapters.read", time.process_time)
        yield _read(Path(name), modules, "adapters.read_all_threads", time.perf_counter)


def write_adapter(directory: Path, rank: int = RANK) -> dict[str, ModuleShape]:
    """Write a bfloat16 adapter of every linear layer, and return the modules that it adapts."""
    modules, tensors = {}, {}
    generator = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        for projection, (width, height) in WIDTHS.items():
            name = f"model.layers.{layer}.{projection}"
            modules[name] = ModuleShape(name, width, height, len(modules))
            for matrix, shape in (("A", (rank, width)), ("B", (height, rank))):
                values = torch.randn(shape, generator=generator).to(torch.bfloat16)
                tensors[f"base_model.model.{name}.lora_{matrix}.weight"] = values
    directory.mkdir()
    save_file(tensors, directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, "target_modules": ".*_proj"}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return modules


def _read(root: Path, modules: dict[str, ModuleShape], name: str, clock: Clock) -> Figure:
    lora_config = LoRAConfig(max_lora_rank=RANK, lora_dtype="bfloat16")
    weights = root / "adapter" / "adapter_model.safetensors"

    def ours() -> object:
        return read_adapter("adapter", [root], AdapterTarget(modules, lora_config))

    def bare() -> object:
        return {name: tensor.clone() for name, tensor in load_file(weights).items()}

    seconds, yardstick = interleave(_timed(ours, clock), _timed(bare, clock), ROUNDS)
    ratio = seconds / yardstick
    size = weights.stat().st_size / 1e6
    return Figure(
        name,
        seconds * 1e3,
        "ms",
        f"safetensors alone, {size:.0f} MB: {yardstick * 1e3:.1f} ms",
        ratio,
        f"ratio <= {RATIO_MAX:g}",
        ratio <= RATIO_MAX,
    )


def _timed(work: Callable[[], object], clock: Clock) -> Callable[[], float]:
    """Return a measurement of the work's time, without freeing its result."""

    def seconds() -> float:
        # Memory that an earlier run freed is returned to the system, so that the next run does not
        # reuse it.
        ctypes.CDLL(None).malloc_trim(0)
        started = clock()
        made = work()
        ended = clock()
        del made
        return ended - started

    return seconds
