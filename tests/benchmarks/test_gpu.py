"""The parts of the GPU benchmarks that need no device."""

import json
import re
import subprocess
import sys
from math import inf
from pathlib import Path
from typing import Final

import pytest
import torch
from triton.runtime.errors import OutOfResources, PTXASError

from benchmarks import gpu
from benchmarks.device_layers import (
    Cell,
    ExpertsCell,
    experts_groups_of,
    experts_layer_of,
    groups_of,
    layer_of,
)
from benchmarks.gpu import SANITIZED, SHARED
from benchmarks.gpu_kernels import (
    RANK_8_AMONG_8,
    RANK_8_AMONG_256,
    CellFigures,
    cells,
    check,
    document,
    target_lines,
)
from benchmarks.gpu_lines import append
from benchmarks.tune_kernels import (
    CELLS,
    EXPERTS_CELLS,
    TABLE_FILE,
    best_of,
    candidates,
    check_experts,
    mean_of,
    with_tables,
)
from loradock.engine.kernels import choose_kernels
from loradock.engine.kernels.gpu.tile_configs import (
    EXPERTS_CONFIGS,
    EXPERTS_REGIMES,
    LINEAR_CONFIGS,
    LONG,
    REGIMES,
    SHORT,
    SOURCE,
    ExpandConfig,
    ExpertsConfig,
    experts_regime_of,
    regime_of,
)

CPU = torch.device("cpu")


def test_a_cell_is_a_layer_that_the_kernels_support() -> None:
    cell = Cell(7, 3, (8, 1, 16), 64, idle=(32,))
    layer, groups = layer_of(cell, CPU), groups_of(cell, CPU)
    assert [len(layer.pairs(slot)[0].a) for slot in range(4)] == [8, 1, 16, 32]
    assert [span.slot for span in groups.spans] == [0, 1, 2]
    assert groups.bounds.rank == 32
    x = torch.randn(7, 64, dtype=torch.bfloat16)
    linear = choose_kernels("cpu", "cpu").linear
    check(cell, linear, (x, layer, groups))
    with pytest.raises(AssertionError, match="the relative error is"):
        check(cell, lambda *_: None, (x, layer, groups))


def test_a_cell_of_experts_is_a_layer_that_the_kernels_support() -> None:
    cell = ExpertsCell(6, 2, 4, 5, 2, 32, 24)
    operands = torch.randn(12, 32, dtype=torch.bfloat16), experts_layer_of(cell, CPU)
    operands += (experts_groups_of(cell, CPU),)
    check_experts(cell, choose_kernels("cpu", "cpu").experts, operands)
    with pytest.raises(AssertionError, match="the relative error is"):
        check_experts(cell, lambda *_: None, operands)


def test_bytes_depend_on_the_actual_ranks() -> None:
    assert Cell(1, 1, (8,), 100).bytes_moved == 2 * (8 * 200 + 300)
    assert Cell(2, 2, (8, 128), 100).bytes_moved == 2 * (136 * 200 + 600)
    assert Cell(2, 2, (8, 128), 100).weight_bytes == 2 * 136 * 200


@pytest.mark.parametrize("cell", [Cell(9, 3, (8, 1, 16), 72, (64,)), Cell(2, 2, (5,), 33)])
def test_the_bytes_of_a_cell_are_those_of_its_rows_matrices(cell: Cell) -> None:
    layer, groups = layer_of(cell, CPU), groups_of(cell, CPU)
    pairs = [pair for span in groups.spans for pair in layer.pairs(span.slot) if pair]
    matrices = [matrix for pair in pairs for matrix in pair]
    rows = torch.empty(3, cell.tokens, cell.hidden, dtype=torch.bfloat16)
    assert cell.weight_bytes == sum(matrix.nbytes for matrix in matrices)
    assert cell.bytes_moved == cell.weight_bytes + rows.nbytes


def test_every_specified_cell_is_measured_and_its_adapters_have_rows() -> None:
    found = list(cells())
    assert len(found) == 2 * 4 * (6 + 5 + 3)
    for _, cell in found:
        assert len(groups_of(cell, CPU).spans) == cell.adapters


def test_the_rank_8_cells_differ_only_in_their_idle_slots() -> None:
    small, large = RANK_8_AMONG_8, RANK_8_AMONG_256
    assert large._replace(idle=small.idle) == small
    assert small.bytes_moved == large.bytes_moved
    assert max(large.resident) == 256
    bounds = [groups_of(cell, CPU).bounds for cell in (small, large)]
    assert bounds[1] == bounds[0]._replace(rank=256)


def test_each_regime_is_tuned_on_its_own_batches() -> None:
    assert tuple(CELLS) == REGIMES
    for regime, tuned_on in CELLS.items():
        for cell in tuned_on:
            assert regime_of(groups_of(cell, CPU).bounds, regime == "invariant") == regime, cell
        block_ms = {launch.block_m for launch in candidates(regime, "expand")}
        assert block_ms <= {SHORT, LONG}


def test_each_regime_of_experts_is_tuned_on_its_own_batches() -> None:
    assert tuple(EXPERTS_CELLS) == EXPERTS_REGIMES
    for regime, tuned_on in EXPERTS_CELLS.items():
        for cell in tuned_on:
            bounds = experts_groups_of(cell, CPU).bounds
            assert experts_regime_of(bounds, regime == "invariant") == regime, cell
        for field in ExpertsConfig._fields:
            present = getattr(EXPERTS_CONFIGS[90][regime], field)
            tried = list(candidates(regime, field))
            assert {type(launch) for launch in tried} == {type(present)}
            assert {launch.block_m for launch in tried} == {present.block_m}


def test_the_fastest_launches_are_found_in_turn() -> None:
    def time(config: ExpertsConfig) -> float:
        if config.expand.block_n == 64 and config.shrink.warps == 8:
            return inf
        return config.shrink.splits + config.expand.block_n + config.shrink.warps / 100

    fields = {field: candidates("decode", field) for field in ExpertsConfig._fields}
    best = best_of("a test", EXPERTS_CONFIGS[90]["decode"], fields, time)
    assert (best.shrink.splits, best.shrink.warps, best.expand.block_n) == (1, 4, 64)


def test_a_wrong_result_is_rejected() -> None:
    def works(failure: Exception | None):
        yield 2.0
        if failure is not None:
            raise failure
        yield 8.0

    assert mean_of("a config", works(None)) == pytest.approx(4.0)
    for failure in (AssertionError("an error of 1.0"), OutOfResources(9, 8, "shared"), PTXASError):
        assert mean_of("a config", works(failure)) == inf


def test_writing_the_present_tables_changes_nothing() -> None:
    text = TABLE_FILE.read_text()
    assert with_tables(text, LINEAR_CONFIGS, EXPERTS_CONFIGS, SOURCE) == text
    config = EXPERTS_CONFIGS[90]["decode"]._replace(expand=ExpandConfig(SHORT, 64, 32, 8, 3))
    experts = EXPERTS_CONFIGS | {90: EXPERTS_CONFIGS[90] | {"decode": config}}
    source = SOURCE | {90: "measured on a test"}
    other = with_tables(text, LINEAR_CONFIGS | {90: LINEAR_CONFIGS[80]}, experts, source)
    assert '90: "measured on a test",' in other
    written: dict[str, object] = {}
    exec(compile(other, "tile_configs.py", "exec"), written)
    assert written["EXPERTS_CONFIGS"] == experts
    assert written["LINEAR_CONFIGS"] == LINEAR_CONFIGS | {90: LINEAR_CONFIGS[80]}


def measured(microseconds: float, share: float, hidden: int = 4096, rank: int = 16) -> CellFigures:
    cell = Cell(64, 64, (rank,), hidden)
    sizes = (cell.weight_bytes, cell.bytes_moved)
    return CellFigures(hidden, str(rank), 64, 64, *sizes, microseconds, share, 0.3)


def test_the_document_has_one_line_per_cell() -> None:
    text = document("a device", [measured(9.5, 0.51, rank=8)], 4e12, [9.0, 9.5])
    assert "| 4096 | 8 | 64 | 64 | 8.4 | 9.5 | 51% | 0.30 |" in text
    assert "A copy moves 4.00 TB/s" in text


def test_each_target_is_printed_with_the_measurement() -> None:
    good = target_lines([measured(9.5, 0.4), measured(30.0, 0.6, 8192, 64)], 4.9e12, [9.0, 9.5])
    assert good[0].startswith(
        "64 adapters of rank 16, one row each, hidden 4096: 9.5 us; the bytes"
    )
    # The bytes of this cell take 3.7 us on an H200.
    assert "alone take 3.7." in good[0]
    assert "1 cells with weights of more than 32 MiB" in good[1]
    assert all(line.endswith(", reached.") for line in good)
    bad = target_lines([measured(10.5, 0.4), measured(30.0, 0.4, 8192, 64)], 4.9e12, [9.0, 10.5])
    assert len(bad) == 3
    assert all(line.endswith(", not reached.") for line in bad)


def test_every_operation_is_tested_compiled_and_some_of_its_tests_sanitized() -> None:
    tested = {
        path.removeprefix("tests/engine/kernels/test_").removesuffix(".py") for path in SHARED
    }
    # A base layer's own product is the library's, where that is faster on a CPU.
    operations = set(choose_kernels("cpu", "cpu")._fields) - {"plan_linear", "variant_of"}
    files = {"shrink": "shrink_expand", "expand": "shrink_expand", "attention": "block_attention"}
    assert tested >= {
        re.sub("(shrink|expand|attention)$", lambda found: files[found[0]], name)
        for name in operations
    }
    texts = [(Path(__file__).parents[2] / path).read_text() for path in SHARED]
    for part in SANITIZED:
        assert any(re.search(rf"def test_\w*{part}", text) for text in texts), part
    for name in ("linear", "shrink_expand", "embedding", "experts", "experts_shrink_expand"):
        (path,) = (path for path in SHARED if path.endswith(f"test_{name}.py"))
        text = (Path(__file__).parents[2] / path).read_text()
        assert any(re.search(rf"def test_\w*{part}", text) for part in SANITIZED), path


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[tuple[list[str], float]]:
    """A device on paper, with its figures in `tmp_path`; return the commands and their limits."""
    ran: list[tuple[list[str], float]] = []

    def run(
        command: list[str], timeout: float, **_options: object
    ) -> subprocess.CompletedProcess[bytes]:
        ran.append((command, timeout))
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "A Card 80GB")
    monkeypatch.setattr(gpu.shutil, "which", lambda name, path: f"/tools/{name}")
    monkeypatch.setattr(gpu.subprocess, "run", run)
    monkeypatch.setenv("LORADOCK_GPU_FIGURES", str(tmp_path))
    return ran


@pytest.mark.parametrize("failing", [set(), {0}, {2, 6}])
def test_every_stage_runs_within_its_limit_even_after_a_failure(
    card: list[tuple[list[str], float]],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    failing: set[int],
) -> None:
    succeed = gpu.subprocess.run

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[bytes]:
        succeed(command, **options)
        index = len(card) - 1
        if index == 6 and index in failing:
            raise subprocess.TimeoutExpired(command, options["timeout"])
        return subprocess.CompletedProcess(command, 7 + index if index in failing else 0)

    monkeypatch.setattr(gpu.subprocess, "run", run)
    assert gpu.main([]) == (7 + min(failing) if failing else 0)
    assert len(card) == 8
    limits = [stage.limit_s for stage in gpu.stages().values() for _ in stage.commands]
    assert all(limit <= most for (_, limit), most in zip(card, limits, strict=True))
    assert max(limits) < 600
    commands = [command for command, _ in card]
    assert [command[2] for command in commands if command[0].startswith("/tools")] == [*gpu.TOOLS]
    assert {*gpu.marked_files()} < {*commands[4]}
    assert capsys.readouterr().out.count("\nstatus ") == len(failing)


def test_the_last_run_of_each_stage_is_kept_also_if_it_was_ended(
    card: list[tuple[list[str], float]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def run(command: list[str], **_options: object) -> subprocess.CompletedProcess[bytes]:
        append("smoke", figure=len(command))
        raise subprocess.TimeoutExpired(command, 1.0)

    assert gpu.main(["smoke"]) == 0
    monkeypatch.setattr(gpu.subprocess, "run", run)
    for _ in range(2):
        assert gpu.main(["smoke"]) == gpu.ENDED
    (lines,) = json.loads((tmp_path / "gpu-a-card-80gb.json").read_text()).values()
    assert [line.get("figure") for line in lines] == [None, 3, None]
    assert lines[-1]["statuses"] == [gpu.ENDED]


def test_a_stage_that_does_not_exist_is_refused(
    card: list[tuple[list[str], float]], capsys: pytest.CaptureFixture[str]
) -> None:
    assert gpu.main(["smoke", "steps"]) == 2
    assert "stages must be among smoke, step, kernels, tune, tests, got steps" in (
        capsys.readouterr().out
    )
    assert not card


KERNELS_ALONE: Final = ("gpu", "gpu_kernels", "tune_kernels")
WITH_ENGINE: Final = ("gpu_smoke", "gpu_step")
CARRIED: Final = ("msgspec", "structlog", "re2", "transformers")
"""Libraries of the engine that are carried to a bare GPU machine; see benchmarks/README.md."""

ABSENT: Final = (
    *("zmq", "transitions", "caio", "httptools", "starlette", "uvicorn", "httpx", "openai"),
    *("llguidance", "opentelemetry", "tensorizer", "llguidance", "accelerate", "torchao"),
)


@pytest.mark.parametrize(
    ("modules", "absent"), [(KERNELS_ALONE, (*ABSENT, *CARRIED)), (WITH_ENGINE, ABSENT)]
)
def test_a_stage_needs_only_what_is_on_a_bare_machine_or_carried(
    modules: tuple[str, ...], absent: tuple[str, ...]
) -> None:
    script = (
        "import sys\n"
        f"sys.modules.update(dict.fromkeys({absent}))\n"
        f"import {', '.join(f'benchmarks.{name}' for name in modules)}\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
