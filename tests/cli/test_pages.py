"""Help at 80 and 120 columns, and tables and error texts as the golden files show them.

`PYTHONPATH=. python -m tests.support.cli_pages` writes the files again.
"""

import re

import pytest
from typer.testing import CliRunner

from loradock.cli.main import app
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
