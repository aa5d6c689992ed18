"""`make gpu`: what only a CUDA device can show.

What it is: the tests marked `gpu`, the shared kernel tests compiled, some of both again under
compute-sanitizer where that is installed, then the kernels' figures. What it is not: part of CI.
One rule: without a device it says so and succeeds, for nothing was found wrong.
"""

import os
import shlex
import shutil
import subprocess
import sys
from typing import Final

import torch

PYTEST: Final = (sys.executable, "-m", "pytest")
OPERATIONS: Final = (
    *("linear", "shrink", "expand", "shrink_expand", "embedding", "experts"),
    *("experts_shrink_expand", "offsets"),
)
SHARED: Final = tuple(f"tests/engine/kernels/test_{name}.py" for name in OPERATIONS)
SANITIZED: Final = (
    *("same_bits", "runs_of_rows", "lie_apart", "alternate", "may_be_others", "dealt_out"),
    "two_halves_with",
)
"""Parts of the names of the tests that run under a sanitizer: every kernel, in few batches."""
TOOLS: Final = ("memcheck", "racecheck")
TOOLKIT: Final = "/usr/local/cuda/bin"
"""Where CUDA's tools are when no PATH says so."""
COMPILED: Final = {"LORADOCK_TEST_COMPILED": "1"}

Part = tuple[list[str], dict[str, str]]
"""A command, and what its environment has beside this process's."""


def main() -> int:
    """Run all of it, whatever fails; the exit status is that of the first part that failed."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: the tests and benchmarks that need one are skipped")
        print("without one, `pytest tests/engine/kernels/test_compiled.py` shows what the compiler")
        print("makes of each kernel, and tests/engine/kernels/test_triton.py counts what it reads")
        return 0
    print(f"on {torch.cuda.get_device_name()}")
    parts: list[Part] = [
        ([*PYTEST, "-m", "gpu", "--continue-on-collection-errors"], {}),
        ([*PYTEST, "-p", "no:xdist", *SHARED], COMPILED),
        *_sanitizers(),
        ([sys.executable, "-m", "benchmarks.gpu_kernels"], {}),
    ]
    statuses = [_run(*part) for part in parts]
    return next(filter(None, statuses), 0)


def _run(command: list[str], settings: dict[str, str]) -> int:
    status = subprocess.run(command, check=False, env={**os.environ, **settings}).returncode
    if status:
        print(f"status {status}: {shlex.join(command)}", flush=True)
    return status


def _sanitizers() -> list[Part]:
    """One run a tool; PyTorch's allocator is off so that each tensor has bounds of its own."""
    path = shutil.which("compute-sanitizer", path=os.pathsep.join([*os.get_exec_path(), TOOLKIT]))
    if path is None:
        print("compute-sanitizer is not installed: memcheck and racecheck are skipped")
        return []
    files = ("tests/integration/test_kernels_gpu.py", *SHARED)
    tests = [*PYTEST, "-p", "no:xdist", *files, "-k", " or ".join(SANITIZED)]
    settings = {**COMPILED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [([path, "--tool", tool, "--error-exitcode", "9", *tests], settings) for tool in TOOLS]


if __name__ == "__main__":
    sys.exit(main())
