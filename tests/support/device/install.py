"""Installation of the simulated device in this process, for its lifetime."""

import ctypes
import os
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import torch
from torch import Tensor

from tests.support.device.graphs import Graph, capture_graph
from tests.support.device.record import RECORD, Record
from tests.support.device.streams import (
    DEFAULT,
    HOST,
    PINNED,
    Event,
    Stream,
    current_stream,
    host_waits,
    use_stream,
)
from tests.support.device.tensors import SimulatedTensor, simulated_calls

CAPABILITY: Final = (9, 0)
MULTIPROCESSORS: Final = 132
TOTAL_BYTES: Final = 80 << 30
FREE_BYTES: Final = 60 << 30
_SUCCESS: Final = 0


@contextmanager
def simulated_device() -> Iterator[Record]:
    """Install the device, and run the block with it; threads that it starts have it too."""
    install()
    RECORD.reset()
    with simulated_calls():
        yield RECORD


@cache
def install() -> None:
    """Replace the functions of `torch.cuda` by those of the simulated device."""
    if os.environ.setdefault("TRITON_INTERPRET", "1") != "1":
        raise RuntimeError("TRITON_INTERPRET must be 1 with a simulated device")
    # These import Triton, which reads the variable.
    from loradock.engine.models import packing  # noqa: PLC0415
    from tests.support.device.kernels import install_kernels  # noqa: PLC0415

    ctypes.CDLL(str(_guard()), ctypes.RTLD_GLOBAL)
    torch._C._set_only_lift_cpu_tensors(True)
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    for name, replacement in _CUDA.items():
        setattr(torch.cuda, name, replacement)
    is_pinned = Tensor.is_pinned
    Tensor.is_pinned = lambda self, device=None: PINNED.contains(self) or is_pinned(self)
    run = threading.Thread.run

    def run_with_device(self: threading.Thread) -> None:
        with simulated_calls():
            run(self)

    threading.Thread.run = run_with_device  # type: ignore[method-assign]
    install_kernels()
    is_plain = packing._is_plain_weight
    packing._is_plain_weight = lambda weight: (
        isinstance(weight, SimulatedTensor) or is_plain(weight)
    )


def _guard() -> Path:
    """Return the compiled `guard.cpp`, which is kept for each version of PyTorch. Needs g++."""
    target = Path(tempfile.gettempdir()) / f"simulated-guard-{os.getuid()}-{torch.__version__}.so"
    if not target.exists():
        home = Path(torch.__file__).parent
        source = Path(__file__).with_name("guard.cpp")
        made = target.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}"
        options = ["-O1", "-shared", "-fPIC", "-std=c++20", abi, f"-I{home}/include"]
        linked = [f"-L{home}/lib", "-lc10"]
        subprocess.run(["g++", *options, str(source), "-o", str(made), *linked], check=True)
        made.rename(target)
    return target


def _synchronize(device: object = None) -> None:
    HOST.join(DEFAULT.clock)
    host_waits("cuda.synchronize")


_PROPERTIES: Final = SimpleNamespace(
    name="simulated",
    major=CAPABILITY[0],
    minor=CAPABILITY[1],
    multi_processor_count=MULTIPROCESSORS,
    total_memory=TOTAL_BYTES,
)
_RUNTIME: Final = SimpleNamespace(
    cudaHostRegister=PINNED.register, cudaHostUnregister=PINNED.unregister
)
_CUDA: Final[dict[str, Any]] = {
    "_lazy_init": lambda: None,
    "is_available": lambda: True,
    "is_initialized": lambda: True,
    "device_count": lambda: 1,
    "current_device": lambda: 0,
    "set_device": lambda device: None,
    "device": lambda device=None: nullcontext(),
    "Stream": Stream,
    "Event": Event,
    "current_stream": current_stream,
    "default_stream": lambda device=None: DEFAULT,
    "stream": use_stream,
    "StreamContext": use_stream,
    "synchronize": _synchronize,
    "mem_get_info": lambda device=None: (FREE_BYTES, TOTAL_BYTES),
    "memory_allocated": lambda device=None: 0,
    "get_device_capability": lambda device=None: CAPABILITY,
    "get_device_name": lambda device=None: "simulated",
    "get_device_properties": lambda device=None: _PROPERTIES,
    "graph_pool_handle": object,
    "CUDAGraph": Graph,
    "graph": capture_graph,
    "empty_cache": lambda: None,
    "cudart": lambda: _RUNTIME,
    "_sleep": lambda cycles: None,
}
