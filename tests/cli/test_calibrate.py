"""The command `calibrate`, over the process that measures and over what it may answer."""

import json
import subprocess
import sys
from typing import Any

import pytest

from loradock.cli import calibrate
from loradock.engine.kernels.calibrate import report
from loradock.engine.kernels.cpu.calibration import Calibration, ProductSpeeds
from loradock.engine.kernels.cpu.costs import DEFAULT_COSTS
from tests.support.kernels.way_times import LAST, way_times
from tests.support.simulation.command_runs import run

FOUND = {
    "file": "/cache/loradock/cpu-1.json",
    "error": "",
    "torch": "9.9",
    "seconds": 0.5,
    **report(Calibration(DEFAULT_COSTS, ProductSpeeds(way_times(10.0, {4: 5.0}), 20.0, 30.0))),
}


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Let a process answer in place of the one that measures."""

    own = subprocess.run

    def use(code: str) -> None:
        monkeypatch.setattr(
            subprocess,
            "run",
            lambda command, **options: own([sys.executable, "-c", code], **options),
        )

    return use


def test_the_measurement_is_shown_as_tables_and_as_json(answers: Any) -> None:
    answers(f"print({json.dumps(FOUND)!r})")
    assert json.loads(run("calibrate", "--json").stdout) == json.loads(json.dumps(FOUND))
    shown = run("calibrate").stdout
    lines = [line.split() for line in shown.splitlines()]
    assert ["bfloat16", "20", "us", "bfloat16"] in lines
    assert ["up", "to", "4", "rows", *LAST.split(), "5", "10"] in lines
    assert ["up", "to", "1", "row", "PyTorch", "10", "10"] in lines
    assert "/cache/loradock/cpu-1.json" in shown


def test_constants_that_were_not_stored_are_shown_and_an_error(answers: Any) -> None:
    answers(f"print({json.dumps({**FOUND, 'error': 'Read-only file system: /cache'})!r})")
    result = run("calibrate", "--json")
    assert (result.exit_code, json.loads(result.stdout)["torch"]) == (1, "9.9")
    assert "Read-only" in result.stderr


def test_a_measurement_that_fails_is_one_sentence(
    answers: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers("raise SystemExit('no torch')")
    result = run("calibrate")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "ended with 1: no torch" in result.stderr
    monkeypatch.setattr(calibrate, "_TIMEOUT_S", 0.05)
    answers("import time; time.sleep(60)")
    assert "did not end in 0.05 s" in run("calibrate").stderr


def test_the_module_that_measures_is_there_and_is_not_imported_by_the_command() -> None:
    __import__(calibrate._MODULE)
    code = "import sys; import loradock.cli.calibrate; print('engine' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout == "False\n"
