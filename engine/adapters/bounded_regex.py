"""The regular expressions that a PEFT config may use as keys, matched in bounded time.

What it is: the part of Python's syntax that names modules. What it is not: `re`, which tries every
way to match and holds the interpreter's lock meanwhile: eight hostile characters can stop an engine
for ever. One rule: a pattern means what it means to `re`, or it is refused.

A pattern becomes a tree. Matching carries the *set* of positions reached so far through the tree,
as the bits of one integer, so that equal positions are never tried twice. What nested repetitions
can still cost is counted, and bounded for all the patterns of an adapter together.

    choice   = sequence ("|" sequence)*
    sequence = (atom ("*" | "+" | "?" | "{m}" | "{m,}" | "{,n}" | "{m,n}")? "?"?)*
    atom     = "(" choice ")" | "(?:" choice ")" | "[" set "]" | "." | "^" | "$" | escape | literal
    escape   = "\\" ("d" | "w" | "s" | punctuation)
"""

import re
from collections.abc import Callable, Mapping
from typing import Final, Generic, TypeVar

STEPS_MAX: Final = 5_000_000
"""What matching all names against all patterns of one adapter may take; a second or two."""

CHARACTERS_MAX: Final = 65_536
"""How long the keys of one table that are more than names may be together."""

_DEPTH_MAX: Final = 16
_REPEATS_MAX: Final = 256
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]+\Z")
_COUNTS: Final = re.compile(r"\{([0-9]{1,4})?(,)?([0-9]{1,4})?\}")
_CLASSES: Final = {"d": str.isdecimal, "s": str.isspace, "w": lambda c: c.isalnum() or c == "_"}

V = TypeVar("V")
Accepts = Callable[[str], bool]
Node = Callable[["_Text", int], int]
"""From the positions where a part may start to those where it may end, each as bits."""


class PatternRefused(ValueError):  # noqa: N818 - named like the engine's other errors
    """A key that is no pattern of this syntax, or one that takes too long."""


class PatternTable(Generic[V]):
    """Values by pattern: the first whose pattern is a name or a dot-bounded suffix of it.

    Raises `PatternRefused` for a key that can't be read, and when names take too many steps.
    """

    def __init__(self, values: Mapping[str, V]) -> None:
        count = sum(len(key) for key in values if not _PLAIN.match(key))
        if count > CHARACTERS_MAX:
            raise PatternRefused(f"patterns have {count} characters; at most {CHARACTERS_MAX}")
        self._rows = [(key, _compile(key), value) for key, value in values.items()]
        self._found: dict[str, V | None] = {}
        self._steps = STEPS_MAX

    def values(self) -> list[V]:
        """The values of all keys, in their order."""
        return [value for _, _, value in self._rows]

    def find(self, name: str) -> V | None:
        """The value of the first key that matches; None where none does."""
        if not self._rows:
            return None
        if name not in self._found:
            self._found[name] = self._search(name)
        return self._found[name]

    def _search(self, name: str) -> V | None:
        text = _Text(name, self._steps)
        try:
            for key, node, value in self._rows:
                text.spend()
                if _matches_plain(key, name) if node is None else text.matches(node):
                    return value
        except _TooManySteps:
            raise PatternRefused(
                f"matching the patterns takes more than {STEPS_MAX} steps; use plainer ones"
            ) from None
        finally:
            self._steps = text.steps
        return None


class _TooManySteps(Exception):  # noqa: N818 - never leaves this module
    """The steps that one table may take are spent."""


class _Text:
    """A name being matched, and how many steps may still be taken."""

    def __init__(self, text: str, steps: int) -> None:
        self.text = text
        self.steps = steps
        self.end = 1 << len(text)
        self._starts = 1 | sum(2 << i for i, c in enumerate(text) if c == ".")
        self._accepted: dict[Accepts, int] = {}

    def matches(self, node: Node) -> bool:
        """Whether a path leads from the start, or from behind a dot, to the very end."""
        return bool(node(self, self._starts) & self.end)

    def spend(self, steps: int = 1) -> None:
        """Count steps; raises `_TooManySteps`."""
        self.steps -= steps
        if self.steps < 0:
            raise _TooManySteps

    def positions_of(self, accepts: Accepts) -> int:
        """Where a character lies that `accepts`, as bits."""
        if accepts not in self._accepted:
            self.spend(len(self.text))
            self._accepted[accepts] = sum(1 << i for i, c in enumerate(self.text) if accepts(c))
        return self._accepted[accepts]


def _matches_plain(key: str, name: str) -> bool:
    """Whether a key of letters, digits and dots (any character) ends the name behind a dot."""
    start = len(name) - len(key)
    if start < 0 or (start > 0 and name[start - 1] != "."):
        return False
    tail = name[start:]
    return tail == key or all(k in (".", c) for k, c in zip(key, tail, strict=True))


def _compile(key: str) -> Node | None:
    """The tree of a pattern; None for a plain key, which needs no tree."""
    if _PLAIN.match(key):
        return None
    parser = _Parser(key)
    try:
        node = parser.choice(0)
        if not parser.at_end():
            raise PatternRefused(f"{parser.here()} closes nothing")
    except PatternRefused as error:
        raise PatternRefused(f"in {key[:80]!a}, {error}") from None
    return node


def _character(accepts: Accepts) -> Node:
    def step(text: _Text, starts: int) -> int:
        text.spend()
        return (starts & text.positions_of(accepts)) << 1

    return step


def _sequence(parts: list[Node]) -> Node:
    def step(text: _Text, starts: int) -> int:
        for part in parts:
            if not starts:
                break
            starts = part(text, starts)
        return starts

    return step


def _choice(parts: list[Node]) -> Node:
    def step(text: _Text, starts: int) -> int:
        ends = 0
        for part in parts:
            text.spend()
            ends |= part(text, starts)
        return ends

    return step


def _repeat(part: Node, low: int, high: int | None) -> Node:
    def step(text: _Text, starts: int) -> int:
        for _ in range(low):
            text.spend()
            starts = part(text, starts)
        ends, count = starts, low
        while starts and (high is None or count < high):
            text.spend()
            starts = part(text, starts) & ~ends
            ends, count = ends | starts, count + 1
        return ends

    return step


def _at_start(_text: _Text, starts: int) -> int:
    return starts & 1


def _at_end(text: _Text, starts: int) -> int:
    return starts & text.end


class _Parser:
    """One key on its way to a tree; every method takes what it names from the front of the rest."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._at = 0

    def at_end(self) -> bool:
        """Whether nothing is left."""
        return self._at == len(self._key)

    def here(self) -> str:
        """The place reached, for a text."""
        return f"{self._key[self._at : self._at + 8]!a} at character {self._at}"

    def choice(self, depth: int) -> Node:
        """Alternatives, up to a closing bracket or the end."""
        if depth > _DEPTH_MAX:
            raise PatternRefused(f"groups are nested deeper than {_DEPTH_MAX}")
        parts = [self._sequence(depth)]
        while self._take("|"):
            parts.append(self._sequence(depth))
        return parts[0] if len(parts) == 1 else _choice(parts)

    def _sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        while not self.at_end() and self._key[self._at] not in "|)":
            parts.append(self._repeated(self._atom(depth)))
        return _sequence(parts)

    def _atom(self, depth: int) -> Node:
        if self._take("(?:") or (not self._key.startswith("(?", self._at) and self._take("(")):
            node = self.choice(depth + 1)
            if not self._take(")"):
                raise PatternRefused("a group is not closed")
            return node
        if self._take("^"):
            return _at_start
        if self._take("$"):
            return _at_end
        if self._take("."):
            return _character(lambda c: c != "\n")
        return _character(self._set() if self._take("[") else self._single("()[]{}*+?|"))

    def _repeated(self, node: Node) -> Node:
        counts = self._counts()
        if counts is None:
            return node
        if node in (_at_start, _at_end):
            raise PatternRefused(f"nothing to repeat before {self.here()}")
        self._take("?")
        if not self.at_end() and (
            self._key[self._at] in "*+?" or _COUNTS.match(self._key, self._at)
        ):
            raise PatternRefused(f"{self.here()} repeats a repetition")
        return _repeat(node, *counts)

    def _counts(self) -> tuple[int, int | None] | None:
        for sign, counts in {"*": (0, None), "+": (1, None), "?": (0, 1)}.items():
            if self._take(sign):
                return counts
        match = _COUNTS.match(self._key, self._at)
        if match is None or match[0] == "{}":
            return None
        self._at = match.end()
        low = int(match[1] or 0)
        high = low if match[2] is None else int(match[3]) if match[3] else None
        if max(low, high or 0) > _REPEATS_MAX or (high is not None and high < low):
            raise PatternRefused(f"{match[0]} is no repetition of at most {_REPEATS_MAX}")
        return low, high

    def _set(self) -> Accepts:
        negated = self._take("^")
        members: list[Accepts] = []
        while not members or not self._take("]"):
            members.append(self._member())
        return lambda c: any(accepts(c) for accepts in members) != negated

    def _member(self) -> Accepts:
        """One character, class or range of a set."""
        first_at = self._at
        accepts = self._single("[]&~|")
        if not self._key.startswith("-", self._at) or self._key.startswith("-]", self._at):
            return accepts
        low = self._key[self._at - 1]
        self._at += 1
        accepts = self._single("[]&~|")
        high = self._key[self._at - 1]
        if "\\" in self._key[first_at : self._at] or low > high:
            raise PatternRefused(f"{self._key[first_at : self._at]!a} is no range")
        return lambda c: low <= c <= high

    def _single(self, special: str) -> Accepts:
        """One literal character, or an escape; `special` ones need the escape."""
        if self.at_end():
            raise PatternRefused("it ends in the middle of a set or an escape")
        character = self._key[self._at]
        if character in special:
            raise PatternRefused(f"{self.here()} is not understood; escape it if it is meant")
        self._at += 1
        if character != "\\":
            return character.__eq__
        if self.at_end():
            raise PatternRefused("it ends in the middle of an escape")
        escaped = self._key[self._at]
        self._at += 1
        if escaped in _CLASSES:
            return _CLASSES[escaped]
        if escaped.isalnum() or not escaped.isascii():
            raise PatternRefused(f"the escape \\{escaped} is not understood")
        return escaped.__eq__

    def _take(self, token: str) -> bool:
        found = self._key.startswith(token, self._at)
        self._at += len(token) * found
        return found
