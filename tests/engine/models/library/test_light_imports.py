"""Imports without the compiler: what stands in for it, for how long, and when it is loaded."""

import sys
from types import ModuleType

import pytest
import torch
import torch.distributed

from loradock.engine.models.library import light_imports

COMPILER = "torch._dynamo"


@pytest.fixture
def unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process in which nothing has loaded the compiler, or needs it."""
    monkeypatch.delitem(sys.modules, COMPILER, raising=False)
    # Not `setattr`, which reads the attribute, and so loads the compiler.
    monkeypatch.setitem(vars(torch), "_dynamo", None)
    monkeypatch.setattr(light_imports, "_is_compiler_needed", lambda: False)


@pytest.mark.usefixtures("unloaded")
def test_marks_leave_functions_unchanged_and_only_meanwhile() -> None:
    def marked() -> None: ...

    with light_imports.without_compiler() as marks:
        assert marks is not None
        assert sys.modules[COMPILER] is marks
        assert torch._dynamo is marks
        assert torch._dynamo.disable(marked) is marked
        assert torch._dynamo.disable(recursive=False)(marked) is marked
        assert torch._dynamo.allow_in_graph(marked) is marked
        assert not hasattr(marks, "__file__")
    assert COMPILER not in sys.modules
    assert "_dynamo" not in vars(torch)


@pytest.mark.usefixtures("unloaded")
def test_any_other_use_loads_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ModuleType(COMPILER)
    compiler.explain = "loaded"  # type: ignore[attr-defined]

    def load() -> None:
        sys.modules[COMPILER] = torch._dynamo = compiler

    with light_imports.without_compiler() as marks:
        with monkeypatch.context() as patch:
            patch.setattr(marks, "remove", load)
            assert torch._dynamo.explain == "loaded"
        assert sys.modules[COMPILER] is compiler
    assert sys.modules.pop(COMPILER) is compiler


def test_a_compiler_that_is_loaded_or_needed_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = ModuleType(COMPILER)
    monkeypatch.setitem(sys.modules, COMPILER, compiler)
    with light_imports.without_compiler() as marks:
        assert marks is None
        assert sys.modules[COMPILER] is compiler
    monkeypatch.delitem(sys.modules, COMPILER)
    monkeypatch.setattr(light_imports, "_is_compiler_needed", lambda: True)
    with light_imports.without_compiler() as marks:
        assert marks is None
        assert COMPILER not in sys.modules


@pytest.mark.usefixtures("unloaded")
def test_distributed_is_hidden_meanwhile_and_never_from_a_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    before = torch.distributed.is_available
    monkeypatch.setattr(light_imports, "is_rank", lambda: False)
    with light_imports._without_distributed():
        assert not torch.distributed.is_available()
    assert torch.distributed.is_available is before
    monkeypatch.setattr(light_imports, "is_rank", lambda: True)
    with light_imports._without_distributed():
        assert torch.distributed.is_available is before
