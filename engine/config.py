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

LORA_RANKS: Final = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""The values that `max_lora_rank` may have."""

LORA_DTYPES: Final = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
}
"""The dtypes that weights may have in the arena, by name."""


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_positive(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not _is_int(value) or value < 1:
            raise ValueError(f"{name} is {value!r}; an integer of at least 1")


def _check_switches(config: object, names: tuple[str, ...]) -> None:
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, bool):
            raise ValueError(f"{name} is {value!r}; True or False")


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
    sharded. By default it is on if there is CUDA and the environment variable
    `VLLM_LORA_ENABLE_DUAL_STREAM` is 1. `batch_invariant`: a row's bits do not depend on its batch.
    `enable_mixed_moe_lora_format`: store expert adapters of the 3-D layout by projection, as those
    of the 2-D layout, so that one product serves both; both are served without it too.
    Raises `ValueError`.
    """

    max_lora_rank: int = 16
    max_loras: int = 1
    fully_sharded_loras: bool = False
    max_cpu_loras: int | None = None
    lora_dtype: str | torch.dtype | None = "auto"
    target_modules: Sequence[str] | None = None
    default_mm_loras: Mapping[str, str] | None = field(default=None, hash=False)
    enable_tower_connector_lora: bool = False
    specialize_active_lora: bool = False
    enable_mixed_moe_lora_format: bool = False
    dual_stream: bool = field(default_factory=lambda: _wants_dual_stream(os.environ))
    batch_invariant: bool = False

    def __post_init__(self) -> None:
        if not _is_int(self.max_lora_rank) or self.max_lora_rank not in LORA_RANKS:
            raise ValueError(f"max_lora_rank is {self.max_lora_rank!r}; one of {LORA_RANKS}")
        if not _is_int(self.max_loras) or self.max_loras < 1:
            raise ValueError(f"max_loras is {self.max_loras!r}; an integer of at least 1")
        if self.max_cpu_loras is None:
            object.__setattr__(self, "max_cpu_loras", self.max_loras)
        elif not _is_int(self.max_cpu_loras) or self.max_cpu_loras < self.max_loras:
            raise ValueError(
                f"max_cpu_loras is {self.max_cpu_loras!r}; an integer of at least max_loras, "
                f"which is {self.max_loras}"
            )
        if self.lora_dtype is None:
            object.__setattr__(self, "lora_dtype", "auto")
        _check_dtype(self.lora_dtype)
        _check_switches(self, LORA_SWITCHES)
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

    Sizes in bytes. `pattern_*` bound `rank_pattern` and `alpha_pattern`; `problems_max` is the
    number of problems in the text of one error, whose details have all.
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


def _check_choice(config: object, name: str, choices: tuple[str, ...]) -> None:
    value = getattr(config, name)
    if value not in ("auto", *choices):
        raise ValueError(f"{name} is {value!r}; auto, or one of {', '.join(choices)}")


TASKS: Final = ("generate", "embed", "classify")
"""The tasks that an engine can have."""

POOLINGS: Final = ("mean", "cls", "last")
"""The ways to make one vector of the hidden states of a text's tokens."""

UNQUANTIZED: Final = "none"
"""The quantization of a model that is loaded as it was saved."""

QUANTIZATIONS: Final = (
    *("torchao-int8", "torchao-int4", "bitsandbytes-8bit", "bitsandbytes-4bit", "fp8"),
)
"""The ways to quantise a model while it is loaded."""

DEFAULT_BOUNDS: Final = AdapterBounds()
"""The default bounds."""


ADAPTER_WEIGHT_MAX: Final = 1000


@dataclass(frozen=True)
class EngineConfig:
    """Configuration of an engine process.

    `adapter_roots`: directories that adapters are loaded from. `allow_pickled_weights`: whether an
    adapter without a safetensors file may have `.bin` or `.pt` weights. `device`: a torch device,
    or "auto" for the first CUDA device if there is one, else the CPU. `dtype`: of the base model, a
    name of `LORA_DTYPES`, or "auto" for the saved one; on a CPU "auto" is float32 where its
    products are much faster there. `device_bytes_max`: the arena's size. `pin_memory`: None means
    only if the device is CUDA. `file_threads`: the number of threads that read adapters, and of
    those that read images. `max_num_seqs`: sequences processed together. `max_num_batched_tokens`:
    tokens per step, so that long prompts are processed in chunks; 0 chooses it from the model's
    speed at start. `queue_requests_max`:
    requests that wait in the engine. `kv_cache_bytes`: memory for keys and values, per rank; 0
    chooses it. `paged_attention`: whether keys and values are kept in blocks where the model allows
    it; `prefix_caching`: whether prompts with the same beginning share these. `context_tokens_max`:
    prompt and output together; 0 is the model's own limit. `task`: one of `TASKS`, or "auto" for
    what the model's config specifies. `pooling`: one of `POOLINGS`, or "auto"; `normalize`: whether
    vectors have length 1; "auto" and None follow the model's files.
    `expert_parallel`: with several ranks, each keeps some experts whole instead of some columns of
    every expert. `quantization`: one of `QUANTIZATIONS` to quantise the model while it is loaded.
    `capture_steps`: capture decode steps as CUDA graphs and replay them, if the model
    allows it. `adapter_weights`: by adapter name, its share of the steps while several adapters
    wait, 1 by default. Raises `ValueError`.
    """

    model_directory: Path
    adapter_roots: tuple[Path, ...] = ()
    allow_pickled_weights: bool = False
    device: str = "auto"
    dtype: str = "auto"
    device_bytes_max: int = 1 << 30
    pin_memory: bool | None = None
    file_threads: int = 2
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 0
    queue_requests_max: int = 1024
    kv_cache_bytes: int = 0
    paged_attention: bool = True
    prefix_caching: bool = True
    context_tokens_max: int = 0
    task: str = "auto"
    pooling: str = "auto"
    normalize: bool | None = None
    expert_parallel: bool = False
    capture_steps: bool = False
    quantization: str = "none"
    adapter_weights: Mapping[str, int] | None = None
    adapter_bounds: AdapterBounds = field(default_factory=AdapterBounds)

    def __post_init__(self) -> None:
        if isinstance(self.adapter_roots, str | Path):
            raise ValueError(f"adapter_roots is {self.adapter_roots!r}; a list of directories")
        object.__setattr__(self, "model_directory", Path(self.model_directory))
        object.__setattr__(self, "adapter_roots", tuple(Path(p) for p in self.adapter_roots))
        _check_positive(
            self, ("device_bytes_max", "file_threads", "max_num_seqs", "queue_requests_max")
        )
        _check_switches(self, ENGINE_SWITCHES)
        _check_choice(self, "dtype", tuple(LORA_DTYPES))
        _check_choice(self, "task", TASKS)
        _check_choice(self, "pooling", POOLINGS)
        for name in ("context_tokens_max", "max_num_batched_tokens", "kv_cache_bytes"):
            value = getattr(self, name)
            if not _is_int(value) or value < 0:
                raise ValueError(f"{name} is {value!r}; an integer of at least 0")
        if self.quantization not in (UNQUANTIZED, *QUANTIZATIONS):
            raise ValueError(
                f"quantization is {self.quantization!r}; {UNQUANTIZED}, or one of "
                f"{', '.join(QUANTIZATIONS)}"
            )
        for name, weight in (self.adapter_weights or {}).items():
            if not _is_int(weight) or not 1 <= weight <= ADAPTER_WEIGHT_MAX:
                raise ValueError(
                    f"the weight of adapter {name!r} is {weight!r}; an integer from 1 to "
                    f"{ADAPTER_WEIGHT_MAX}"
                )
        if self.pin_memory and not torch.cuda.is_available():
            raise ValueError("pin_memory is True; page-locked memory needs CUDA")

    @property
    def torch_device(self) -> torch.device:
        """The device, with "auto" resolved."""
        if self.device == "auto":
            return torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        return torch.device(self.device)

    @property
    def pins(self) -> bool:
        """Whether blobs are page-locked."""
        return self.torch_device.type == "cuda" if self.pin_memory is None else self.pin_memory


ENGINE_SWITCHES: Final = (
    *("allow_pickled_weights", "expert_parallel", "capture_steps"),
    *("paged_attention", "prefix_caching"),
)
"""The boolean fields of `EngineConfig`."""


def _wants_dual_stream(environment: Mapping[str, str]) -> bool:
    """Whether the environment sets a second stream, and this machine has one."""
    is_on = environment.get(DUAL_STREAM_VARIABLE, "0").lower() in ("1", "true")
    return is_on and torch.cuda.is_available()


def _check_dtype(dtype: object) -> None:
    known = dtype in LORA_DTYPES.values() if isinstance(dtype, torch.dtype) else dtype == "auto"
    if not known and not (isinstance(dtype, str) and dtype in LORA_DTYPES):
        raise ValueError(
            f"lora_dtype is {dtype!r}; 'auto', {', '.join(LORA_DTYPES)}, or one of these dtypes"
        )


def _target_modules(names: Sequence[str]) -> tuple[str, ...]:
    if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
        raise ValueError(f"target_modules is {names!r}; a list of module suffixes or full names")
    if not names:
        raise ValueError("target_modules is empty; None wraps every module that can be wrapped")
    return tuple(names)


def _modalities(paths: Mapping[str, str]) -> Mapping[str, str]:
    is_sound = isinstance(paths, Mapping) and all(
        isinstance(text, str) and text for pair in paths.items() for text in pair
    )
    if not is_sound:
        raise ValueError(f"default_mm_loras is {paths!r}; a mapping of modality to adapter path")
    return MappingProxyType(dict(paths))
