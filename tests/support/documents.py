"""The documents: their blocks of code, and their generated parts between two marks."""

import re
from typing import Final, NamedTuple

from tests.support.sources import ROOT

PAGES: Final = tuple(
    path.relative_to(ROOT).as_posix()
    for pattern in ("*.md", "benchmarks/*.md", "deploy/*.md", "docs/*.md", "examples/*.md")
    for path in sorted(ROOT.glob(pattern))
)

_BLOCK: Final = re.compile(
    r"(?:^<!-- (?P<note>[^\n]*) -->\n)?^```(?P<language>[^\n]*)\n(?P<text>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """A block of code; `note`: what the comment in the line above says about its execution."""

    note: str
    language: str
    text: str


class Step(NamedTuple):
    """A command of a block, and the lines that are shown after it."""

    words: str
    shown: list[str]


def blocks_of(page: str) -> list[Block]:
    """Return the blocks of a page, in order."""
    found = _BLOCK.finditer((ROOT / page).read_text())
    return [Block(one["note"] or "", one["language"], one["text"]) for one in found]


def steps_of(block: Block) -> list[Step]:
    """Return the steps of a block of the language `console`, without comments."""
    steps: list[Step] = []
    for line in block.text.replace("\\\n", "").splitlines():
        if line.startswith("$ "):
            steps.append(Step(line[2:].partition(" #")[0].strip(), []))
        else:
            steps[-1].shown.append(line)
    return steps


def between_marks(text: str, begin: str, end: str, content: str) -> str:
    """Return `text` with `content` between two marks; raises `ValueError` if one is missing."""
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found:
        raise ValueError(f"the marks {begin!r} and {end!r} are missing")
    return f"{before}{begin}\n{content}\n{end}{after}"
