"""The device on which Triton's operations launch; compiled kernels on one are in `make gpu`."""

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch._subclasses import FakeTensorMode

from loradock.engine.kernels.gpu.operations import on_device_of_first


def test_an_operation_runs_on_the_device_of_its_output(monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[torch.device | str] = []

    @contextmanager
    def enter(device: torch.device) -> Iterator[None]:
        entered.append(device)
        yield
        entered.append("left")

    def operation(y: object, scale: float) -> None:
        entered.append(f"launched {scale}")

    monkeypatch.setattr(torch.cuda, "device", enter)
    launch = on_device_of_first(operation)
    with FakeTensorMode():
        second = torch.empty(1, device="cuda:1")
    for y in (second, [second, second]):
        entered.clear()
        launch(y, 0.5)
        assert entered == [torch.device("cuda", 1), "launched 0.5", "left"]
    entered.clear()
    launch(torch.empty(1), 2.0)
    assert entered == ["launched 2.0"]
