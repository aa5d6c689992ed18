"""Tests of what the demo prints about its log."""

import io
from pathlib import Path

from rich.console import Console

from examples.demo_view import print_what_if
from loradock.lab.traffic import read_traffic
from tests.support.simulation.logged_histories import write_history


def test_a_what_if_is_five_lines_with_the_logs_own_numbers(tmp_path: Path) -> None:
    write_history(tmp_path / "log", 3)
    traffic = read_traffic(tmp_path / "log")
    logged, slots = traffic.logged, traffic.limits.max_cpu_loras
    assert logged is not None
    console = Console(file=io.StringIO(), width=110)
    print_what_if(console, tmp_path / "log", slots)
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert len(lines) == 5
    assert f"{slots} slots" in lines[0]
    assert lines[2].split()[:3] == ["slot", "writes", str(logged.activations)]
