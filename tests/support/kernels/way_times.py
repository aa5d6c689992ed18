"""Measured times of a model's products, made up by the name of the way."""

from loradock.engine.kernels.cpu.base_linear import ROWS, WAYS, WayTimes

LAST = list(WAYS)[-1]
"""The way that can be made fast."""


def way_times(own: float, faster: dict[int, float] | None = None) -> WayTimes:
    """Return times of PyTorch's own products, and of the last of `WAYS` by rows.

    The other times are ten times those of PyTorch.
    """
    times = []
    for rows in ROWS:
        named = dict.fromkeys(WAYS, 10.0 * own) | {"PyTorch": own}
        named[LAST] = (faster or {}).get(rows, 10.0 * own)
        times.append(tuple(named.values()))
    return tuple(times)
