"""Tables of the measured figures in Markdown documents, between two marks."""

import re
from collections.abc import Sequence
from pathlib import Path

from benchmarks.figures import Figure

_MARKED = re.compile(r"(<!-- figures: (\w+) -->\n).*?(<!-- end of figures -->)", re.DOTALL)
_HEAD = (
    "| figure | measured | yardstick in the same run | ratio | target | reached |\n"
    "|---|--:|---|--:|---|---|\n"
)


def write_tables(document: Path, figures: Sequence[Figure]) -> None:
    """Write each group's table between `<!-- figures: GROUP -->` and `<!-- end of figures -->`."""

    def table(mark: re.Match[str]) -> str:
        group = [figure for figure in figures if figure.name.startswith(f"{mark[2]}.")]
        return mark[1] + _HEAD + "".join(map(_row, group)) + mark[3]

    document.write_text(_MARKED.sub(table, document.read_text()))


def rounded(value: float) -> str:
    """Format a value with its significant digits."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def _row(figure: Figure) -> str:
    measured = f"{rounded(figure.value)} {figure.unit}"
    reached = "yes" if figure.reached else "no"
    cells = (measured, figure.yardstick, f"{figure.ratio:.3f}", figure.target, reached)
    return f"| `{figure.name}` | {' | '.join(cells)} |\n"
