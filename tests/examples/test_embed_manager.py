"""Tests of the example for programs that embed LoRADock."""

import pytest
import torch

from examples import embed_manager


def test_the_example_prints_what_each_adapter_was_trained_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    torch.set_num_threads(1)
    embed_manager.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:6]] == [
        ["upper", "hello>HELLO"],
        ["reverse", "hello>olleh"],
        ["(base)", "hello>hello"],
        ["double", "hello>hheelllloo"],
        ["caesar", "hello>khoor"],
        ["(base)", "hello>hello"],
    ]
    assert "'active': 2" in lines[6]
    assert "'misses': 4" in lines[7]
