"""ARCHITECTURE.md shows the life cycle of the transition table."""

import pytest

from loradock.controller.server.diagrams import BEGIN, END, with_diagram
from loradock.controller.states.diagram import mermaid
from loradock.controller.states.table import TRANSITIONS
from tests.support.parallel.processes import ROOT


def test_the_diagram_is_up_to_date() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert with_diagram(text) == text, "run `make diagrams`"


def test_a_stale_diagram_is_detected_and_only_the_diagram_is_written() -> None:
    stale = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    fresh = with_diagram(stale)
    assert fresh != stale
    assert fresh.startswith("before\n")
    assert fresh.endswith("\nafter\n")
    assert with_diagram(fresh) == fresh


def test_a_file_without_marks_is_refused() -> None:
    with pytest.raises(ValueError, match="marks"):
        with_diagram("no marks")


def test_every_row_is_drawn_once_and_nothing_else() -> None:
    drawn = [line for line in mermaid().splitlines() if ": " in line]
    assert len(drawn) == len(set(drawn)) == len(TRANSITIONS)
