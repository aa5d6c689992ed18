"""Sizes as people write them.

What it is: `64MiB` to bytes and back. What it is not: a guess; `64M` is refused, because half of
its readers mean another number. One rule: what is read is exact, what is shown is short.
"""

import re
from fractions import Fraction
from typing import Final

_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS: Final = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
}


def parse_size(text: str) -> int:
    """Bytes in `4096`, `64MiB`, `1.5GiB` or `2 GB`, in upper or lower case.

    Raises `ValueError` for another unit, and for what is no whole number of bytes.
    """
    found = _NUMBER.fullmatch(text.strip())
    if found is None:
        raise ValueError(f"{text!r} is no size; write bytes or for example 64MiB or 1.5GiB")
    number, unit = found.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"{text!r} has the unit {unit!r}; use KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, "
            "GB, TB (powers of 1000)"
        )
    size = Fraction(number) * _UNITS[unit.lower()]
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes, which is not a whole number")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Three digits and a binary unit: `512 B`, `1.5 KiB`, `4 GiB`."""
    power = 0
    # From 999.5 on, three digits would round to the next unit's one.
    while power < len(_BINARY) - 1 and size_bytes >= 999.5 * 1024**power:
        power += 1
    number = size_bytes / 1024**power
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{digits} {_BINARY[power]}"
