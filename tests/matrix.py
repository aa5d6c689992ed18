"""`make matrix`: parity and serving with every supported minor version of transformers.

Each version is installed in a separate environment below `.venv-matrix`, with the newest allowed
versions of the other dependencies, and this environment's torch. `oldest` has the lower bounds of
all of them, installed by uv. The results are stored for SUPPORTED.md.
"""

import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from tests.parity import read_results
from tests.support.sources import ROOT

MINORS: Final = ("5.21", "5.22", "5.23", "5.24")
"""The minor versions of transformers from the lower bound of `pyproject.toml` to the newest."""

OLDEST: Final = "oldest"

RESULTS: Final = ROOT / "tests" / "golden" / "matrix.json"
SUITES: Final = (
    *("tests/engine/models", "tests/integration/test_parity.py"),
    *("tests/integration/test_parity_states.py", "tests/engine/serving/test_paged_batch.py"),
    *("tests/engine/serving/test_attention.py", "tests/engine/serving/test_blocks.py"),
)
"""Tests of paging, states, positions and serving."""


class MatrixRow(msgspec.Struct, frozen=True):
    """The result of one version: numbers of architectures, and names of those that differ.

    `version`: of transformers. `equal`: served with PEFT's logits and tokens. `tests`: the closing
    line of `SUITES`. `oldest`: with the lower bounds of all dependencies.
    """

    version: str
    equal: int
    refused: int
    differs: tuple[str, ...]
    tests: str
    oldest: bool = False

    @property
    def name(self) -> str:
        """The minor version, or the name of the environment with all lower bounds."""
        return OLDEST if self.oldest else self.version.rpartition(".")[0]


def read_rows() -> list[MatrixRow]:
    """Return the stored results, the oldest version first."""
    if not RESULTS.is_file():
        return []
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[MatrixRow])


def main() -> None:
    """Judge every version, or those named on the command line, store the rows and print them."""
    rows = {row.name: row for row in read_rows()}
    for minor in sys.argv[1:] or (*MINORS, OLDEST):
        rows[minor] = _judge(minor)
        ordered = [rows[key] for key in sorted(rows)]
        RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(ordered), indent=1) + b"\n")
    table = Table("transformers", "equal when served", "refused", "differ", "tests")
    for row in read_rows():
        names = ", ".join(row.differs) or "none"
        table.add_row(
            f"{row.version} ({OLDEST})" if row.oldest else row.version,
            str(row.equal),
            str(row.refused),
            names,
            row.tests,
        )
    Console(width=160).print(table)


def _judge(minor: str) -> MatrixRow:
    python = _environment(minor)
    results = python.parents[1] / "parity.json"
    _run(python, "-m", "tests.parity", "--all", "--results", str(results))
    by_verdict: dict[str, list[str]] = {"equal": [], "refused": [], "differs": []}
    for one in read_results(results).values():
        if one.server is not None:
            by_verdict[one.server.verdict].append(one.model_type)
    closing = _run(python, "-m", "pytest", "-p", "no:xdist", "--durations=0", *SUITES)
    printed = _run(python, "-c", "import transformers; print(transformers.__version__)")
    return MatrixRow(
        printed.strip().splitlines()[-1],
        len(by_verdict["equal"]),
        len(by_verdict["refused"]),
        tuple(by_verdict["differs"]),
        _closing_line(closing),
        minor == OLDEST,
    )


def _environment(minor: str) -> Path:
    """Install the project with one minor version, or `OLDEST`; return the interpreter."""
    directory = ROOT / ".venv-matrix" / minor
    python = directory / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", directory], check=True)
    pip = [python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    if minor == OLDEST:
        subprocess.run([*pip, "uv"], check=True)
        uv = [python.parent / "uv", "pip", "install", "--python", python, "--quiet"]
        subprocess.run([*uv, "--resolution", "lowest-direct", "-e", ".[dev]"], cwd=ROOT, check=True)
        return python
    chosen = (f"transformers=={minor}.*", f"torch=={version('torch')}")
    subprocess.run([*pip, "--editable", ".[dev]", *chosen], cwd=ROOT, check=True)
    return python


def _run(python: Path, *arguments: str) -> str:
    """Run a command of the environment to its end, also if it fails; return what it printed."""
    environment = {"OMP_NUM_THREADS": "1", "PATH": "/usr/bin:/bin", "HOME": str(Path.home())}
    found = subprocess.run(
        [python, *arguments], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    return found.stdout


def _closing_line(output: str) -> str:
    """Return pytest's counts, without the time."""
    lines = [line for line in output.splitlines() if re.search(r"\d+ (passed|failed|error)", line)]
    return re.sub(r"\s+in .*", "", lines[-1]).strip("= ") if lines else "did not run"


if __name__ == "__main__":
    main()
