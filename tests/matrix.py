"""`make matrix`: parity and serving with every supported version of transformers and of Python.

Each environment is installed below `.venv-matrix` by uv and pip, with the newest allowed versions
of what it does not name. `oldest` has the lower bounds of all dependencies. The results are stored
for SUPPORTED.md.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from tests.parity import read_results
from tests.support.models.causal_parity import Judgement
from tests.support.sources import ROOT

MINORS: Final = ("5.21", "5.22", "5.23", "5.24")
"""The minor versions of transformers from the lower bound of `pyproject.toml` to the newest."""

PYTHONS: Final = ("3.12", "3.13", "3.14")
"""The versions of Python above the lower bound, which all other environments have."""

OLDEST: Final = "oldest"
ENVIRONMENTS: Final = (OLDEST, *MINORS, *(f"python{one}" for one in PYTHONS))

RESULTS: Final = ROOT / "tests" / "golden" / "matrix.json"
SUITES: Final = (
    *("tests/engine/models", "tests/integration/test_parity.py"),
    *("tests/integration/test_parity_states.py", "tests/engine/serving/test_paged_batch.py"),
    *("tests/engine/serving/test_attention.py", "tests/engine/serving/test_blocks.py"),
)
"""Tests of paging, states, positions and serving."""

_TESTS_FAILED: Final = 1
"""pytest's exit code for failed tests, which its closing line counts."""


class MatrixRow(msgspec.Struct, frozen=True):
    """The result of one environment: numbers of architectures, and names of those that are wrong.

    `python`, `transformers`, `torch`, `triton`: versions that are installed. `equal`: served with
    PEFT's logits and tokens. `tests`: the closing line of `SUITES`.
    """

    name: str
    python: str
    transformers: str
    torch: str
    triton: str
    equal: int
    refused: int
    differs: tuple[str, ...]
    tests: str

    def cells(self) -> tuple[str, ...]:
        """Return the row as text, in the order of `COLUMNS`."""
        versions = (self.transformers, self.python, self.torch, self.triton)
        counts = (str(self.equal), str(self.refused), ", ".join(self.differs) or "none")
        return (self.name, *versions, *counts, self.tests)


COLUMNS: Final = (
    *("environment", "transformers", "Python", "torch", "triton"),
    *("equal when served", "refused", "differ", "tests of paging and states"),
)


def read_rows() -> list[MatrixRow]:
    """Return the stored results, in the order of `ENVIRONMENTS`."""
    if not RESULTS.is_file():
        return []
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[MatrixRow])


def main() -> None:
    """Judge every environment, or those named on the command line, and store and print the rows.

    What can't be installed here, as without an interpreter of that version, has no row.
    """
    rows = {row.name: row for row in read_rows()}
    console, absent = Console(width=160), []
    for name in sys.argv[1:] or ENVIRONMENTS:
        try:
            python = _environment(name)
        except subprocess.CalledProcessError:
            absent.append(name)
            rows.pop(name, None)
        else:
            rows[name] = _judge(name, python)
        ordered = [rows[key] for key in ENVIRONMENTS if key in rows]
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    table = Table(*COLUMNS)
    for row in read_rows():
        table.add_row(*row.cells())
    console.print(table)
    if absent:
        console.print(f"not run, because they could not be installed: {', '.join(absent)}")


def _judge(name: str, python: Path) -> MatrixRow:
    results = python.parents[1] / "parity.json"
    _run(python, "-m", "tests.parity", "--all", "--results", str(results))
    suites = ("-m", "pytest", "-p", "no:xdist", "--durations=0", *SUITES)
    closing = _run(python, *suites, codes=(0, _TESTS_FAILED))
    installed = _run(python, "-c", _VERSIONS).split()
    counts = count_verdicts(read_results(results).values())
    return MatrixRow(name, *installed, *counts, _closing_line(closing))


def count_verdicts(judged: Iterable[Judgement]) -> tuple[int, int, tuple[str, ...]]:
    """Return how many are equal and refused when served, and which differ or fail in any way."""
    equal, refused, differs = 0, 0, []
    for one in judged:
        if one.manager is None or one.server is None:
            continue
        equal += one.server.verdict == "equal"
        refused += one.server.verdict == "refused"
        if not {one.manager.verdict, one.server.verdict} <= {"equal", "refused"}:
            differs.append(one.model_type)
    return equal, refused, tuple(differs)


_VERSIONS: Final = """
import platform
from importlib.metadata import version
print(platform.python_version(), *(version(name) for name in ("transformers", "torch", "triton")))
"""


def _environment(name: str) -> Path:
    """Install the project as one of `ENVIRONMENTS` says; return the interpreter."""
    directory = ROOT / ".venv-matrix" / name
    python, uv = directory / "bin" / "python", _uv()
    if not python.exists():
        asked = name.removeprefix("python") if name.startswith("python") else sys.executable
        subprocess.run([uv, "venv", "--seed", "--python", asked, directory], check=True)
    if name == OLDEST:
        install = [uv, "pip", "install", "--python", python, "--quiet"]
        install += ["--resolution", "lowest-direct"]
    else:
        install = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    # This environment's torch, which can be a build without CUDA.
    chosen = (f"transformers=={name}.*", f"torch=={version('torch')}") if name in MINORS else ()
    subprocess.run([*install, "--editable", ".[dev]", *chosen], cwd=ROOT, check=True)
    return python


def _uv() -> str:
    """Return uv's path; without uv, install it beside the environments."""
    found = shutil.which("uv")
    if found is not None:
        return found
    directory = ROOT / ".venv-matrix" / "uv"
    if not directory.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
        subprocess.run([directory / "bin" / "pip", "install", "--quiet", "uv"], check=True)
    return str(directory / "bin" / "uv")


def _run(python: Path, *arguments: str, codes: Sequence[int] = (0,)) -> str:
    """Run a command of the environment; return its output. Its exit code must be one of `codes`."""
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    found = subprocess.run(
        [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    if found.returncode not in codes:
        print(found.stdout, found.stderr, sep="\n", file=sys.stderr)
        raise RuntimeError(f"{' '.join(arguments[:2])} exited with {found.returncode}")
    return found.stdout


def _closing_line(output: str) -> str:
    """Return pytest's counts, without the time."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return re.sub(r"\s+in .*", "", lines[-1]).strip("= ") if lines else "did not run"


if __name__ == "__main__":
    main()
