"""Conversion of sizes such as `64MiB` to bytes and back.

`64M` is refused: it stands for 1000**2 bytes in one program and for 1024**2 in another.
"""

import re
from fractions import Fraction
from typing import Final

_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_SIZE_END: Final = 1 << 63
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS: Final = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
}


def parse_size(text: str) -> int:
    """Return the bytes of `4096`, `64MiB`, `1.5GiB` or `2 GB`, in upper or lower case.

    Raises `ValueError` for another unit, a fraction of a byte, and sizes from 8 EiB on.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or for example 64MiB or 1.5GiB")
    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"{text!r} has the unit {unit!r}; use KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, "
            "GB, TB (powers of 1000)"
        )
    size = Fraction(number) * _UNITS[unit.lower()]
    if size >= _SIZE_END:
        raise ValueError(f"{text!r} is more than any machine has")
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes, which is not a whole number")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Return a size with three digits and a binary unit: `512 B`, `1.5 KiB`, `4 GiB`."""
    power = 0
    # 999.5 and more would round to four digits, so the next unit is used.
    while power < len(_BINARY) - 1 and size_bytes >= 999.5 * 1024**power:
        power += 1
    number = size_bytes / 1024**power
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{digits} {_BINARY[power]}"
