"""Sizes that are rounded up, so that what depends on them changes seldom.

What it is: the one rounding that buffers, launches and captured graphs share. What it is not: a
choice of what is rounded. One rule: a size is never rounded down.
"""


def power_of_two(number: int) -> int:
    """The least power of two that is not below `number`, and not below 1."""
    return 1 << max(0, number - 1).bit_length()
