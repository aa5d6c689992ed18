"""The generated reference pages are up to date, and explain every state."""

import pytest

from loradock.controller.states.table import STATES
from tests.reference import MEANINGS_OF_STATES, pages


@pytest.mark.parametrize(("path", "text"), [pytest.param(*one, id=one[0].name) for one in pages()])
def test_a_page_is_up_to_date(path, text: str) -> None:
    assert path.read_text() == text, "run `make reference`"


def test_every_state_is_explained() -> None:
    assert tuple(MEANINGS_OF_STATES) == STATES
