"""The servers of `control.curve` answer: a round with CURVE and one without."""

import os
from pathlib import Path

import pytest

from benchmarks import control_curve


def test_a_round_is_measured_with_curve_and_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control_curve, "ROUNDS", 1)
    monkeypatch.setattr(control_curve, "REQUESTS_PER_ROUND", 200)
    processor = min(os.sched_getaffinity(0))
    [rounds] = control_curve._rounds(tmp_path, processor)
    assert all(measured.rate > 0 for measured in rounds)
