"""The configurations of an engine: frozen dataclasses that validate their values.

A wrong value raises `ValueError` with the field, the value found and the values allowed. No file
is read and no device is opened here: a missing directory or device is found later.
"""

import hashlib
import json
import os
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final

import torch

from loradock.messages.engine_options import (
    DEVICE_BYTES_DEFAULT,
    DTYPES,
    PINNED_BYTES_DEFAULT,
    EngineOptions,
    LoRAOptions,
)
from loradock.messages.options import check_options

LORA_DTYPES: Final[dict[str, torch.dtype]] = {name: getattr(torch, name) for name in DTYPES}
"""The dtypes that weights may have in the arena, by name."""

_LORA: Final = LoRAOptions()


def _check_positive(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


@dataclass(frozen=True)
class LoRAConfig:
    """Configuration of LoRA: ranks, slots, dtype, modules and how layers compute it.

    `max_loras`: device slots. `max_cpu_loras`: adapters on the host; None is `max_loras`.
    `lora_dtype`: "auto" or None (the base model's), a name of `LORA_DTYPES` or one of its dtypes.
    `target_modules`: module suffixes or full names; None for all.
    `fully_sharded_loras`: under tensor parallelism, shard both LoRA matrices; by default one is
    replicated. `default_mm_loras`: modality -> path of the adapter for requests without an adapter,
    if exactly one of their modalities has a path (`default_mm_lora_ids`).
    `enable_tower_connector_lora`: adapters in a multimodal model's tower and connector.
    `specialize_active_lora`: size kernels' grids by the adapters in a batch. `dual_stream`: compute
    LoRA concurrently with the base layer, on a second CUDA stream; switched off if LoRA is fully
    sharded. None is on if there is CUDA and the environment variable
    `VLLM_LORA_ENABLE_DUAL_STREAM` is 1, and stored as the boolean. `batch_invariant`: a row's bits
    do not depend on its batch.
    `enable_mixed_moe_lora_format`: store expert adapters of the 3-D layout by projection, as those
    of the 2-D layout, so that one product serves both; both are served without it too.
    Raises `ValueError`.
    """

    max_lora_rank: int = _LORA.max_lora_rank
    max_loras: int = 1
    fully_sharded_loras: bool = _LORA.fully_sharded_loras
    max_cpu_loras: int | None = None
    lora_dtype: str | torch.dtype | None = _LORA.lora_dtype
    target_modules: Sequence[str] | None = _LORA.target_modules
    default_mm_loras: Mapping[str, str] | None = field(default=_LORA.default_mm_loras, hash=False)
    enable_tower_connector_lora: bool = _LORA.enable_tower_connector_lora
    specialize_active_lora: bool = _LORA.specialize_active_lora
    enable_mixed_moe_lora_format: bool = _LORA.enable_mixed_moe_lora_format
    dual_stream: bool | None = _LORA.dual_stream
    batch_invariant: bool = _LORA.batch_invariant

    def __post_init__(self) -> None:
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        if self.dual_stream is None:
            object.__setattr__(self, "dual_stream", _wants_dual_stream(os.environ))
        if self.lora_dtype is None:
            object.__setattr__(self, "lora_dtype", "auto")
        _check_positive(self, ("max_loras", "max_cpu_loras"))
        if self.max_cpu_loras is not None and self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras must be at least max_loras, which is {self.max_loras}, "
                f"got {self.max_cpu_loras}"
            )
        _check_dtype(self.lora_dtype)
        check_options(self, LoRAOptions, ("max_lora_rank", *LORA_SWITCHES))
        if self.target_modules is not None:
            object.__setattr__(self, "target_modules", _target_modules(self.target_modules))
        if self.default_mm_loras is not None:
            object.__setattr__(self, "default_mm_loras", _modalities(self.default_mm_loras))
        if self.dual_stream and self.fully_sharded_loras:
            warnings.warn(
                "dual_stream is switched off: with fully_sharded_loras the collectives between the "
                "two products leave nothing to run concurrently with the base layer",
                stacklevel=3,
            )
            object.__setattr__(self, "dual_stream", False)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype in the arena; raises `ValueError` if `lora_dtype` is "auto"."""
        if isinstance(self.lora_dtype, torch.dtype):
            return self.lora_dtype
        if self.lora_dtype in ("auto", None):
            raise ValueError("lora_dtype is 'auto'; resolve it with verify_with_model_config first")
        return LORA_DTYPES[self.lora_dtype]

    def verify_with_model_config(self, model_config: Any) -> "LoRAConfig":
        """Resolve `lora_dtype` in place, as vLLM does, and return this configuration.

        This is the only change after construction; `resolved_for` returns a copy instead. Raises
        like it.
        """
        object.__setattr__(self, "lora_dtype", self.resolved_for(model_config).lora_dtype)
        return self

    def resolved_for(self, model_config: Any) -> "LoRAConfig":
        """Return a copy with `lora_dtype` resolved to a torch dtype.

        `model_config` is a `transformers` configuration, or another object with a `dtype` (a torch
        dtype or its name). Raises `ValueError` if "auto" finds a dtype that LoRA weights can't
        have.
        """
        if self.lora_dtype != "auto":
            return replace(self, lora_dtype=self.dtype)
        found = getattr(model_config, "dtype", None)
        name = str(found).removeprefix("torch.")
        if name not in LORA_DTYPES:
            raise ValueError(
                f"the base model's dtype is {found!r}; lora_dtype 'auto' supports "
                f"{', '.join(LORA_DTYPES)}; set lora_dtype to one of these"
            )
        return replace(self, lora_dtype=LORA_DTYPES[name])

    def verify_with_device(self, device: torch.device) -> None:
        """Raise `ValueError` for a setting that `device` does not support."""
        if self.dual_stream and device.type != "cuda":
            raise ValueError(
                f"dual_stream is True on device {str(device)!r}; a second stream needs CUDA; "
                "set it to False"
            )

    def default_mm_lora(self, modalities: Collection[str]) -> str | None:
        """Return the default adapter's path for a request with these modalities.

        None unless exactly one of them has a default.
        """
        paths = self.default_mm_loras or {}
        present = paths.keys() & set(modalities)
        return paths[present.pop()] if len(present) == 1 else None

    @property
    def default_mm_lora_ids(self) -> dict[str, int]:
        """The ids of the default adapters: 1, 2, ... by modality in alphabetical order."""
        return {name: number for number, name in enumerate(sorted(self.default_mm_loras or {}), 1)}

    def compute_hash(self) -> str:
        """Return a stable hash, in hex, of all fields that change buffers or the computation.

        `max_cpu_loras` and `default_mm_loras` change neither and are left out. "auto" and the dtype
        that it is resolved to have different hashes: resolve it with `verify_with_model_config`.
        """
        fields = {name: getattr(self, name) for name in _HASHED}
        fields["lora_dtype"] = str(self.lora_dtype).removeprefix("torch.")
        if self.target_modules is not None:
            fields["target_modules"] = sorted(set(self.target_modules))
        return hashlib.sha256(json.dumps([_HASH_VERSION, fields]).encode()).hexdigest()


LORA_SWITCHES: Final = (
    *("fully_sharded_loras", "enable_tower_connector_lora", "specialize_active_lora"),
    *("dual_stream", "batch_invariant", "enable_mixed_moe_lora_format"),
)
"""The boolean fields of `LoRAConfig`."""

DUAL_STREAM_VARIABLE: Final = "VLLM_LORA_ENABLE_DUAL_STREAM"
"""The environment variable that is the default of `dual_stream`."""

_HASH_VERSION: Final = 2
_HASHED: Final = ("max_lora_rank", "max_loras", "lora_dtype", "target_modules", *LORA_SWITCHES)


@dataclass(frozen=True)
class AdapterBounds:
    """Bounds on the files of an adapter; a file that exceeds one is refused before it is read.

    Sizes in bytes. `tensors_max` is bounded further by what the model could use. `pattern_*` bound
    `rank_pattern` and `alpha_pattern`; `problems_max` is the number of problems in the text of one
    error, whose details have all.
    """

    config_bytes_max: int = 1 << 20
    config_values_max: int = 65_536
    header_bytes_max: int = 16 << 20
    weights_bytes_max: int = 8 << 30
    tensors_max: int = 65_536
    json_depth_max: int = 32
    name_characters_max: int = 512
    patterns_max: int = 4096
    pattern_characters_max: int = 512
    problems_max: int = 4

    def __post_init__(self) -> None:
        _check_positive(self, tuple(self.__dataclass_fields__))


DEFAULT_BOUNDS: Final = AdapterBounds()
"""The default bounds."""


@dataclass(frozen=True)
class EngineConfig(EngineOptions):
    """Configuration of an engine: the options that a server has, and what it is started with.

    `adapter_roots`: directories that adapters are loaded from. `device_bytes_max`: the arena's
    size. `pinned_bytes_max`: page-locked host memory, reserved at start if blobs are page-locked.
    Raises `ValueError`.
    """

    model_directory: Path
    adapter_roots: tuple[Path, ...] = ()
    device_bytes_max: int = DEVICE_BYTES_DEFAULT
    pinned_bytes_max: int = PINNED_BYTES_DEFAULT

    def __post_init__(self) -> None:
        if isinstance(self.adapter_roots, str | Path):
            raise ValueError(
                f"adapter_roots must be a list of directories, got {self.adapter_roots!r}"
            )
        object.__setattr__(self, "model_directory", Path(self.model_directory))
        object.__setattr__(self, "adapter_roots", tuple(Path(p) for p in self.adapter_roots))
        _check_positive(self, ("device_bytes_max", "pinned_bytes_max"))
        check_options(self)
        if self.pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory must be false or None without CUDA, got True")

    @property
    def torch_device(self) -> torch.device:
        """The device, with "auto" resolved."""
        if self.device == "auto":
            return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return torch.device(self.device)

    @property
    def pins(self) -> bool:
        """True if blobs are page-locked."""
        return self.torch_device.type == "cuda" if self.pin_memory is None else self.pin_memory


def _wants_dual_stream(environment: Mapping[str, str]) -> bool:
    """Return whether the environment sets a second stream, and this machine has one."""
    is_on = environment.get(DUAL_STREAM_VARIABLE, "0").lower() in ("1", "true")
    return is_on and torch.cuda.is_available()


def _check_dtype(dtype: object) -> None:
    known = dtype in LORA_DTYPES.values() if isinstance(dtype, torch.dtype) else dtype == "auto"
    if not known and not (isinstance(dtype, str) and dtype in LORA_DTYPES):
        raise ValueError(
            f"lora_dtype must be auto, {', '.join(LORA_DTYPES)} or one of these dtypes, "
            f"got {dtype!r}"
        )


def _target_modules(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(
            f"target_modules must be a list of module suffixes or full names, got {names!r}"
        )
    if not names:
        raise ValueError(
            "target_modules must not be empty; None wraps every module that can be wrapped"
        )
    return tuple(names)


def _modalities(paths: Mapping[str, str]) -> Mapping[str, str]:
    is_sound = isinstance(paths, Mapping) and all(
        isinstance(text, str) and text for pair in paths.items() for text in pair
    )
    if not is_sound:
        raise ValueError(
            f"default_mm_loras must be a mapping of modality to adapter path, got {paths!r}"
        )
    return MappingProxyType(dict(paths))
