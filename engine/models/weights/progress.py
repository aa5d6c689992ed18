"""Reports on how many of a model's tensors `transformers` has loaded."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

from loradock.engine.models.library.weights import set_tqdm_hook

INTERVAL_S: Final = 5.0
"""The time between two reports."""

Report = Callable[[int, int], None]
"""Receives the number of tensors that were loaded, and that of all."""

_LOADING: Final = "Loading weights"
"""The title of the progress bar of `transformers`."""


@contextmanager
def reporting(report: Report, clock: Callable[[], float] = time.monotonic) -> Iterator[None]:
    """Call `report` from time to time while a model is loaded, and at the end of its tensors."""

    def bar_of(
        make: Callable[..., Any], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> Any:
        if options.get("desc") != _LOADING or len(arguments) != 1:
            return make(*arguments, **options)
        return _reported(arguments[0], report, clock)

    previous = set_tqdm_hook(bar_of)
    try:
        yield
    finally:
        set_tqdm_hook(previous)


def _reported(tensors: Any, report: Report, clock: Callable[[], float]) -> Iterator[Any]:
    total, due = len(tensors), clock() + INTERVAL_S
    for done, tensor in enumerate(tensors):
        if clock() >= due:
            report(done, total)
            due = clock() + INTERVAL_S
        yield tensor
    report(total, total)
