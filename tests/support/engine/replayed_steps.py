"""Captured graphs without a GPU: a tape of a step's operations, and their replay.

What it is: capture as CUDA does it, told in Python: what the host decided while the tape ran stays
decided, and a replay runs the same operations on the same tensors. What it is not: fast. One rule:
a replay sees nothing but what lies in the tensors now.
"""

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.inference.cuda_graphs import Step

Operation = tuple[Any, Any, Any, Any]
"""A function, its arguments by place and by name, and what it gave."""


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        self.operations.append((func, args, kwargs or {}, found))
        return found


class TapeCapture:
    """Captures steps on tapes; `captures` and `replays` count."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def __call__(self, step: Step) -> Step:
        """The step's tape."""
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
    """Run an operation, and put what it gives where it lay when it was recorded."""
    func, args, kwargs, before = operation
    now = func(*args, **kwargs)
    for new, old in zip(tree_leaves(now), tree_leaves(before), strict=True):
        if isinstance(old, Tensor) and new.data_ptr() != old.data_ptr():
            old.copy_(new)
