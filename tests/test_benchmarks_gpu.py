"""What the device's benchmarks rest on, as far as it needs no device."""

import pytest
import torch

from benchmarks.device_layers import Cell, groups_of, layer_of
from benchmarks.gpu_kernels import Measured, cells, check, document
from benchmarks.tune_kernels import CELLS, TABLE_FILE, candidates, with_table
from engine.kernels import choose_kernels
from engine.kernels.gpu.plans import LONG, PLANS, REGIMES, SHORT, SOURCE, regime_of

CPU = torch.device("cpu")


def test_a_cell_is_a_layer_that_the_kernels_take() -> None:
    cell = Cell(7, 3, (8, 1, 16), 64)
    layer, groups = layer_of(cell, CPU), groups_of(cell, CPU, 16)
    assert [len(layer.pairs(slot)[0].a) for slot in range(3)] == [8, 1, 16]
    assert [span.slot for span in groups.spans] == [0, 1, 2]
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    linear = choose_kernels("cpu", "cpu").linear
    check(cell, linear, (x, layer, groups))
    with pytest.raises(AssertionError, match="an error of"):
        check(cell, lambda *_: None, (x, layer, groups))


def test_bytes_follow_the_true_ranks() -> None:
    assert Cell(1, 1, (8,), 100).bytes_moved == 2 * (8 * 200 + 300)
    assert Cell(2, 2, (8, 128), 100).bytes_moved == 2 * (136 * 200 + 600)


def test_every_adapter_of_a_cell_has_a_row() -> None:
    for _, cell in cells():
        spans = groups_of(cell, CPU, 128).spans
        assert len(spans) == cell.adapters


def test_each_regime_is_tuned_on_batches_that_meet_it() -> None:
    assert tuple(CELLS) == REGIMES
    for regime, tuned_on in CELLS.items():
        for cell in tuned_on:
            bounds = groups_of(cell, CPU, 128).bounds
            assert regime_of(bounds, regime == "invariant") == regime, cell
        heights = {launch.height for launch in candidates(regime, "expand")}
        assert heights <= {SHORT, LONG}


def test_writing_the_present_table_changes_nothing() -> None:
    text = TABLE_FILE.read_text()
    assert with_table(text, PLANS, SOURCE) == text
    other = with_table(text, PLANS | {90: PLANS[80]}, SOURCE | {90: "measured on a test"})
    assert other != text
    assert '90: "measured on a test",' in other


def test_the_document_has_a_line_a_cell() -> None:
    told = document("a device", [Measured(4096, "8", 8, 64, 9.5, 0.51, 0.3)], 4e12, [9.0, 9.5])
    assert "| 4096 | 8 | 8 | 64 | 9.5 | 51% | 0.30 |" in told
    assert "9.0 us among slots of 8, 9.5 us among slots of 256" in told
