"""Help pages, tables and error texts are as the golden files show them, at 80 and 120 columns.

`PYTHONPATH=. python -m tests.support.cli_pages` writes the files again.
"""

import re

import pytest

from tests.support import cli_pages


@pytest.mark.parametrize("width", cli_pages.WIDTHS)
def test_help_pages_are_the_golden_ones(width: int) -> None:
    assert cli_pages.help_pages(width) == cli_pages.golden_help(width).read_text()


@pytest.mark.parametrize("width", cli_pages.WIDTHS)
def test_tables_are_the_golden_ones(width: int) -> None:
    assert cli_pages.tables(width) == cli_pages.golden_tables(width).read_text()


@pytest.mark.parametrize("width", cli_pages.WIDTHS)
def test_no_line_is_longer_than_the_terminal_is_wide(width: int) -> None:
    text = cli_pages.help_pages(width) + cli_pages.tables(width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text.replace(cli_pages.LONG_NAME, "")


def test_wider_terminals_show_more() -> None:
    assert "failures" not in cli_pages.tables(80).split("not shown", 1)[0]
    assert "From 0 to 1." in cli_pages.help_pages(120)
    assert "evictions" in cli_pages.tables(120)


def test_each_option_with_a_value_states_what_holds_without_it() -> None:
    for page in cli_pages.help_pages(120).split("\n$ ")[1:]:
        rows = re.split(r"\n(?=  -)", page.partition("Options:")[2])
        for row in rows[1:]:
            has_value = re.match(r" +(-\w, )?--[\w-]+ [A-Za-z|]", row) is not None
            text = " ".join(row.split())
            assert not has_value or re.search(r"Default:|Required|Needed", text), (page[:40], text)
            assert re.search(r"\.( Commands:.*)?( [A-Za-z ]+:)?$", text), (page[:40], text)


def test_error_texts_are_those_of_the_manual() -> None:
    assert cli_pages.errors() == cli_pages.ERRORS.read_text()


def test_an_error_text_has_no_term_of_the_code() -> None:
    for term in ("$[", "regex", "Traceback", "None", "msgspec"):
        assert term not in cli_pages.errors(), term
