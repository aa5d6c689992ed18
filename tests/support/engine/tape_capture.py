"""Captured graphs without a GPU: a tape of a step's operations, and their replay.

As with CUDA, a decision that the host made while the tape was recorded stays made. A replay runs
the same operations on the same tensors and reads only their current contents.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from loradock.engine.serving.decoding import DecodeStep

Operation = tuple[Any, Any, Any, Any]
"""A function, its positional and keyword arguments, and its result."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, result))
        return result


class TapeCapture:
    """Captures steps on tapes, and counts `captures` and `replays`."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step: DecodeStep) -> DecodeStep:
        """Return a replay of the step's tape."""
        self.captures += 1
        with _Tape() as tape:
            output = step()

        @torch.inference_mode()
        def replay() -> Tensor:
            self.replays += 1
            for operation in tape.operations:
                _run_again(operation)
            return output

        return replay


def _run_again(operation: Operation) -> None:
    """Run an operation, and copy its result to where the recorded one is stored."""
    func, args, kwargs, before = operation
    now = func(*args, **kwargs)
    for new, old in zip(tree_leaves(now), tree_leaves(before), strict=True):
        if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)
