"""`make bench`: measure, print the table, and write `results.json` and the documents' tables.

Groups that were not measured keep their figures in the file.
"""

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks import (
    adapters,
    control,
    experts,
    fleet,
    gateway,
    kernels,
    lab,
    layers,
    models,
    peers,
    serve,
    serve_cache,
    serve_loading,
    start,
)
from benchmarks.figures import Figure
from benchmarks.rounds import threads
from benchmarks.tables import rounded, write_tables

RESULTS: Final = Path(__file__).parent / "results.json"

DOCUMENTS: Final = (
    Path(__file__).parent.parent / "README.md",
    Path(__file__).parent / "README.md",
)
"""The documents that contain the tables."""


def _serve() -> Iterator[Figure]:
    with threads(1):
        yield from serve.run()
        yield from serve_cache.run()
        yield from serve_loading.activation()
        yield from serve_loading.cold_load()


GROUPS: Final[dict[str, Callable[[], Iterator[Figure]]]] = {
    "adapters": adapters.run,
    "control": control.run,
    "experts": experts.run,
    "fleet": fleet.run,
    "gateway": gateway.run,
    "kernels": kernels.run,
    "lab": lab.run,
    "layers": layers.run,
    "models": models.run,
    "peers": peers.run,
    "serve": _serve,
    "start": start.run,
}

ON_REQUEST: Final = ("peers",)
"""Groups that are measured only if they are selected: they install another server."""

ALSO_SHOWN: Final[dict[str, tuple[str, ...]]] = {"layers": ("adapters",)}
"""Groups that are measured together with a selected group."""


def main() -> None:
    """Measure and print the selected groups, and store their figures."""
    parser = argparse.ArgumentParser(
        description="Measure the groups of figures, each against its yardstick."
    )
    parser.add_argument("--only", choices=sorted(GROUPS), help="measure this group only")
    only = parser.parse_args().only
    console = Console(width=150)
    every = sorted(GROUPS.keys() - ON_REQUEST)
    for group in (only, *ALSO_SHOWN.get(only, ())) if only else every:
        figures = []
        with console.status(f"measuring {group}"):
            for figure in GROUPS[group]():
                # What was measured is seen even if a later figure fails.
                console.print(f"{figure.name}: {figure.ratio:.3f}")
                figures.append(figure)
        console.print(_table(group, figures))
        _store(group, figures)


def _store(group: str, figures: list[Figure]) -> None:
    """Replace a group's figures in the file, and write the documents' tables."""
    known = [f for f in _read() if not f.name.startswith(f"{group}.")] + figures
    RESULTS.write_bytes(msgspec.json.format(msgspec.json.encode(known), indent=2) + b"\n")
    for document in DOCUMENTS:
        write_tables(document, known)


def _read() -> list[Figure]:
    if not RESULTS.exists():
        return []
    return msgspec.json.decode(RESULTS.read_bytes(), type=list[Figure])


def _table(group: str, figures: list[Figure]) -> Table:
    table = Table(title=group)
    for name in ("name", "value", "unit", "yardstick", "ratio", "target", "reached"):
        table.add_column(name, justify="right" if name in ("value", "ratio") else "left")
    for figure in figures:
        reached = "yes" if figure.reached else "no"
        table.add_row(
            figure.name, rounded(figure.value), figure.unit, figure.yardstick,
            f"{figure.ratio:.3f}", figure.target, reached,
        )  # fmt: skip
    return table


if __name__ == "__main__":
    main()
