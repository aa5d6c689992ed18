"""Import of transformers and construction of a model without torch's compiler.

`transformers` marks functions for `torch.compile`, imports `DTensor`, and constructs models on the
meta device. Each of these loads `torch._dynamo`, which takes longer than the rest of an engine's
start. An engine compiles nothing and splits models itself. A program that uses the engine as a
library imports everything.
"""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType
from typing import Any, Final

import torch
import torch.distributed

from loradock.engine.parallel import is_rank

_COMPILER: Final = "torch._dynamo"
_MARKS: Final = ("allow_in_graph", "assume_constant_result", "disable")


def import_transformers() -> None:
    """Import transformers' modules for models; an engine's process calls this before others."""
    # ruff: noqa: F401, PLC0415
    with without_compiler() as marks, _without_distributed():
        if marks is not None:
            # The only submodule that is used, for its class, does not need the others.
            marks.__path__ = [os.path.join(torch.__path__[0], "_dynamo")]
        import transformers.masking_utils
        import transformers.modeling_utils


@contextmanager
def without_compiler() -> Iterator[ModuleType | None]:
    """Let decorators of `torch._dynamo` return functions unchanged, unless it was loaded before.

    Any other use of it loads it.
    """
    if _COMPILER in sys.modules or _is_compiler_needed():
        yield None
        return
    marks = _CompilerMarks(_COMPILER)
    sys.modules[_COMPILER] = torch._dynamo = marks
    try:
        yield marks
    finally:
        marks.remove()


def _is_compiler_needed() -> bool:
    """Return whether transformers imports torchao, whose modules use the compiler's own modules."""
    from transformers.utils import is_torchao_available

    return bool(is_torchao_available())


class _CompilerMarks(ModuleType):
    """The decorators of `torch._dynamo` that only mark a function."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        for mark in _MARKS:
            setattr(self, mark, _unmarked)

    def remove(self) -> None:
        """Let the next import load the compiler."""
        if sys.modules.get(_COMPILER) is self:
            del sys.modules[_COMPILER], torch._dynamo

    def __getattr__(self, name: str) -> Any:
        """Load the compiler, and return its attribute."""
        if name.startswith("__") and name != "__path__":
            # `inspect` reads the file name of every module.
            raise AttributeError(name)
        self.remove()
        import torch._dynamo as compiler

        return getattr(compiler, name)


def _unmarked(function: Callable[..., Any] | None = None, *_: object, **__: object) -> Any:
    """Return the function, or a decorator that returns it."""
    return function if function is not None else lambda decorated: decorated


@contextmanager
def _without_distributed() -> Iterator[None]:
    """Let transformers find no `torch.distributed`, except on a rank."""
    is_available = torch.distributed.is_available
    if not is_rank() and not _is_compiler_needed():
        torch.distributed.is_available = lambda: False
    try:
        yield
    finally:
        torch.distributed.is_available = is_available
