"""JSON objects from untrusted files, with bounds on depth and number of values."""

import json
from collections import Counter
from typing import Any, Final, NoReturn

DIGITS_MAX: Final = 64
"""The digits in a row that a file may contain; an integer's decoding takes their number squared."""

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))
_ONLY_DIGITS: Final = bytes(ord("0") if byte in b"0123456789" else 0 for byte in range(256))
_LONG_NUMBER: Final = b"0" * (DIGITS_MAX + 1)


def decode_object(raw: bytes, values_max: int, depth_max: int) -> dict[str, Any]:
    """Return the object in `raw`, without repeated names or NaN; raises ValueError.

    Depth, values and digits are counted before decoding, also inside strings: a file whose strings
    contain many of them may be refused, but no file exceeds the bounds. The decoder holds the
    interpreter's lock while it reads a number.
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
        value = json.loads(
            raw.decode(), object_pairs_hook=_without_repetitions, parse_constant=_refuse_constant
        )
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


def _without_repetitions(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{name[:100]!a} occurs in it more than once")
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON number")
