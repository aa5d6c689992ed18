"""Help at 80 and 120 columns, and tables and error texts as the golden files show them.

`PYTHONPATH=. python -m tests.support.cli_pages` writes the files again.
"""

import io
import re

import pytest
from rich.console import Console
from typer.testing import CliRunner

from loradock.cli.main import app
from loradock.cli.output import FittingTable
from tests.support import cli_pages

COMMON_MAX = 30
"""Options that `serve --help` shows at most; the others are in `--help-all`."""


@pytest.mark.parametrize("width", cli_pages.WIDTHS)
def test_tables_are_the_golden_ones(width: int) -> None:
    assert cli_pages.tables(width) == cli_pages.golden_tables(width).read_text()


@pytest.mark.parametrize("width", cli_pages.WIDTHS)
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    pages = [page for _, page in cli_pages.help_pages(width)]
    text = "\n".join([*pages, cli_pages.tables(width)])
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace(cli_pages.LONG_NAME, "")


def test_wider_terminals_show_more() -> None:
    assert "failures" not in cli_pages.tables(80).split("not shown", 1)[0]
    assert "evictions" in cli_pages.tables(120)


@pytest.mark.parametrize("width", range(20, 70))
def test_columns_of_a_table_are_whole_or_named_below_it(width: int) -> None:
    columns = tuple(f"{place:-<9}" for place in range(5))
    console = Console(width=width, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(FittingTable(columns, [columns]))
    shown, _, left_out = captured.get().partition("not shown")
    names = [column for column in columns if column in shown]
    assert len(names) == min(5, width // 11)
    assert "…" not in shown
    assert all(column in left_out for column in columns[len(names) :])


def test_a_long_column_that_is_kept_is_cut_and_no_other() -> None:
    console = Console(width=60, file=io.StringIO(), color_system=None)
    with console.capture() as captured:
        console.print(FittingTable(("name", "mark", "path"), [("here", "*", "p" * 99)], kept=3))
    assert re.search(r"^ here +\* +p{30,}…", captured.get(), re.MULTILINE)


def options_in(page: str) -> set[str]:
    return set(re.findall(r"^  (--[\w-]+)", page, re.M))


@pytest.mark.parametrize("command", ["serve", "gateway", "engine run"])
def test_help_has_the_common_options_and_help_all_every_option(command: str) -> None:
    words = command.split()
    common, every = (
        CliRunner().invoke(app, [*words, flag], env={"COLUMNS": "80"}).output
        for flag in ("--help", "--help-all")
    )
    assert options_in(common) < options_in(every)
    assert len(options_in(common)) <= COMMON_MAX
    # The first page is not changed by the second.
    again = CliRunner().invoke(app, [*words, "--help"], env={"COLUMNS": "80"}).output
    assert again == common


def test_error_texts_are_those_of_the_manual() -> None:
    assert cli_pages.errors() == cli_pages.ERRORS.read_text()


def test_an_error_text_has_no_term_of_the_code() -> None:
    for term in ("$[", "regex", "Traceback", "None", "msgspec"):
        assert term not in cli_pages.errors(), term
