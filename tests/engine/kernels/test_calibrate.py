"""The report of `loradock calibrate`: what is stored is what later starts read."""

import json
from pathlib import Path

import pytest

from engine.kernels import calibrate
from engine.kernels.cpu import calibration as calibrating
from engine.kernels.cpu.calibration import Calibration, ProductSpeeds
from engine.kernels.cpu.costs import DEFAULT_COSTS, ROWS

SLOW_HALVES = Calibration(DEFAULT_COSTS, ProductSpeeds(10.0, 20.0, 30.0, 9.0))
FAST_BFLOAT16 = Calibration(DEFAULT_COSTS, ProductSpeeds(10.0, 4.0, 30.0, 5.0))


@pytest.mark.parametrize(
    ("measured", "by", "chosen"),
    [
        (SLOW_HALVES, "PyTorch", ["float32", "float32", "float32"]),
        (FAST_BFLOAT16, "oneDNN", ["float32", "bfloat16", "float32"]),
    ],
)
def test_the_report_is_what_the_constants_lead_to(
    measured: Calibration, by: str, chosen: list[str]
) -> None:
    found = calibrate.report(measured)
    assert found["float32_products_by"] == by
    assert list(found["auto_dtype"].items()) == list(
        zip(("float32", "bfloat16", "float16"), chosen, strict=True)
    )
    assert found["products_us"] == measured.products._asdict()
    [shrink, _] = found["costs"]["float32"]["looped"]
    assert len(shrink["weights"]) == len(found["rows"]) == len(ROWS)


def test_a_new_measurement_replaces_the_stored_one(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(calibrating, "measure", lambda: SLOW_HALVES)
    assert calibrating.calibration() == SLOW_HALVES
    monkeypatch.setattr(calibrate, "measure", lambda: FAST_BFLOAT16)
    calibrate.main()
    document = json.loads(capsys.readouterr().out)
    assert (document["error"], Path(document["file"])) == ("", calibrating.stored_at())
    assert calibrating.calibration() == FAST_BFLOAT16


def test_a_directory_that_cannot_be_written_is_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(calibrate, "measure", lambda: SLOW_HALVES)
    calibrate.main()
    assert "directory" in json.loads(capsys.readouterr().out)["error"]
