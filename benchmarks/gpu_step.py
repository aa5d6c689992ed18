"""`make gpu`, stage step: decode steps of an 8-billion-parameter Llama with random weights.

For 1, 8 and 64 sequences of 1,024 tokens, without and with adapters, eager and captured: the time
of a step, the host's part of it, its launches and kernels, against the bytes that it has to move.
Then the most sequences with half of their tokens in common, the activation of an adapter against
its bare copy, and 16 adapters in 8 slots. `--small` is a model of a few layers, to try the stage
out.
"""

import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.adapters import HIDDEN, INNER, KEYS, LAYERS, write_adapter
from benchmarks.device_layers import copy_bytes_per_second
from benchmarks.gpu_engine import DirectEngine
from benchmarks.gpu_lines import append
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.causal_model import CausalModel

SLOTS: Final = 8
ADAPTERS: Final = 16
TOP_KERNELS: Final = 12


class Size(NamedTuple):
    """The model's layers and width, and the batches that are measured."""

    layers: int
    hidden: int
    inner: int
    heads: int
    keys: int
    vocab: int
    rows: tuple[int, ...]
    context: int
    steps: int
    rank: int


FULL: Final = Size(LAYERS, HIDDEN, INNER, 32, KEYS // 128, 128_256, (1, 8, 64), 1024, 64, 16)
SMALL: Final = Size(2, 256, 512, 4, 2, 512, (1, 4), 32, 2, 8)


def main() -> int:
    """Measure both ways to run steps."""
    size = SMALL if "--small" in sys.argv else FULL
    bandwidth = 0.0 if size is SMALL else copy_bytes_per_second()
    append("step", copy_bytes_per_second=bandwidth)
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        root = Path(name)
        for number in range(ADAPTERS):
            _write_adapter(root / f"a{number}", size)
        for captured in (False, True):
            measure(root, size, captured, bandwidth)
    return 0


def measure(root: Path, size: Size, captured: bool, bandwidth: float) -> None:
    """Append the figures of one engine."""
    config = EngineConfig(
        *(root, (root,)),
        device="cuda",
        max_num_seqs=max(size.rows),
        max_model_len=size.context + 8 * size.steps + 64,
        device_bytes_max=SLOTS * (1 << 28),
        capture_steps=captured,
    )
    lora_config = LoRAConfig(max_lora_rank=size.rank, max_loras=SLOTS)
    with _stopwatch("engine start", captured):
        model = CausalModel(_model(size), lora_config, max_model_len=config.max_model_len)
        engine = DirectEngine(model, config, lora_config)
    for number in range(SLOTS):
        engine.load(number + 1, f"a{number}")
        engine.write(number + 1, number)
    weights = sum(p.nbytes for p in model.model.parameters())
    for rows in size.rows:
        for adapters in (0, min(rows, SLOTS)):
            moved = weights + _kv_bytes(size) * rows + adapters * _adapter_bytes(root)
            figures = steps_of(engine, size, rows, adapters)
            figures["bytes_moved"] = moved
            figures["ratio_to_bytes"] = (
                figures["step_ms"] / (moved / (0.8 * bandwidth) * 1e3) if bandwidth else None
            )
            append("step", captured=captured, rows=rows, adapters=adapters, **figures)
    shared = {"rows": max(size.rows), "adapters": 0, "shared_tokens": size.context // 2}
    append("step", captured=captured, **shared, **steps_of(engine, size, **shared))
    append("step", captured=captured, **_activation(engine, root))
    append("step", captured=captured, **_rotation(engine, size))
    engine.engine.close()
    del engine, model
    torch.cuda.empty_cache()


def steps_of(
    engine: DirectEngine, size: Size, rows: int, adapters: int, shared_tokens: int = 0
) -> dict[str, Any]:
    """Return the figures of a step of `rows` sequences, which use as many adapters.

    shared_tokens: those at their beginnings that all of them have in common.
    """
    # While the others' prompts are computed, the row whose blocks they share goes on.
    tokens = 8 + 2 * size.steps + (rows if shared_tokens else 0)
    ops = _start(engine, size, rows, adapters, tokens, shared_tokens)
    while engine.token_count < rows:
        engine.step()
    for _ in range(4):
        engine.step()
    torch.cuda.synchronize()
    before, host = time.perf_counter(), time.process_time()
    for _ in range(size.steps):
        engine.step()
    host_s = time.process_time() - host
    torch.cuda.synchronize()
    took_s = time.perf_counter() - before
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        engine.step()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.key_averages() if event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    engine.wait_all(ops)
    engine.token_count = 0
    return {
        "step_ms": 1e3 * took_s / size.steps,
        "host_ms": 1e3 * host_s / size.steps,
        "launches": sum(event.count for event in kernels),
        "kernels_us": {
            e.key[:80]: [e.count, e.self_device_time_total] for e in kernels[:TOP_KERNELS]
        },
    }


def _start(
    engine: DirectEngine, size: Size, rows: int, adapters: int, tokens: int, shared_tokens: int = 0
) -> list[int]:
    engine.token_count = 0
    ops = []
    for row in range(rows):
        slot = row % adapters if adapters else -1
        # Different beginnings otherwise, so that no keys and values are shared.
        prompt = tuple(
            (7 * at + 31 * row * (at >= shared_tokens)) % size.vocab for at in range(size.context)
        )
        ops.append(engine.generate(f"{time.monotonic_ns()}", prompt, slot + 1, slot, tokens))
        while shared_tokens and not engine.token_count:
            engine.step()
    return ops


def _activation(engine: DirectEngine, root: Path) -> dict[str, Any]:
    """Return the time of a slot's write with no steps beside it, and that of the bare copy."""
    engine.load(ADAPTERS, f"a{ADAPTERS - 1}")
    torch.cuda.synchronize()
    with _timed() as alone:
        engine.write(ADAPTERS, SLOTS - 1)
        torch.cuda.synchronize()
    source = torch.zeros(_adapter_bytes(root), dtype=torch.uint8, pin_memory=True)
    target = torch.empty_like(source, device="cuda")
    with _timed() as bare:
        target.copy_(source, non_blocking=True)
        torch.cuda.synchronize()
    return {"activation_ms": alone[0], "copy_ms": bare[0], "bytes": source.nbytes}


def _rotation(engine: DirectEngine, size: Size) -> dict[str, Any]:
    """Return the gaps between steps while other adapters are loaded and written to slots."""
    ops = _start(engine, size, SLOTS - 1, SLOTS - 1, 4 * size.steps)
    while engine.token_count < SLOTS - 1:
        engine.step()
    gaps: list[float] = []
    step = engine.step

    def timed_step() -> None:
        with _timed() as gap:
            step()
        gaps.append(gap[0])

    engine.step = timed_step  # type: ignore[method-assign]
    for number in range(SLOTS, ADAPTERS - 1):
        engine.load(number + 1, f"a{number}")
        engine.write(number + 1, SLOTS - 1)
    engine.step = step  # type: ignore[method-assign]
    engine.wait_all(ops)
    gaps.sort()
    return {"gap_p50_ms": gaps[len(gaps) // 2], "gap_max_ms": gaps[-1], "steps": len(gaps)}


@contextmanager
def _timed() -> Iterator[list[float]]:
    """Append the milliseconds of the block to the list."""
    took: list[float] = []
    before = time.perf_counter()
    yield took
    took.append(1e3 * (time.perf_counter() - before))


@contextmanager
def _stopwatch(what: str, captured: bool) -> Iterator[None]:
    with _timed() as took:
        yield
    append("step", captured=captured, what=what, took_ms=took[0])


def _model(size: Size) -> LlamaForCausalLM:
    """Return a Llama in bfloat16 on the device, with random weights."""
    config = LlamaConfig(
        vocab_size=size.vocab,
        hidden_size=size.hidden,
        intermediate_size=size.inner,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.keys,
        max_position_embeddings=8192,
        dtype=torch.bfloat16,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    # Buffers of positions are computed, and can't be made from nothing.
    rotary = type(model.model.rotary_emb)(config)
    model = model.to_empty(device="cuda")
    model.model.rotary_emb = rotary.to("cuda")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0.0, 0.02)
    return model.eval()


def _write_adapter(directory: Path, size: Size) -> None:
    if size is FULL:
        write_adapter(directory, size.rank)
        return
    from peft import LoraConfig, get_peft_model  # noqa: PLC0415 - the small model's alone

    config = LoraConfig(r=size.rank, target_modules=r".*_proj", task_type="CAUSAL_LM")
    base = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=size.vocab,
            hidden_size=size.hidden,
            intermediate_size=size.inner,
            num_hidden_layers=size.layers,
            num_attention_heads=size.heads,
            num_key_value_heads=size.keys,
        )
    )
    get_peft_model(base, config).save_pretrained(directory)


def _kv_bytes(size: Size) -> int:
    """Return the bytes of one sequence's keys and values in bfloat16."""
    return 2 * 2 * size.layers * size.keys * (size.hidden // size.heads) * size.context


def _adapter_bytes(root: Path) -> int:
    return (root / "a0" / "adapter_model.safetensors").stat().st_size


if __name__ == "__main__":
    sys.exit(main())
