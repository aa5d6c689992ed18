"""Adapter files for tests, valid and malformed."""

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import DEFAULT_BOUNDS, AdapterBounds, LoRAConfig
from loradock.engine.layout import ModuleShape

Q, V, DOWN = (f"model.layers.0.{name}" for name in ("attn.q_proj", "attn.v_proj", "mlp.down_proj"))
MODULES = {
    name: ModuleShape(name, *widths, index)
    for index, (name, widths) in enumerate({Q: (16, 16), V: (16, 8), DOWN: (24, 16)}.items())
}
LORA_CONFIG = LoRAConfig(max_lora_rank=8, lora_dtype="bfloat16")
CONFIG: Mapping[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 8,
    "target_modules": ["q_proj", "v_proj"],
    "bias": "none",
    "init_lora_weights": True,
}


def key(module: str, matrix: str) -> str:
    return f"base_model.model.{module}.lora_{matrix}.weight"


def pair(module: str, rank: int = 4, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    """Return a module's A and B, with values that depend on the module alone."""
    shape = MODULES[module]
    generator = torch.Generator().manual_seed(shape.index)
    a = torch.randn(rank, shape.in_features, generator=generator)
    b = torch.randn(shape.out_features, rank, generator=generator)
    return {key(module, "A"): a.to(dtype), key(module, "B"): b.to(dtype)}


def tensors(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """The sound adapter's tensors; `q_A=...` replaces one, `q_A=None` takes it away."""
    found = pair(Q) | pair(V)
    for name, tensor in changes.items():
        module, matrix = name.split("_")
        path = key({"q": Q, "v": V}[module], matrix)
        del found[path]
        if tensor is not None:
            found[path] = tensor
    return found


def write(
    directory: Path,
    config: Mapping[str, Any] | bytes = CONFIG,
    weights: Mapping[str, torch.Tensor] | bytes | None = None,
) -> Path:
    """Write an adapter's two files; bytes are written unchanged."""
    directory.mkdir(parents=True, exist_ok=True)
    raw = config if isinstance(config, bytes) else json.dumps(config).encode()
    (directory / "adapter_config.json").write_bytes(raw)
    weights = tensors() if weights is None else weights
    raw = weights if isinstance(weights, bytes) else save(dict(weights))
    (directory / "adapter_model.safetensors").write_bytes(raw)
    return directory


def stored(
    header: Mapping[str, Any] | bytes, data: bytes = b"", length: int | None = None
) -> bytes:
    """Return a weights file with this header, valid or not, after this length."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def read(
    path: Path,
    lora_config: LoRAConfig = LORA_CONFIG,
    bounds: AdapterBounds = DEFAULT_BOUNDS,
    modules: Mapping[str, ModuleShape] = MODULES,
) -> LoadedAdapter:
    """Read the adapter in a directory, with its parent directory as the only root."""
    return read_adapter(
        path.name, [path.parent], AdapterTarget(modules, lora_config), "sample", bounds=bounds
    )
