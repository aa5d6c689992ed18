"""A core whose handling of some inputs raises, at any point of its changes to the world."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from loradock.controller.core.context import Context
from loradock.controller.core.controller import Controller
from loradock.messages.records import ControllerStarted, InputSkipped

MUTATIONS = (
    *("answer", "publish", "next_op", "bound_operation", "mark_changed", "keep"),
    *("apply_transition", "touch_lru", "set_goal"),
)
_handle = Controller.handle


class Poison(Exception):  # noqa: N818 - named like what it stands for
    """Raised by a handler that fails."""


class _Failures:
    """The inputs that fail, each at one of its changes, and those that have failed."""

    def __init__(self, changes_before: dict[int, int]) -> None:
        self.raised: list[int] = []
        self._changes_before = changes_before
        self._failing_seq = 0
        self._changes_left = 0

    def handle(self, controller: Controller, message: Any, *rest: Any, **named: Any) -> Any:
        """Handle an input, or fail in the middle of it, at the latest at its end."""
        seq = controller.world.seq + 1
        if seq not in self._changes_before or isinstance(message, ControllerStarted | InputSkipped):
            return _handle(controller, message, *rest, **named)
        self._failing_seq, self._changes_left = seq, self._changes_before[seq]
        try:
            _handle(controller, message, *rest, **named)
            self._fail()
        finally:
            self._failing_seq = 0

    def handler(self) -> Callable[..., Any]:
        """Return `handle` as a method of a controller."""

        def method(controller: Controller, message: Any, *rest: Any, **named: Any) -> Any:
            return self.handle(controller, message, *rest, **named)

        return method

    def changing(self, name: str) -> Callable[..., Any]:
        """Return a method of a context that counts its calls."""
        original = getattr(Context, name)

        def method(context: Context, *arguments: Any, **named: Any) -> Any:
            if self._failing_seq:
                if not self._changes_left:
                    self._fail()
                self._changes_left -= 1
            return original(context, *arguments, **named)

        return method

    def _fail(self) -> None:
        self.raised.append(self._failing_seq)
        raise Poison(f"input {self._failing_seq}")


@contextmanager
def failing(changes_before: dict[int, int]) -> Iterator[list[int]]:
    """Make the handling of inputs raise: an input's `seq` -> the changes before that.

    An input with fewer changes raises after the last one. Yields the inputs that have raised.
    """
    failures = _Failures(changes_before)
    methods = {name: failures.changing(name) for name in MUTATIONS}
    with (
        patch.object(Controller, "handle", failures.handler()),
        patch.multiple(Context, **methods),
    ):
        yield failures.raised
