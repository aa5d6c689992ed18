"""`make gpu`: what only a CUDA device can show.

What it is: the tests marked `gpu`, the shared kernel tests compiled, both again under
compute-sanitizer where that is installed, then the kernels' figures. What it is not: part of CI.
One rule: without a device it says so and succeeds, for nothing was found wrong.
"""

import os
import shutil
import subprocess
import sys
from typing import Final

import torch

PYTEST: Final = (sys.executable, "-m", "pytest")
OPERATIONS: Final = ("linear", "shrink", "expand", "embedding", "experts", "offsets")
SHARED: Final = tuple(f"tests/test_engine_kernels_{name}.py" for name in OPERATIONS)
SANITIZED: Final = ("tests/test_engine_kernels_gpu.py",)
TOOLS: Final = ("memcheck", "racecheck")


def main() -> int:
    """Run all of it; the exit status is that of the first part that failed."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: the tests and benchmarks that need one are skipped")
        print("without one, `pytest tests/test_engine_kernels_compiled.py` shows what the compiler")
        print("makes of each kernel, and tests/test_engine_kernels_triton.py counts what it reads")
        return 0
    print(f"on {torch.cuda.get_device_name()}")
    compiled = {"LORADOCK_TEST_COMPILED": "1"}
    parts = [
        ([*PYTEST, "-m", "gpu"], {}),
        ([*PYTEST, "-p", "no:xdist", *SHARED], compiled),
        *[(command, {}) for command in _sanitizers()],
        ([sys.executable, "-m", "benchmarks.gpu_kernels"], {}),
    ]
    for command, settings in parts:
        environment = {**os.environ, **settings}
        status = subprocess.run(command, check=False, env=environment).returncode
        if status:
            return status
    return 0


def _sanitizers() -> list[list[str]]:
    """One run a tool; PyTorch's allocator is off so that each tensor has bounds of its own."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        print("compute-sanitizer is not installed: memcheck and racecheck are skipped")
        return []
    return [
        [
            *("env", "PYTORCH_NO_CUDA_MEMORY_CACHING=1"),
            *(path, "--tool", tool, "--error-exitcode", "9"),
            *(*PYTEST, *SANITIZED, "-k", "same_bits"),
        ]
        for tool in TOOLS
    ]


if __name__ == "__main__":
    sys.exit(main())
