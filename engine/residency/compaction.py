"""Moving bytes to a lower place in the same memory, also where the two places overlap.

What it is: a slide in steps that never copy between overlapping ranges, with a bounded buffer of
its own. What it is not: a bookkeeper of extents. One rule: a slide that fails puts back what it
moved, so its bytes lie whole at the old place or whole at the new.
"""

import torch

from engine.residency.copier import Copier


class SlideLost(Exception):  # noqa: N818 - named like the engine's other errors
    """A slide failed, and so did putting back what it had moved: the bytes are gone."""


class Slider:
    """Slides within `memory` (1-D uint8, on any device) with `bounce` (the same) as its buffer."""

    def __init__(self, memory: torch.Tensor, bounce: torch.Tensor, copier: Copier) -> None:
        self._memory = memory
        self._bounce = bounce
        self._copier = copier

    def slide(self, source: int, target: int, size: int) -> None:
        """Move `size` bytes from offset `source` down to `target`.

        Raises what the copier raised, with all bytes at `source` again; `SlideLost` where that
        could not be done.
        """
        step = max(source - target, self._bounce.numel())
        moved: list[tuple[int, int]] = []
        try:
            for start in range(0, size, step):
                length = min(step, size - start)
                self._step(source + start, target + start, length)
                moved.append((start, length))
        except Exception as error:
            self._put_back(source, target, moved, error)
            raise

    def _put_back(
        self, source: int, target: int, moved: list[tuple[int, int]], cause: Exception
    ) -> None:
        try:
            for start, length in reversed(moved):
                self._step(target + start, source + start, length)
        except Exception:
            raise SlideLost("a slide in the arena failed half-way") from cause

    def _step(self, source: int, target: int, length: int) -> None:
        """Copy one range; where it fails, the bytes at `source` are what they were."""
        source_view = self._memory[source : source + length]
        target_view = self._memory[target : target + length]
        if abs(source - target) >= length:
            self._copier.move(target_view, source_view)
            return
        buffer = self._bounce[:length]
        self._copier.move(buffer, source_view)
        try:
            self._copier.move(target_view, buffer)
        except Exception:
            self._copier.move(source_view, buffer)
            raise
