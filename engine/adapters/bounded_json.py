"""JSON objects from untrusted files, with bounds on depth and number of values.

A call into C holds the interpreter's lock until it returns, and the engine's main loop waits for
it. So no such call decodes a long text.
"""

import json
import json.scanner
from typing import Any, Final, NoReturn

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
