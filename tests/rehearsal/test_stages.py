"""The stage `step` of `make gpu` runs to its end, on a small model.

Kernels are not run, so attention is PyTorch's and no step is captured, also where it is requested.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.sources import ROOT

pytestmark = pytest.mark.simulated


def test_steps_activations_and_rotations_are_measured(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.support.device", "benchmarks.gpu_step", "--small"]
    places = {"LORADOCK_GPU_FIGURES": str(tmp_path)}
    subprocess.run(command, cwd=ROOT, env=os.environ | places, check=True)
    [file] = tmp_path.glob("*.jsonl")
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    for captured in (False, True):
        own = [line for line in lines if line.get("captured") is captured]
        steps = [line for line in own if "step_ms" in line]
        assert {(line["rows"], line["adapters"]) for line in steps} == {
            *((1, 0), (1, 1), (4, 0), (4, 4)),
        }
        assert [line["shared_tokens"] for line in steps if "shared_tokens" in line] == [16]
        assert any("activation_ms" in line for line in own)
        assert any("gap_max_ms" in line for line in own)
