"""The report of `loradock calibrate`: what is stored is what later starts read."""

import json
from pathlib import Path

import pytest

from loradock.engine.kernels import calibrate
from loradock.engine.kernels.cpu import base_linear
from loradock.engine.kernels.cpu import calibration as calibrating
from loradock.engine.kernels.cpu.calibration import Calibration, ProductSpeeds
from loradock.engine.kernels.cpu.costs import DEFAULT_COSTS, ROWS
from tests.support.kernels.way_times import LAST, way_times

SLOW_HALVES = Calibration(DEFAULT_COSTS, ProductSpeeds(way_times(10.0), 40.0, 60.0))
FAST_BFLOAT16 = Calibration(DEFAULT_COSTS, ProductSpeeds(way_times(10.0, {16: 5.0}), 8.0, 60.0))


@pytest.mark.parametrize(
    ("measured", "ways", "chosen"),
    [
        (SLOW_HALVES, ["PyTorch"] * 5, ["float32", "float32", "float32"]),
        (
            FAST_BFLOAT16,
            ["PyTorch", "PyTorch", LAST, "PyTorch", "PyTorch"],
            ["float32", "bfloat16", "float32"],
        ),
    ],
)
def test_the_report_is_what_the_constants_lead_to(
    measured: Calibration, ways: list[str], chosen: list[str]
) -> None:
    found = calibrate.report(measured)
    assert [one["way"] for one in found["float32_products"]] == ways
    assert [one["rows"] for one in found["float32_products"]] == list(base_linear.ROWS)
    assert [one["us"]["PyTorch"] for one in found["float32_products"]] == [10.0] * 5
    assert list(found["auto_dtype"].items()) == list(
        zip(("float32", "bfloat16", "float16"), chosen, strict=True)
    )
    speeds = measured.products
    assert found["products_us"] == {
        "float32": 20.0 if measured is SLOW_HALVES else 15.0,
        "bfloat16": speeds.bfloat16,
        "float16": speeds.float16,
    }
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
