"""JSON and patterns from untrusted files, decoded and matched within bounds.

A call into C holds the interpreter's lock until it returns, and the engine's main loop waits for
it. So no such call decodes a long text, and no pattern backtracks.

PEFT matches a key of `rank_pattern` and `alpha_pattern` with `re.match`, as
`rf"(.*\\.)?({key})$"`. RE2 matches in time that is linear in the path, within a bound on memory. It
has no lookarounds and no backreferences; a key with them is refused, and so is one that PEFT would
refuse or that RE2 would read differently.
"""

import json
import json.scanner
import re
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Final, Generic, NoReturn, TypeVar

if TYPE_CHECKING:
    import re2


DIGITS_MAX: Final = 64
"""The digits in a row that a file may contain; an integer's decoding takes their number squared."""

C_TEXT_MAX: Final = 64 << 10
"""The longest text, in characters, that the decoder in C decodes in one call: under a millisecond.
Longer ones are decoded in Python, where other threads take turns, in up to seven times as long."""

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ONLY_DIGITS: Final = bytes(ord("0") if byte in b"0123456789" else 0 for byte in range(256))
_LONG_NUMBER: Final = b"0" * (DIGITS_MAX + 1)


def decode_object(raw: bytes, values_max: int, depth_max: int) -> dict[str, Any]:
    """Return the object in `raw`, without repeated names or NaN; raises ValueError.

    Depth, values and digits are counted before decoding, also inside strings: a file whose strings
    contain many of them may be refused, but no file exceeds the bounds.
    """
    brackets = raw.translate(None, _NOT_BRACKETS)
    values = len(brackets) // 2 + raw.count(b",") + 1
    if values > values_max:
        raise ValueError(f"it has about {values} values; at most {values_max} are read")
    if _depth(brackets) > depth_max:
        raise ValueError(f"it is nested deeper than {depth_max}")
    if _LONG_NUMBER in raw.translate(_ONLY_DIGITS):
        raise ValueError(f"it has more than {DIGITS_MAX} digits in a row")
    try:
        value = _decoder(len(raw)).decode(raw.decode())
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError(f"it is a {type(value).__name__}, not an object")
    return value


def _depth(brackets: bytes) -> int:
    depth = depth_max = 0
    for bracket in brackets:
        depth += 1 if bracket in b"[{" else -1
        depth_max = max(depth, depth_max)
    return depth_max


def _decoder(size_bytes: int) -> json.JSONDecoder:
    decoder = json.JSONDecoder(
        object_pairs_hook=_without_repetitions, parse_constant=_refuse_constant
    )
    if size_bytes > C_TEXT_MAX:
        # The library's types know neither.
        decoder.scan_once = json.scanner.py_make_scanner(decoder)  # type: ignore[attr-defined]
    return decoder


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise ValueError(f"{name[:100]!a} occurs in it more than once")
        found[name] = value
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


CPU_S_MAX: Final = 5.0
"""Bound on the processor time for the matches of one table; usual tables need milliseconds."""

CHARACTERS_MAX: Final = 65_536
"""Largest total length of the keys of one table that are not plain names."""

_MEMORY_BYTES_MAX: Final = 32 << 20
"""Bound on the memory of one table's compiled keys."""

_KEY_BYTES_MAX: Final = 1 << 16
"""Bound on the memory of one compiled key: one match takes some milliseconds at most."""

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.-]+\Z")
_DIFFERENT: Final = ("[:", "{,", "[[")
"""`[[:alpha:]]` is a class for RE2 and a set for `re`, which warns of a nested set; `{,3}` is
literal for RE2 and a repeat for `re`."""

V = TypeVar("V")


class PatternRefused(ValueError):  # noqa: N818 - named like the engine's other errors
    """A key that can't be matched as PEFT does, or keys that take too much time or memory."""


class PatternTable(Generic[V]):
    """Values by pattern: the value of the first key that is a path or a dot-bounded suffix of it.

    Raises `PatternRefused` for a key that is refused, and when `CPU_S_MAX` is exceeded.
    """

    def __init__(self, values: Mapping[str, V]) -> None:
        keys = [key for key in values if not _PLAIN.match(key)]
        if (count := sum(map(len, keys))) > CHARACTERS_MAX:
            raise PatternRefused(
                f"patterns must have at most {CHARACTERS_MAX} characters, got {count}"
            )
        bytes_max = min(_KEY_BYTES_MAX, _MEMORY_BYTES_MAX // max(1, len(keys)))
        self._patterns = {key: _compiled(key, bytes_max) for key in keys}
        self._values = dict(values)
        self._found: dict[str, V | None] = {}
        self._cpu_s = 0.0

    def values(self) -> list[V]:
        """Return the values of all keys, in their order."""
        return list(self._values.values())

    def find(self, path: str) -> V | None:
        """Return the value of the first key that matches; None if none does."""
        if self._values and path not in self._found:
            started_s = time.thread_time()
            keys = (key for key in self._values if self._matches(key, path))
            found = next(keys, None)
            self._found[path] = None if found is None else self._values[found]
            self._cpu_s += time.thread_time() - started_s
            if self._cpu_s > CPU_S_MAX:
                raise PatternRefused(
                    f"keys that take more than {CPU_S_MAX:g} s to match; use fewer keys, or names "
                    "instead of patterns"
                )
        return self._found.get(path)

    def _matches(self, key: str, path: str) -> bool:
        pattern = self._patterns.get(key)
        if pattern is None:
            return _matches_plain(key, path)
        # Other characters are in `\w`, `\s` and `$` of `re` alone.
        if not (path.isascii() and path.isprintable()):
            raise PatternRefused(f"{key[:80]!a}, and {path!a} is not printable ASCII; use names")
        return pattern.match(path) is not None


def _matches_plain(key: str, path: str) -> bool:
    """Return whether a key of letters, digits and dots (any character) is a dot-bounded suffix."""
    start = len(path) - len(key)
    if start < 0 or (start > 0 and path[start - 1] != "."):
        return False
    tail = path[start:]
    return tail == key or all(k in (".", c) for k, c in zip(key, tail, strict=True))


def _compiled(key: str, bytes_max: int) -> "re2._Regexp":
    """Compile a key; raises `PatternRefused` unless it means the same to PEFT."""
    import re2  # noqa: PLC0415 - few adapters have patterns

    options = re2.Options()
    options.max_mem, options.never_capture, options.log_errors = bytes_max, True, False
    if not key.isascii() or any(part in key for part in _DIFFERENT):
        parts = ", ".join(map(repr, _DIFFERENT))
        raise PatternRefused(f"{key[:80]!a} must be ASCII and must not contain any of {parts}")
    expression = rf"(.*\.)?({key})$"
    try:
        # First by RE2: `re` would take long to compile some keys that RE2 refuses.
        compiled = re2.compile(expression, options)
        re.compile(expression)
    except (re2.error, re.error, RecursionError, OverflowError) as error:
        found = error.args[0] if error.args else error
        reason = found.decode(errors="replace") if isinstance(found, bytes) else found
        raise PatternRefused(f"{key[:80]!a} can't be used as a pattern: {reason}") from None
    return compiled
