"""Regular expressions as keys of `rank_pattern` and `alpha_pattern`, matched in bounded time.

PEFT matches a key with `re.match(rf"(.*\\.)?({key})$", path)`. `re` backtracks while it holds the
interpreter's lock, so a hostile key could stop the process. A key is therefore passed to `re` only
if it belongs to this subset:

    key         = alternative ("|" alternative)*
    alternative = (item | group | "^" | "$")*
    group       = ("(" | "(?:") alternative ("|" alternative)* ")" "?"?    without groups inside
    item        = character (("*" | "+" | "?" | "{m}" | "{m,}" | "{m,n}") "?"?)?    m and n below 10
    character   = literal | "." | "\\d" | "\\w" | "\\s" | escaped punctuation | set, like "[a-z_]"

No group is repeated, so backtracking reaches each choice at most once on a way through the key, and
the number of ways is at most the product of the choices. That bound is charged before `re` runs.
"""

import re
from collections.abc import Mapping
from math import comb, prod
from typing import Final, Generic, NamedTuple, TypeVar

STEPS_MAX: Final = 200_000_000
"""Largest number of steps, of about 10 ns, for matching all paths with the keys of one table."""

MATCH_STEPS_MAX: Final = 20_000_000
"""Largest number of steps for matching one path with one key."""

CHARACTERS_MAX: Final = 65_536
"""Largest total length of the keys of one table that are not plain names."""

_REPEATS_MAX: Final = 4
_PLAIN_STEPS: Final = 40
_PATTERN_STEPS: Final = 200
_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]+\Z")
_LITERALS: Final = re.compile(r"[A-Za-z0-9_-]*\Z")
_TOKEN: Final = re.compile(
    r"""(?P<open>\((?:\?:|(?!\?))) | (?P<close>\)\??) | (?P<bar>\|) | [\^$]
    | (?P<character> \[(?!\^?\])\^?(?: (?!--)[^\[\]\\&~|] | \\[dws] | \\[^A-Za-z0-9] )+\]
                   | \\[dws] | \\[^A-Za-z0-9] | [^*+?{}\[\]\\|()^$] )
      (?:(?P<count>[*+?]|\{\d(?:,\d?)?\})\??)?""",
    re.VERBOSE,
)
_ALLOWED: Final = (
    r"allowed are literals, '.', \d, \w, \s and sets like [a-z], each with *, +, ? or {m,n} up to "
    "9; '|'; ^ and $; groups that are not nested and not repeated"
)

V = TypeVar("V")


class PatternRefused(ValueError):  # noqa: N818 - named like the engine's other errors
    """A key outside the subset, or keys that need too many steps."""


class PatternTable(Generic[V]):
    """Values by pattern: that of the first key that is a path or a dot-bounded suffix of it.

    Raises `PatternRefused` for a key outside the subset, and when `STEPS_MAX` is exceeded.
    """

    def __init__(self, values: Mapping[str, V]) -> None:
        count = sum(len(key) for key in values if not _PLAIN.match(key))
        if count > CHARACTERS_MAX:
            raise PatternRefused(f"patterns have {count} characters; at most {CHARACTERS_MAX}")
        self._patterns = {key: _Pattern(key) for key in values if not _PLAIN.match(key)}
        self._values = dict(values)
        self._found: dict[str, V | None] = {}
        self._steps_left = STEPS_MAX

    def values(self) -> list[V]:
        """Return the values of all keys, in their order."""
        return list(self._values.values())

    def find(self, path: str) -> V | None:
        """Return the value of the first key that matches; None where none does."""
        if self._values and path not in self._found:
            self._found[path] = next(
                (value for key, value in self._values.items() if self._matches(key, path)), None
            )
        return self._found.get(path)

    def _matches(self, key: str, path: str) -> bool:
        pattern = self._patterns.get(key)
        steps = _PLAIN_STEPS if pattern is None else pattern.steps(path)
        if steps > MATCH_STEPS_MAX:
            raise PatternRefused(
                f"{key[:80]!a} in it, which could need {steps} steps for one module; at most "
                f"{MATCH_STEPS_MAX} are allowed: use fewer of '.*' and the like"
            )
        self._steps_left -= steps
        if self._steps_left < 0:
            raise PatternRefused(
                f"keys up to {key[:80]!a} that could need more than {STEPS_MAX} steps; use fewer "
                "keys, or keys with fewer of '.*' and the like"
            )
        return _matches_plain(key, path) if pattern is None else pattern.matches(path)


def _matches_plain(key: str, path: str) -> bool:
    """Return whether a key of letters, digits and dots (any character) is a dot-bounded suffix."""
    start = len(path) - len(key)
    if start < 0 or (start > 0 and path[start - 1] != "."):
        return False
    tail = path[start:]
    return tail == key or all(k in (".", c) for k, c in zip(key, tail, strict=True))


class _Repeat(NamedTuple):
    """A repeated character; `count_max` is None where the key sets no limit."""

    stretch: re.Pattern[str]
    count_max: int | None

    def ways(self, path: str) -> int:
        """Return an upper bound for the counts that match at one position of `path`."""
        longest = max(map(len, self.stretch.findall(path)), default=0)
        return 1 + (longest if self.count_max is None else min(longest, self.count_max))


class _Pattern:
    """One key of the subset; raises `PatternRefused` for any other key."""

    def __init__(self, key: str) -> None:
        self._repeats: list[_Repeat] = []
        try:
            alternatives, *groups = self._parse(key)
            # Any part of the path up to a dot may come first. A leading `.*` matches it too.
            self._has_one_start = len(alternatives) == 1 and key.startswith((".*", "^"))
            beginning = "" if self._has_one_start else r"(?:.*\.)?"
            self._regex = re.compile(rf"{beginning}(?:{key})$")
        except re.error as error:
            raise PatternRefused(f"{key[:80]!a} is not a pattern: {error.msg}") from None
        self._alternatives = len(alternatives) * prod(map(_overlaps, groups))
        self._steps_per_way = 1 + len(key) // 8

    def matches(self, path: str) -> bool:
        """Return whether the key matches as PEFT defines it."""
        return self._regex.match(path) is not None

    def steps(self, path: str) -> int:
        """Return an upper bound for the steps of `matches` and of this estimate."""
        estimate = _PATTERN_STEPS + 10 * len(path) * len(self._repeats)
        return estimate + self.ways(path) * self._steps_per_way

    def ways(self, path: str) -> int:
        """Return an upper bound for the ways through the key that backtracking can take."""
        starts = 1 if self._has_one_start else 2 + path.count(".")
        # Repeats can't cover more than the path together, which limits their counts as well.
        shared = comb(len(path) + len(self._repeats), len(self._repeats))
        ways = min(shared, prod(repeat.ways(path) for repeat in self._repeats))
        return starts * ways * self._alternatives

    def _parse(self, key: str) -> list[list[str]]:
        """Note the repeats; return the texts of the key's alternatives, then of each group's."""
        groups, is_inside, at = [[""]], False, 0
        while at < len(key):
            token = _TOKEN.match(key, at)
            if token is None or token["open" if is_inside else "close"]:
                raise PatternRefused(f"{key[:80]!a} has {key[at : at + 8]!a} in it; {_ALLOWED}")
            inner = groups[-1 if is_inside else 0]
            if token["open"]:
                groups.append([""])
            elif token["bar"] or token["close"] == ")?":
                inner.append("")
            elif not token["close"]:
                inner[-1] += token[0]
                self._note_repeat(token["character"], token["count"])
            is_inside = bool(token["open"]) or (is_inside and not token["close"])
            at = token.end()
        if len(self._repeats) > _REPEATS_MAX:
            raise PatternRefused(
                f"{key[:80]!a} has {len(self._repeats)} of *, +, ? and {{m,n}}; at most "
                f"{_REPEATS_MAX} are allowed"
            )
        return groups

    def _note_repeat(self, character: str | None, count: str | None) -> None:
        if count and (count in "*+?" or "," in count):
            limit = "1" if count == "?" else count[3:-1]
            self._repeats.append(
                _Repeat(re.compile(f"(?:{character})+"), int(limit) if limit else None)
            )


def _overlaps(alternatives: list[str]) -> int:
    """Return an upper bound for how many of a group's alternatives match at one position."""
    if not all(map(_LITERALS.match, alternatives)):
        return len(alternatives)
    return max(sum(map(one.startswith, alternatives)) for one in alternatives)
