"""`make gpu`: the tests and benchmarks that need a CUDA device.

These are the tests marked `gpu`, the shared kernel tests with compiled kernels, some of both under
compute-sanitizer if it is installed, and the kernels' figures. Without a device it prints a message
and succeeds.
"""

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import torch

PYTEST: Final = (sys.executable, "-m", "pytest")
OPERATIONS: Final = (
    *("linear", "shrink_expand", "embedding", "experts", "experts_shrink_expand", "offsets"),
)
SHARED: Final = tuple(f"tests/engine/kernels/test_{name}.py" for name in OPERATIONS)
SANITIZED: Final = (
    *("same_bits", "runs_of_rows", "may_be_strided", "alternate", "may_differ", "striped_ranks"),
    "with_an_exchange",
)
"""Parts of the names of the tests that run under a sanitizer: every kernel, in few batches."""
TOOLS: Final = ("memcheck", "racecheck")
TOOLKIT: Final = "/usr/local/cuda/bin"
"""The directory of CUDA's tools, where PATH lacks it."""
COMPILED: Final = {"LORADOCK_TEST_COMPILED": "1"}
TESTS: Final = Path(__file__).parents[1] / "tests"
MARK: Final = "pytest.mark.gpu"

Command = tuple[list[str], dict[str, str]]
"""A command, and additions to its environment."""


def main() -> int:
    """Run every command, also after a failure; the exit status is that of the first that failed."""
    if not torch.cuda.is_available():
        print("no CUDA device: the tests and benchmarks that need one are skipped")
        print("without a device, tests/engine/kernels/test_compiled.py compiles every kernel, and")
        print("tests/engine/kernels/test_triton.py runs the kernels in Triton's interpreter")
        return 0
    print(f"on {torch.cuda.get_device_name()}")
    commands: list[Command] = [
        ([*PYTEST, "-m", "gpu", "--continue-on-collection-errors", *marked_files()], {}),
        ([*PYTEST, "-p", "no:xdist", *SHARED], COMPILED),
        *_sanitizer_commands(),
        ([sys.executable, "-m", "benchmarks.gpu_kernels"], {}),
    ]
    statuses = [_run(*command) for command in commands]
    return next(filter(None, statuses), 0)


def marked_files() -> list[str]:
    """Return the files with tests that are marked `gpu`; all others may need more libraries."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [str(file.relative_to(TESTS.parent)) for file in files if MARK in file.read_text()]


def _run(command: list[str], settings: dict[str, str]) -> int:
    status = subprocess.run(command, check=False, env={**os.environ, **settings}).returncode
    if status:
        print(f"status {status}: {shlex.join(command)}", flush=True)
    return status


def _sanitizer_commands() -> list[Command]:
    """Return one command per tool; without PyTorch's allocator each tensor has its own bounds."""
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
