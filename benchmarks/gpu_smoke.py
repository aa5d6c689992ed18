"""`make gpu`, stage smoke: versions, the backends that are chosen, and tokens of eight adapters."""

import sys
from pathlib import Path
from typing import Final

import torch
from torch.profiler import ProfilerActivity, profile

from benchmarks.gpu_engine import DirectEngine
from benchmarks.gpu_lines import append
from examples.transformations import TRANSFORMATIONS, answer_of, prompt_of
from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model

TINY: Final = Path(__file__).parents[1] / "examples" / "tiny"
WORD: Final = "hello"
PACKAGES: Final = (
    *("torch", "triton", "transformers", "safetensors", "tokenizers", "msgspec", "structlog"),
    *("xxhash", "flashinfer", "flash_attn", "kernels", "liger_kernel"),
)
ATTENTION: Final = {
    "decode": ((8, 32, 1, 128), (8, 8, 1024, 128), False),
    "prefill": ((1, 32, 1024, 128), (1, 8, 1024, 128), True),
}
"""Shapes of queries and keys, and whether attention is causal."""


def main() -> int:
    """Append the versions, the backends, and the answers; 1 if one is wrong."""
    append("smoke", versions={name: _version(name) for name in PACKAGES})
    properties = torch.cuda.get_device_properties(0)
    append(
        "smoke",
        card=torch.cuda.get_device_name(),
        capability=torch.cuda.get_device_capability(),
        memory_bytes=properties.total_memory,
        multiprocessors=properties.multi_processor_count,
        cuda=torch.version.cuda,
        cudnn=torch.backends.cudnn.version() if torch.backends.cudnn.is_available() else None,
    )
    for name in ATTENTION:
        append("smoke", attention=name, kernels=_attention_kernels(name))
    wrong = {name: text for name, text in _answers().items() if text != answer_of(name, WORD)}
    append("smoke", adapters=len(TRANSFORMATIONS), wrong=wrong)
    return bool(wrong)


def _version(package: str) -> str | None:
    """Return the version of a package that the engine has imported; None for another one."""
    return getattr(sys.modules.get(package), "__version__", None)


def _attention_kernels(name: str) -> list[str]:
    """Return the kernels of PyTorch's attention in bfloat16 for one pair of shapes."""
    queries, keys, is_causal = ATTENTION[name]
    query, key = (torch.zeros(s, device="cuda", dtype=torch.bfloat16) for s in (queries, keys))
    attend = torch.nn.functional.scaled_dot_product_attention
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        attend(query, key, key, is_causal=is_causal, enable_gqa=True)
        torch.cuda.synchronize()
    return [event.key[:120] for event in profiled.key_averages()]


def _answers() -> dict[str, str]:
    """Return the answer of every example adapter, from slots that are written while others run."""
    config = EngineConfig(
        TINY / "model", (TINY / "adapters",), device="cuda", device_bytes_max=8 << 20
    )
    lora_config = LoRAConfig(max_lora_rank=64, max_loras=3)
    engine = DirectEngine(load_model(config, lora_config), config, lora_config)
    ops: list[int] = []
    for number, name in enumerate(TRANSFORMATIONS):
        slot = number % lora_config.max_loras
        if number >= lora_config.max_loras:
            engine.wait(ops[number - lora_config.max_loras])
        engine.load(number + 1, name)
        engine.write(number + 1, slot)
        ops.append(engine.generate(name, prompt_of(WORD), number + 1, slot, tokens=32))
    engine.wait_all(ops[-lora_config.max_loras :])
    engine.engine.close()
    return engine.texts


if __name__ == "__main__":
    sys.exit(main())
