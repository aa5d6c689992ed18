"""The output of commands: JSON, text and tables on stdout, progress and errors on stderr.

With `--json` stdout holds JSON and nothing else: one document, or one document per line for a
stream. Lines of stderr are objects of JSON then, `{"progress": ...}` and `{"error": ...}`.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from typing import IO, Any, Final, Self

import msgspec
from rich.box import SIMPLE
from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    ProgressColumn,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from loradock.cli.exit_codes import Failure

_PIPE_WIDTH: Final = 10_000

PROGRESS_INTERVAL_S = 10.0
"""Time between two lines about the progress of a command with `--json`."""

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
        widths = self._widths()
        count = self._fitting(widths, options.max_width)
        rest = options.max_width - sum(widths[: count - 1]) - 2 * count
        if count > 1 and rest < widths[count - 1]:
            # The last one is cut, and no other.
            widths[count - 1] = max(1, rest)
        table = Table(box=SIMPLE, pad_edge=False, padding=(0, 1, 0, 0))
        for place, column in enumerate(self._columns[:count]):
            folds = place == 0
            table.add_column(
                column,
                overflow="fold" if folds else "ellipsis",
                no_wrap=not folds,
                width=None if folds else widths[place],
            )
        for row in self._rows:
            table.add_row(*row[:count])
        yield table
        if count < len(self._columns):
            yield f"not shown, for lack of columns: {', '.join(self._columns[count:])}"

    def _widths(self) -> list[int]:
        """Return how wide each column must be: the first as wide as it is folded."""
        widths = [
            max(cell_len(cell) for cell in (column, *(row[place] for row in self._rows)))
            for place, column in enumerate(self._columns)
        ]
        widths[0] = min(widths[0], _FOLDED_CELLS_MIN)
        return widths

    def _fitting(self, widths: list[int], width: int) -> int:
        """Return how many columns fit."""
        taken = 0
        for count, cells in enumerate(widths):
            # Two spaces separate columns, and one is at each side of the table.
            taken += cells + 2
            if taken > width and count >= self._kept:
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


Renderable = Table | FittingTable | Group | str


def plain(value: Any) -> Any:
    """Convert a message to what JSON can represent; `type` names the message in a union."""
    if isinstance(value, msgspec.Struct):
        tag = value.__struct_config__.tag
        fields = {name: plain(getattr(value, name)) for name in value.__struct_fields__}
        return fields if tag is None else {"type": tag, **fields}
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, Enum):
        return value.value
    return str(value) if isinstance(value, Path) else value


def console(file: IO[str]) -> Console:
    """Return a console of the terminal's width; without a terminal, of COLUMNS or of any width."""
    has_width = file.isatty() or os.environ.get("COLUMNS", "").isdecimal()
    width = None if has_width else _PIPE_WIDTH
    return Console(file=file, width=width, markup=False, emoji=False, highlight=False)


class _ProgressLines:
    """Lines of JSON on stderr, which say how far a command is, while it is used as a context."""

    def __init__(self, label: str, total: int) -> None:
        self._label, self._total, self._done = label, total, 0
        self._started_s = time.monotonic()
        self._ended = threading.Event()
        # A daemon: a command that is interrupted does not wait for the next line.
        self._thread = threading.Thread(target=self._write_lines, daemon=True)

    def advance(self, amount: int) -> None:
        """Add to the amount done."""
        self._done += amount

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._ended.set()
        self._thread.join()

    def _write_lines(self) -> None:
        while not self._ended.wait(PROGRESS_INTERVAL_S):
            sys.stderr.write(json.dumps({"progress": self._fields()}) + "\n")
            sys.stderr.flush()

    def _fields(self) -> dict[str, Any]:
        elapsed_s = time.monotonic() - self._started_s
        fields: dict[str, Any] = {"what": self._label, "elapsed_s": round(elapsed_s, 1)}
        if self._total:
            left = self._total - self._done
            left_s = round(elapsed_s * left / self._done, 1) if self._done else None
            fields |= {"done": self._done, "total": self._total, "left_s": left_s}
        return fields


class Output:
    """The stdout and stderr of one command."""

    def __init__(self, as_json: bool, verbose: bool = False) -> None:
        self.as_json = as_json
        self.verbose = verbose
        self._console = console(sys.stdout)
        self._errors = console(sys.stderr)

    def document(self, value: Any) -> None:
        """Print a value, or one of a stream, as one line of JSON."""
        sys.stdout.write(json.dumps(plain(value), ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def show(self, *parts: Renderable) -> None:
        """Print tables and lines, for a person."""
        with self._console.capture() as captured:
            for part in parts:
                self._console.print(part)
        # Tables are padded to their width, which is of no use in a file.
        lines = captured.get().splitlines()
        sys.stdout.write("".join(line.rstrip() + "\n" for line in lines))
        sys.stdout.flush()

    def text(self, text: str) -> None:
        """Print text unchanged; on a terminal without its control characters."""
        sys.stdout.write(safe(text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Print a remark about the command's progress, on a terminal only."""
        if not self.as_json and sys.stderr.isatty():
            self._errors.print(text, style="dim")

    def remark(self, text: str) -> None:
        """Print what a person should know before the output begins."""
        if not self.as_json:
            self._errors.print(safe(text), style="dim", soft_wrap=True)

    @contextmanager
    def progress(
        self, label: str, total: int = 0, *, in_bytes: bool = False
    ) -> Iterator[Callable[[int], None]]:
        """Show a label and the elapsed time on a terminal; both are erased afterwards.

        With a `total`, what it yields is called with the amount done since the last call, and
        the part done and an estimate of the time left are shown too. With `--json`, stderr has the
        same as a line of JSON every ten seconds.
        """
        if self.as_json:
            with _ProgressLines(label, total) as lines:
                yield lines.advance
            return
        if not sys.stderr.isatty():
            yield lambda _: None
            return
        columns: list[ProgressColumn] = [SpinnerColumn(), TextColumn("{task.description}")]
        if total:
            amount = DownloadColumn(binary_units=True) if in_bytes else MofNCompleteColumn()
            columns += [BarColumn(), amount, TimeRemainingColumn()]
        columns.append(TimeElapsedColumn())
        with Progress(*columns, console=self._errors, transient=True) as progress:
            task = progress.add_task(label, total=total or None)
            yield lambda done: progress.advance(task, done)

    def failure(self, failure: Failure) -> None:
        """Print an error, its hint, and its details or where they are shown."""
        if self.as_json:
            error = {**failure.fields, "hint": failure.hint, "exit": failure.exit_code.value}
            sys.stderr.write(json.dumps({"error": error}, ensure_ascii=False) + "\n")
            return
        self._errors.print(safe(failure.line), style="red", soft_wrap=True)
        if failure.hint:
            self._errors.print(f"  {failure.hint}", soft_wrap=True)
        if self.verbose:
            for detail in failure.details:
                self._errors.print(f"  - {safe(detail)}", soft_wrap=True)
        elif failure.details:
            count = len(failure.details)
            where = f"`loradock show ADAPTER` lists all {count} findings, also load --verbose"
            self._errors.print(f"  {where}", soft_wrap=True)
