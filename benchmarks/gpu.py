"""`make gpu`: what needs a CUDA device, in stages that each end within their limit.

`python -m benchmarks.gpu smoke step` runs some of them. A stage is a process (or several) that
appends a JSON line for each figure as it has it, so a stage that is ended keeps what it found;
`benchmarks/gpu-<card>.json` has them all. Without a device it prints a message and succeeds.

  smoke    versions, the backends that are chosen, and tokens of eight adapters
  step     decode steps of an 8-billion-parameter Llama with random weights
  kernels  microseconds of the LoRA kernels, cell by cell
  tune     tile sizes, which are written into `engine/kernels/gpu/tile_configs.py`
  tests    the tests marked `gpu`, the shared kernel tests with compiled kernels, and some of both
           under compute-sanitizer if it is installed
"""

import os
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Final, NamedTuple

import torch

from benchmarks.gpu_lines import append, collect

OPERATIONS: Final = (
    *("linear", "shrink_expand", "embedding", "experts", "experts_shrink_expand", "offsets"),
    "block_attention",
    "fused",
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
MARKED: Final = ("-m", "gpu", "--continue-on-collection-errors")
ENDED: Final = 124
"""The status of a command that its stage's limit has ended, as `timeout` has it."""

Command = tuple[list[str], dict[str, str]]
"""The arguments of a command, and additions to its environment."""


class Stage(NamedTuple):
    """Commands, which share a limit."""

    limit_s: int
    commands: list[Command]


def stages() -> dict[str, Stage]:
    """Return every stage, in the order in which they run."""
    # A command on a machine that is lent ends at ten minutes, and collecting takes some of them.
    return {
        "smoke": Stage(60, [(_module("benchmarks.gpu_smoke"), {})]),
        "step": Stage(540, [(_module("benchmarks.gpu_step"), {})]),
        "kernels": Stage(540, [(_module("benchmarks.gpu_kernels"), {})]),
        "tune": Stage(540, [(_module("benchmarks.tune_kernels"), {})]),
        "tests": Stage(
            540,
            [
                (_module("pytest", *MARKED, *marked_files()), {}),
                (_module("pytest", "-p", "no:xdist", *SHARED), COMPILED),
                *_sanitizer_commands(),
            ],
        ),
    }


def main(names: list[str]) -> int:
    """Run stages, also after a failure; the exit status is that of the first that failed."""
    if not torch.cuda.is_available():
        print("no CUDA device: the tests and benchmarks that need one are skipped")
        print("without a device, `make rehearse` runs the engine on a simulated one,")
        print("tests/engine/kernels/test_compiled.py compiles every kernel, and")
        print("tests/engine/kernels/test_triton.py runs the kernels in Triton's interpreter")
        return 0
    known = stages()
    if unknown := set(names) - known.keys():
        print(f"stages must be among {', '.join(known)}, got {', '.join(unknown)}")
        return 2
    print(f"on {torch.cuda.get_device_name()}")
    statuses = [_run_stage(name, known[name]) for name in names or known]
    return next(filter(None, statuses), 0)


def marked_files() -> list[str]:
    """Return the files with tests that are marked `gpu`; all others may need more libraries."""
    files = sorted(TESTS.rglob("test_*.py"))
    return [str(file.relative_to(TESTS.parent)) for file in files if MARK in file.read_text()]


def _module(*arguments: str) -> list[str]:
    return [sys.executable, "-m", *arguments]


def _run_stage(name: str, stage: Stage) -> int:
    """Run a stage's commands within its limit; return the first status that is not 0."""
    append(name, begins=True, limit_s=stage.limit_s)
    before = time.monotonic()
    statuses = [
        _run(*command, limit_s=stage.limit_s - (time.monotonic() - before))
        for command in stage.commands
    ]
    append(name, took_s=round(time.monotonic() - before, 1), statuses=statuses)
    collect()
    return next(filter(None, statuses), 0)


def _run(command: list[str], settings: dict[str, str], *, limit_s: float) -> int:
    environment = {**os.environ, **settings}
    try:
        status = subprocess.run(
            command, check=False, env=environment, timeout=max(limit_s, 0.1)
        ).returncode
    except subprocess.TimeoutExpired:
        status = ENDED
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
    tests = _module("pytest", "-p", "no:xdist", *files, "-k", " or ".join(SANITIZED))
    settings = {**COMPILED, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
    return [([path, "--tool", tool, "--error-exitcode", "9", *tests], settings) for tool in TOOLS]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
