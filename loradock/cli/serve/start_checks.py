"""Checks of what `serve` is started with, before any process starts and without loading the model.

What can't change by trying again is refused here, in one sentence and at once.
"""

import ctypes
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Final

import msgspec
from msgspec import Meta, Struct

from loradock.cli.serve.config import ServeConfig
from loradock.controller.core.limits import Limits
from loradock.messages.engine_options import EngineOptions, LoRAOptions
from loradock.messages.options import flag_of, format_size, options_of

HEADER_BYTES_MAX: Final = 100 << 20

_DEVICE: Final = re.compile(r"(auto|cpu|cuda(?::(?P<index>[0-9]+))?)")
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9_-]+/[A-Za-z0-9._-]+")
_LFS_POINTER: Final = b"version https://git-lfs"
_WHOLE_FILE: Final = "model.safetensors"
_INDEX_FILE: Final = "model.safetensors.index.json"
_Offset = Annotated[int, Meta(ge=0, lt=1 << 62)]
_PACKED: Final = frozenset(
    {"qkv_proj", "qkv", "gate_up_proj", "w13", "qkv_a_proj", "lm_head", "embed_tokens"}
)
"""Modules that can be made when the model is loaded, and are in no file."""


class StartRefused(Exception):  # noqa: N818 - named after the event
    """The server can't be started with these options; `hint`: what to do."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class Start(Struct, frozen=True):
    """Arguments of a managed engine."""

    model: Path
    adapter_roots: tuple[Path, ...] = ()
    lora: LoRAOptions = LoRAOptions()
    engine: EngineOptions = EngineOptions()
    limits: Limits = Limits()
    tensor_parallel_size: int = 1


def start_of(config: ServeConfig) -> Start:
    """Return what the engine of a server is started with; raises `StartRefused` without a model."""
    options = config.options
    if not options.model:
        raise StartRefused(
            "an engine needs a base model",
            "name its directory with --model, or wait for an engine with --engine external",
        )
    return Start(
        Path(options.model),
        tuple(map(Path, options.adapter_roots)),
        config.lora,
        config.engine,
        config.server.limits,
        options.tensor_parallel_size,
    )


def check_start(start: Start) -> None:
    """Raise `StartRefused` for options with which no engine can start."""
    try:
        _check_model(start.model)
        _check_adapter_roots(start.adapter_roots)
    except OSError as error:
        raise StartRefused(
            f"{error.filename} can't be read: {error.strerror}", "let this user read it"
        ) from error
    if start.lora.fully_sharded_loras and start.engine.expert_parallel:
        raise StartRefused(
            "--fully-sharded-loras and --expert-parallel exclude each other",
            "leave one of them out",
        )
    devices = _check_device(start)
    _check_sizes(start.limits, is_cpu=not devices)
    _check_target_modules(start.model, start.lora.target_modules or ())


def _check_adapter_roots(roots: Sequence[Path]) -> None:
    for root in roots:
        if not root.is_dir():
            raise StartRefused(
                f"--adapter-root {root} is not a directory",
                "create it, or name the directory that contains your adapters' directories",
            )


def _check_model(model: Path) -> None:
    if not model.is_dir():
        is_name = _HUB_NAME.fullmatch(str(model)) and not model.parent.exists()
        raise StartRefused(
            f"--model {model} is not a directory",
            f"nothing is downloaded: run `hf download {model} --local-dir DIRECTORY`, and name "
            "that directory"
            if is_name
            else "name the directory of a model on this machine, as save_pretrained writes it",
        )
    adapter = _read_json(model / "adapter_config.json")
    if isinstance(adapter, dict):
        base = adapter.get("base_model_name_or_path") or "in its adapter_config.json"
        raise StartRefused(
            f"--model {model} is an adapter; its base model is {base}",
            "name the base model's directory, and put the adapter below --adapter-root",
        )
    if not (model / "config.json").is_file():
        raise StartRefused(
            f"--model {model} is not a model's directory: it has no config.json",
            "name the directory that contains config.json and the weights",
        )
    if not isinstance(_read_json(model / "config.json"), dict):
        raise StartRefused(f"{model / 'config.json'} is not a JSON object", "copy the model again")
    for path in _weights_files(model):
        _check_is_whole(path)


def _weights_files(model: Path) -> list[Path]:
    """Return the files that the engine reads; others next to them can be anything."""
    if (model / _WHOLE_FILE).is_file():
        return [model / _WHOLE_FILE]
    # A config can name another file, so all are taken if neither usual name is there.
    names = _shard_names(model) or {path.name for path in model.glob("*.safetensors")}
    if names:
        return [model / name for name in sorted(names)]
    has_pickled = any(model.glob("*.bin"))
    raise StartRefused(
        f"--model {model} has no weights: no .safetensors file",
        "its .bin files are not read: load the model elsewhere, and save it with save_pretrained"
        if has_pickled
        else "copy the whole directory, with the files that Git LFS or the hub keep apart",
    )


def _shard_names(model: Path) -> set[str]:
    index = _read_json(model / _INDEX_FILE)
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    names = weight_map.values() if isinstance(weight_map, dict) else ()
    return {name for name in names if isinstance(name, str)}


def _check_is_whole(path: Path) -> None:
    """Refuse what an interrupted download leaves; other damage is found by the engine."""
    if not path.is_file():
        raise StartRefused(
            f"{path} is missing, and the model's weights are in it",
            "copy or download the whole directory again",
        )
    there = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(len(_LFS_POINTER))
    if start == _LFS_POINTER:
        raise StartRefused(
            f"{path} is a pointer of Git LFS, without the weights",
            f"run `git lfs pull` in {path.parent}, or copy the file from elsewhere",
        )
    end = max((entry.data_offsets[1] for entry in _header(path).values()), default=0)
    declared = 8 + int.from_bytes(start[:8], "little") + end
    if there < declared:
        raise StartRefused(
            f"{path} is cut off: it declares {declared} bytes, and {there} are there",
            "copy or download the file again",
        )


class _Entry(Struct):
    """A tensor of a safetensors file's header; other keys have no offsets."""

    data_offsets: tuple[_Offset, _Offset] = (0, 0)


def _header(path: Path) -> dict[str, _Entry]:
    """Return the header of a safetensors file; empty if it is none or cut off."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length) if length <= HEADER_BYTES_MAX else b"{}"
    try:
        return msgspec.json.decode(header, type=dict[str, _Entry])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}


def _read_json(path: Path) -> object:
    try:
        return msgspec.json.decode(path.read_bytes())
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return None


def _check_device(start: Start) -> int:
    """Return the number of CUDA devices that are used; 0 for the CPU."""
    options = start.engine
    match = _DEVICE.fullmatch(options.device)
    if match is None:
        raise StartRefused(
            f"--device {options.device} is not known; it is auto, cpu, cuda or cuda:NUMBER"
        )
    found = cuda_devices() if options.device != "cpu" else 0
    if options.device.startswith("cuda") and found == 0:
        raise StartRefused(
            f"--device {options.device}: this machine has no CUDA device that can be used",
            "leave --device out to serve on the CPU, or install the NVIDIA driver",
        )
    index = int(match["index"] or 0)
    if found and index >= found:
        raise StartRefused(
            f"--device {options.device}: this machine has {found} CUDA devices, numbered from 0"
        )
    switches = {"dual_stream": start.lora.dual_stream}
    switches |= {name: getattr(options, name) for name in ("capture_steps", "pin_memory")}
    for name, is_on in switches.items():
        if is_on and not found:
            raise StartRefused(
                f"{flag_of(name)} needs CUDA, and the engine runs on the CPU",
                "leave it out, or serve on a CUDA device with --device cuda",
            )
    if found and start.tensor_parallel_size > found:
        raise StartRefused(
            f"--tensor-parallel-size {start.tensor_parallel_size}: one CUDA device per process is "
            f"needed, and this machine has {found}"
        )
    return found


def cuda_devices() -> int:
    """Return the number of CUDA devices, 0 without a driver; -1 if they can't be counted."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        # ROCm presents its devices as CUDA, without this driver.
        return -1 if Path("/dev/kfd").exists() else 0
    number = ctypes.c_int(0)
    if driver.cuInit(0) != 0 or driver.cuDeviceGetCount(ctypes.byref(number)) != 0:
        return 0
    return number.value


def memory_total_bytes() -> int:
    """Return the memory of this machine; 0 if it is not known."""
    try:
        line = Path("/proc/meminfo").read_text().partition("\n")[0]
        return int(line.split()[1]) * 1024
    except (OSError, ValueError, IndexError):
        return 0


def _check_sizes(limits: Limits, *, is_cpu: bool) -> None:
    """Refuse memory that the machine does not have; defaults are never refused."""
    total = memory_total_bytes()
    names = ("host_bytes_max", "pinned_bytes_max", *(("device_bytes_max",) if is_cpu else ()))
    for option in options_of(Limits):
        value = getattr(limits, option.field)
        if option.field in names and total and value > max(total, option.default):
            raise StartRefused(
                f"{option.flag} is {format_size(value)}, and this machine has "
                f"{format_size(total)} of memory",
                "name a smaller size, for example 4GiB",
            )


def _check_target_modules(model: Path, targets: Sequence[str]) -> None:
    """Refuse suffixes that no module in the model's files has; full names are left to the engine.

    The files can name modules by other paths than the loaded model does, but not by other suffixes.
    """
    if not targets:
        return
    suffixes = {name.split(".")[-2] for name in _parameters(model) if name.count(".")}
    for target in targets:
        if suffixes and "." not in target and target not in suffixes | _PACKED:
            known = sorted(name for name in suffixes if "norm" not in name)
            raise StartRefused(
                f"--target-module {target} names no module of the model",
                f"its modules are {', '.join(known)}",
            )


def _parameters(model: Path) -> Iterator[str]:
    """Yield the names of the parameters; none of files whose headers can't be read."""
    for path in _weights_files(model):
        yield from _header(path)
