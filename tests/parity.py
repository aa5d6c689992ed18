"""`make parity`: judge every causal architecture, and store the results for SUPPORTED.md.

Architectures that the file already has are kept, unless they are named on the command line or
`--all` is given.
"""

import argparse
import warnings
from pathlib import Path
from typing import Final

import msgspec
import torch
from rich.console import Console
from rich.table import Table

from tests.support.models.causal_configs import causal_types
from tests.support.models.causal_parity import Judgement, Outcome, judge

RESULTS: Final = Path(__file__).parent / "golden" / "parity.json"


def read_results(path: Path = RESULTS) -> dict[str, Judgement]:
    """Return the stored judgements by model type."""
    if not path.is_file():
        return {}
    found = msgspec.json.decode(path.read_bytes(), type=list[Judgement])
    return {one.model_type: one for one in found}


def main() -> None:
    """Judge what is missing or named, and print the table."""
    parser = argparse.ArgumentParser(description="Compare architectures with PEFT.")
    parser.add_argument("types", nargs="*", help="model types; default: those without a result")
    parser.add_argument("--all", action="store_true", help="judge all of them again")
    parser.add_argument("--results", type=Path, default=RESULTS, help="the file of the results")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    console = Console(width=200)
    results = {} if options.all else read_results(options.results)
    for model_type in options.types or [name for name in causal_types() if name not in results]:
        results[model_type] = found = judge(model_type)
        console.print(*_cells(found), sep=" | ", markup=False)
        _store(results, options.results)
    if not options.types:
        console.print(_table(results))


def _store(results: dict[str, Judgement], path: Path) -> None:
    ordered = [results[name] for name in sorted(results)]
    text = msgspec.json.format(msgspec.json.encode(ordered), indent=1)
    path.write_bytes(text + b"\n")


def _cells(found: Judgement) -> tuple[str, ...]:
    if found.missing:
        return found.model_type, "not built", found.missing, ""
    return found.model_type, _text(found.manager), _text(found.server), found.mode


def _text(outcome: Outcome | None) -> str:
    return "" if outcome is None else f"{outcome.verdict}: {outcome.text}"


def _table(results: dict[str, Judgement]) -> Table:
    table = Table("architecture", "manager", "server", "mode")
    for name in sorted(results):
        table.add_row(*_cells(results[name]))
    return table


if __name__ == "__main__":
    main()
