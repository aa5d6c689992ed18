"""Names and prose avoid the words of the table, and each pattern is known to find a sample."""

import pytest

from tests.language_rules import (
    DOCUMENTS,
    NAMES,
    PROSE,
    avoided_in_document,
    avoided_words,
)
from tests.support.sources import ALL, ROOT, read_sources, source


def test_names_and_prose_avoid_the_words_of_the_table() -> None:
    assert avoided_words(read_sources(ALL)) == []


@pytest.mark.parametrize("path", DOCUMENTS)
def test_documents_avoid_the_words_of_the_table(path: str) -> None:
    assert list(avoided_in_document(path, (ROOT / path).read_text())) == []


def test_a_refused_word_is_seen_in_a_document_outside_its_code() -> None:
    text = "Fine.\n```\ntold\n```\n`told` and\nnobody"
    (found,) = avoided_in_document("x.md", text)
    assert found.startswith("x.md:6: 'nobody'")


@pytest.mark.parametrize(
    "word",
    [
        *("passes by", "who", "nobody", "whatever", "told", "says", "asked", "a word", "lies"),
        *("goes on", "behind", "beside", "gives", "brings", "wish", "books", "chance"),
        *("so many", "as many rows", "What it is:", "One rule:"),
    ],
)
def test_a_refused_word_is_seen_in_docstrings_comments_and_texts(word: str) -> None:
    for text in (f'"""Here {word} is."""', f"x = 1  # {word}", f'raise E("no {word} here")'):
        assert len(avoided_words([source("engine/x.py", text)])) >= 1


@pytest.mark.parametrize("part", sorted(NAMES))
def test_a_refused_word_is_seen_in_names(part: str) -> None:
    for text in (
        *(f"def is_{part}(): ...", f"def f({part}_max): ...", f"{part} = 1", f"self.{part} = 1"),
        f"class {part.capitalize()}Thing: ...",
    ):
        assert len(avoided_words([source("engine/x.py", text)])) == 1
    assert len(avoided_words([source(f"engine/{part}.py", "")])) == 1


def test_other_words_pass() -> None:
    text = '"""A whole task that supplies; `as many as` is fine."""\nbasket = holder = 1'
    assert avoided_words([source("engine/x.py", text)]) == []
    # Texts of tests may be anything: they are often what a client sends.
    assert avoided_words([source("tests/x.py", 'send("nobody told me")')]) == []
    assert len(PROSE) == len({avoided.pattern for avoided in PROSE})
