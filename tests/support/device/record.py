"""The record of what ran on the simulated device, with the lines of the program that caused it."""

import sys
from collections import Counter
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).parents[3]
_OWN: Final = (str(ROOT / "engine"), str(ROOT / "loradock/engine"), str(ROOT / "benchmarks"))
_LIBRARY: Final = "/transformers/"


class Record:
    """Counts since the last `reset`; every key that has a site names the lines that caused it.

    `errors`: what a CUDA device would refuse, or compute wrongly at some time.
    `launches`: kernels of PyTorch, by operator; `triton`: launches of our kernels, by name.
    `variants`: launches of each variant that Triton compiles.
    `to_device`, `to_host`: copies, by (kind, site). `reads`: values that the host waited for.
    `waits`: other waits of the host. `attention`: calls by (backend, mask, grouping).
    `shapes`: the shapes of attention's operands. `pinned`: page-locked allocations, by bytes.
    """

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin to count from zero."""
        self.errors: Counter[tuple[str, str]] = Counter()
        self.launches: Counter[str] = Counter()
        self.triton: Counter[str] = Counter()
        self.variants: Counter[object] = Counter()
        self.to_device: Counter[tuple[str, str]] = Counter()
        self.to_host: Counter[tuple[str, str]] = Counter()
        self.reads: Counter[tuple[str, str]] = Counter()
        self.waits: Counter[tuple[str, str]] = Counter()
        self.attention: Counter[tuple[str, str, str]] = Counter()
        self.shapes: Counter[object] = Counter()
        self.pinned: Counter[int] = Counter()
        self.replays = 0
        self.copied_bytes = 0

    def error(self, text: str, detail: str = "") -> None:
        """Record an error at the current site."""
        self.errors[text, f"{detail} {site()}".strip()] += 1


RECORD: Final = Record()


def site(depth: int = 3) -> str:
    """Return the innermost lines of the engine, the benchmarks and transformers."""
    found: list[str] = []
    frame = sys._getframe(1)
    while frame is not None and len(found) < depth:
        name = frame.f_code.co_filename
        if name.startswith(_OWN):
            found.append(f"{name.removeprefix(str(ROOT))[1:]}:{frame.f_lineno}")
        elif _LIBRARY in name:
            found.append(f"transformers/{name.partition(_LIBRARY)[2]}:{frame.f_lineno}")
        frame = frame.f_back
    return " < ".join(found) or "elsewhere"
