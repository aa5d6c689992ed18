"""JSON from a file that somebody else wrote.

What it is: the standard decoder behind bounds on depth and on the number of values. What it is
not: a judge of what the values mean. One rule: whatever the bytes are, the answer is an object
without repeated names and without NaN, or a `ValueError` that says what was found.
"""

import json
from collections import Counter
from typing import Any, Final, NoReturn

_NOT_BRACKETS: Final = bytes(set(range(256)) - set(b"[]{}"))


def decode_object(raw: bytes, values_max: int, depth_max: int) -> dict[str, Any]:
    """The JSON object that `raw` is.

    Depth and values are counted before anything is decoded, and without regard to strings: a file
    whose strings are full of brackets or commas can be refused wrongly, none is decoded wrongly.
    """
    brackets = raw.translate(None, _NOT_BRACKETS)
    values = len(brackets) // 2 + raw.count(b",") + 1
    if values > values_max:
        raise ValueError(f"it has about {values} values; at most {values_max} are read")
    if _depth(brackets) > depth_max:
        raise ValueError(f"it nests deeper than {depth_max}")
    try:
        value = json.loads(
            raw.decode(), object_pairs_hook=_without_repetitions, parse_constant=_refuse_constant
        )
    except RecursionError:
        raise ValueError("it nests too deeply") from None
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
        raise ValueError(f"{name[:100]!a} stands in it more than once")
    return found


def _refuse_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON number")
