"""A core whose handling of one input raises, at any point of its changes to the world."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from controller.core.context import Context
from controller.core.controller import Controller
from messages.records import ControllerStarted, InputSkipped

MUTATIONS = (
    *("answer", "publish", "next_op", "issue", "issue_for", "mark_changed", "keep"),
    *("apply_transition", "touch_lru", "set_goal"),
)


class Poison(Exception):  # noqa: N818 - named like what it stands for
    """Raised by a handler that fails."""


@contextmanager
def failing(seqs: dict[int, int]) -> Iterator[list[int]]:
    """Make the handling of inputs raise at a change: `seqs` maps an input's `seq` to the change.

    0 is before the first change; an input with fewer changes raises after the last one. Yields a
    list of the inputs that have raised.
    """
    raised: list[int] = []
    left = {"seq": 0, "changes": 0}
    handle = Controller.handle
    originals = {name: getattr(Context, name) for name in MUTATIONS}

    def fail(seq: int) -> None:
        raised.append(seq)
        raise Poison(f"input {seq}")

    def count(context: Context) -> None:
        if context.world.seq == left["seq"]:
            if left["changes"] == 0:
                left["seq"] = 0
                fail(context.world.seq)
            left["changes"] -= 1

    def changing(name: str) -> Any:
        def method(context: Context, *arguments: Any, **named: Any) -> Any:
            count(context)
            return originals[name](context, *arguments, **named)

        return method

    def handle_or_fail(controller: Controller, *arguments: Any, **named: Any) -> Any:
        seq = controller.world.seq + 1
        if seq not in seqs or isinstance(arguments[0], ControllerStarted | InputSkipped):
            return handle(controller, *arguments, **named)
        left.update(seq=seq, changes=seqs[seq])
        try:
            handle(controller, *arguments, **named)
        finally:
            left["seq"] = 0
        return fail(seq)

    Controller.handle = handle_or_fail  # type: ignore[method-assign]
    for name in MUTATIONS:
        setattr(Context, name, changing(name))
    try:
        yield raised
    finally:
        Controller.handle = handle  # type: ignore[method-assign]
        for name, original in originals.items():
            setattr(Context, name, original)
