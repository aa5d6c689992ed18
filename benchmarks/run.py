"""`make bench`: measure, print the table, write `benchmarks/results.json` and the documents.

What it is: the list of groups and the output. What it is not: a measurement. One rule: a group that
was not run keeps the figures that the file has of it.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import adapters, control, experts, kernels, layers
from benchmarks.figures import Figure
from benchmarks.tables import rounded, write_tables

RESULTS: Final = Path(__file__).parent / "results.json"

DOCUMENTS: Final = (
    Path(__file__).parent.parent / "README.md",
    Path(__file__).parent / "README.md",
)
"""Where the tables are quoted."""

GROUPS: Final[dict[str, Callable[[], Iterator[Figure]]]] = {
    "adapters": adapters.run,
    "control": control.run,
    "experts": experts.run,
    "kernels": kernels.run,
    "layers": layers.run,
}

TOGETHER: Final[dict[str, tuple[str, ...]]] = {"layers": ("adapters",)}
"""Who asks for one group is shown these too."""


def main() -> None:
    """Run the groups that were asked for."""
    parser = argparse.ArgumentParser(description="measure side by side")
    parser.add_argument("--only", choices=sorted(GROUPS), help="run one group")
    only = parser.parse_args().only
    console = Console(width=150)
    for group in (only, *TOGETHER.get(only, ())) if only else sorted(GROUPS):
        with console.status(f"measuring {group}"):
            measured = list(GROUPS[group]())
        console.print(_table(group, measured))
        _keep(group, measured)


def _keep(group: str, measured: list[Figure]) -> None:
    """Put a group's figures in the place of its old ones, as the file has them by now."""
    known = [f for f in _read() if not f.name.startswith(f"{group}.")] + measured
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n")
    for document in DOCUMENTS:
        write_tables(document, known)


def _read() -> list[Figure]:
    if not RESULTS.exists():
        return []
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[Figure])


def _table(group: str, figures: list[Figure]) -> Table:
    table = Table(title=group)
    for name in ("name", "value", "unit", "yardstick", "ratio", "reach", "reached"):
        table.add_column(name, justify="right" if name in ("value", "ratio") else "left")
    for figure in figures:
        reached = "yes" if figure.reached else "no"
        table.add_row(
            *(figure.name, rounded(figure.value), figure.unit, figure.yardstick),
            *(f"{figure.ratio:.3f}", figure.reach, reached),
        )
    return table


if __name__ == "__main__":
    main()
