"""Tables that fit their console: columns that have no space are left out, the last ones first."""

from collections.abc import Iterable, Sequence
from typing import Final

from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table

_FOLDED_CELLS_MIN: Final = 16
"""The first column is folded to this width before another column is left out."""

# The characters that move a terminal's cursor or change its state, except newline and tab.
_CONTROLS: Final = dict.fromkeys([*range(32), *range(127, 160)], "\N{REPLACEMENT CHARACTER}") | {
    9: "\t",
    10: "\n",
}


def safe(text: str) -> str:
    """Replace the characters that could control a terminal."""
    return text.translate(_CONTROLS)


class FittingTable:
    """A table of texts; the first column folds its cells, the first `kept` are never left out.

    A caption names the columns that were left out.
    """

    def __init__(
        self, columns: Sequence[str], rows: Iterable[Sequence[str]], kept: int = 1
    ) -> None:
        self._columns = tuple(columns)
        self._rows = [tuple(map(safe, row)) for row in rows]
        self._kept = kept

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        """Yield the table with the columns that fit."""
        count = self._fitting(options.max_width)
        table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for place, column in enumerate(self._columns[:count]):
            folds = place == 0
            table.add_column(column, overflow="fold" if folds else "ellipsis", no_wrap=not folds)
        for row in self._rows:
            table.add_row(*row[:count])
        yield table
        if count < len(self._columns):
            yield f"not shown, for lack of columns: {', '.join(self._columns[count:])}"

    def _fitting(self, width: int) -> int:
        """Return how many columns fit."""
        widths = [
            max(cell_len(cell) for cell in (column, *(row[place] for row in self._rows)))
            for place, column in enumerate(self._columns)
        ]
        widths[0] = min(widths[0], _FOLDED_CELLS_MIN)
        taken = 0
        for count, cells in enumerate(widths):
            # Two spaces separate columns, and one ends the table.
            taken += cells + 2
            if taken - 1 > width and count >= self._kept:
                return count
        return len(widths)


def field_table(fields: dict[str, str]) -> Table:
    """Return a table of names and values."""
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in fields.items():
        table.add_row(name, safe(value))
    return table
