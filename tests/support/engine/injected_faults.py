"""Failures at every possible point: what the code calls is recorded, and fails in turn.

The points are found by running the code, so one that is added later is found too.
"""

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, TypeVar
from unittest.mock import patch

Point = tuple[object, ...]
Result = TypeVar("Result")

SYSTEM_CALLS = ("open", "fstat", "stat", "readlink", "preadv")


class Faults:
    """The points that were passed, and the one that fails; None: none fails."""

    def __init__(self, failing: Point | None = None) -> None:
        self.passed: dict[Point, None] = {}
        self.failing = failing

    @property
    def has_failed(self) -> bool:
        """Whether the point that fails was reached."""
        return self.failing in self.passed

    def _fails(self, point: Point) -> bool:
        is_first = point not in self.passed
        self.passed[point] = None
        return is_first and point == self.failing

    @contextmanager
    def of_system_calls(self) -> Iterator[None]:
        """Points are the calls of the operating system that read files, each one by its number."""
        with patch.multiple(os, **{name: self._counted(name) for name in SYSTEM_CALLS}):
            yield

    def _counted(self, name: str) -> Callable[..., Any]:
        call, count = getattr(os, name), 0

        def counted(*arguments: Any, **options: Any) -> Any:
            nonlocal count
            count += 1
            if self._fails((name, count)):
                raise OSError(errno.EIO, "injected")
            return call(*arguments, **options)

        return counted

    @contextmanager
    def of_functions(self, files: tuple[Path, ...], within: tuple[str, ...]) -> Iterator[None]:
        """Points are the functions of `files`, each with each of its callers.

        Only those count that are in `within`, or are called, directly or not, by one of these.
        """
        names = tuple(map(str, files))

        def on_call(frame: FrameType, *_: object) -> None:
            caller = frame.f_back
            if caller is None or not frame.f_code.co_filename.startswith(names):
                return
            point = (frame.f_code.co_qualname, caller.f_code.co_qualname)
            if frame.f_code.co_name.startswith("<"):
                return
            if any(name in within for name in _names_from(frame)) and self._fails(point):
                raise MemoryError(f"injected into {point}")

        before = sys.gettrace()
        sys.settrace(on_call)
        try:
            yield
        finally:
            sys.settrace(before)


def _names_from(frame: FrameType | None) -> Iterator[str]:
    """Yield the names of a frame's function and of all its callers."""
    while frame is not None:
        yield frame.f_code.co_qualname
        frame = frame.f_back


def fail_everywhere(
    run: Callable[[], Result],
    injected: Callable[[Faults], AbstractContextManager[None]],
    known: set[Point],
) -> Iterator[tuple[Result, Point | None]]:
    """Run without a failure, and once per point with its failure; yield each result and its point.

    The points in `known` are not repeated; those that were found are added to it.
    """
    found = Faults()
    with injected(found):
        result = run()
    yield result, None
    for point in [point for point in found.passed if point not in known]:
        known.add(point)
        faults = Faults(point)
        with injected(faults):
            result = run()
        assert faults.has_failed, point
        yield result, point
