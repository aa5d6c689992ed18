"""`make gpu`: what only a CUDA device can show.

What it is: the tests marked `gpu`, the shared kernel tests compiled, some of both again under
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
OPERATIONS: Final = (
    *("linear", "shrink", "expand", "halves", "embedding", "experts", "experts_halves", "offsets"),
)
SHARED: Final = tuple(f"tests/test_engine_kernels_{name}.py" for name in OPERATIONS)
SANITIZED: Final = (
    *("same_bits", "runs_of_rows", "lie_apart", "alternate", "may_be_others", "dealt_out"),
    "two_halves_with",
)
"""Parts of the names of the tests that run under a sanitizer: every kernel, in few batches."""
TOOLS: Final = ("memcheck", "racecheck")
COMPILED: Final = {"LORADOCK_TEST_COMPILED": "1"}


def main() -> int:
    """Run all of it; the exit status is that of the first part that failed."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: the tests and benchmarks that need one are skipped")
        print("without one, `pytest tests/test_engine_kernels_compiled.py` shows what the compiler")
        print("makes of each kernel, and tests/test_engine_kernels_triton.py counts what it reads")
        return 0
    print(f"on {torch.cuda.get_device_name()}")
    parts: list[tuple[list[str], dict[str, str]]] = [
        ([*PYTEST, "-m", "gpu"], {}),
        ([*PYTEST, "-p", "no:xdist", *SHARED], COMPILED),
        *_sanitizers(),
        ([sys.executable, "-m", "benchmarks.gpu_kernels"], {}),
    ]
    for command, settings in parts:
        environment = {**os.environ, **settings}
        status = subprocess.run(command, check=False, env=environment).returncode
        if status:
            return status
    return 0


def _sanitizers() -> list[tuple[list[str], dict[str, str]]]:
    """One run a tool; PyTorch's allocator is off so that each tensor has bounds of its own."""
    path = shutil.which("compute-sanitizer")
    if path is None:
        print("compute-sanitizer is not installed: memcheck and racecheck are skipped")
        return []
    files = ("tests/test_engine_kernels_gpu.py", *SHARED)
    tests = [*PYTEST, "-p", "no:xdist", *files, "-k", " or ".join(SANITIZED)]
    settings = {**COMPILED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [([path, "--tool", tool, "--error-exitcode", "9", *tests], settings) for tool in TOOLS]


if __name__ == "__main__":
    sys.exit(main())
