"""Expert tensors: what they adapt, and every way in which they can contradict the model."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import ModuleKind, ModuleShape, ParameterRows, Shard
from tests.support.models.expert_adapters import (
    DOWN,
    GATE_UP,
    fused_tensors,
    pair_for,
    per_expert,
    write,
)
from tests.support.models.expert_examples import EXPERTS, HIDDEN, INTER

RANK = 2
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
EXPERT_PATHS = [f"model.layers.{layer}.mlp.experts" for layer in range(2)]


def expert_shape(
    path: str, name: str, out_features: int, parameter_rows: range | None
) -> ModuleShape:
    is_down = name == "down_proj"
    return ModuleShape(
        f"{path}.{name}",
        INTER if is_down else HIDDEN,
        out_features,
        0,
        kind=ModuleKind.EXPERTS,
        experts=EXPERTS,
        parameter_rows=None
        if parameter_rows is None
        else ParameterRows(f"{path}.gate_up_proj", parameter_rows),
    )


def shapes(*, is_mixed: bool = False, is_interleaved: bool = False) -> dict[str, ModuleShape]:
    """Return the shapes of two layers with experts and a router each."""
    found: list[ModuleShape] = []
    for path in EXPERT_PATHS:
        if is_mixed:
            rows = range(2 * INTER)
            parts = (rows[::2], rows[1::2]) if is_interleaved else (rows[:INTER], rows[INTER:])
            found += [
                expert_shape(path, name, INTER, part)
                for name, part in zip(("gate_proj", "up_proj"), parts, strict=True)
            ]
        else:
            found.append(expert_shape(path, "gate_up_proj", 2 * INTER, None))
        found.append(expert_shape(path, "down_proj", HIDDEN, None))
        found.append(ModuleShape(path.replace("experts", "gate"), HIDDEN, EXPERTS, 0))
    return {shape.name: shape for shape in found}


def gate_up(path: str) -> dict[str, Tensor]:
    return fused_tensors(path, HIDDEN, 2 * INTER)


def down(path: str) -> dict[str, Tensor]:
    return fused_tensors(path, INTER, HIDDEN)


def read(
    root: Path,
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, ModuleShape],
    *,
    is_follower: bool = False,
    **fields: object,
) -> LoadedAdapter:
    write(root / "one", tensors, {"r": RANK, **fields})
    config = LoRAConfig(max_lora_rank=16, lora_dtype="float32")
    return read_adapter("one", [root], AdapterTarget(modules, config), is_follower=is_follower)


def refusal(
    root: Path,
    tensors: Mapping[str, Tensor],
    modules: Mapping[str, ModuleShape],
    **fields: object,
) -> str:
    with pytest.raises(AdapterDoesNotFit) as error:
        read(root, tensors, modules, **fields)
    return str(error.value)


def stacks(a: Tensor, b: Tensor, rank: int = RANK) -> tuple[Tensor, Tensor]:
    """Return each expert's A and B as in PEFT."""
    by_expert = b.reshape(len(b), rank, EXPERTS)
    return a.reshape(EXPERTS, rank, -1), torch.stack([by_expert[..., e] for e in range(EXPERTS)])


def test_with_both_adapted_gate_up_is_the_inner_one(tmp_path: Path) -> None:
    path = EXPERT_PATHS[0]
    inner, outer = gate_up(f"{path}.base_layer"), down(path)
    loaded = read(tmp_path, inner | outer, shapes(), target_parameters=[DOWN, GATE_UP])
    for name, tensors in {"gate_up_proj": inner, "down_proj": outer}.items():
        lora = loaded.model.loras[f"{path}.{name}"]
        a, b = stacks(*tensors.values())
        assert torch.equal(lora.lora_a, a)
        assert torch.equal(lora.lora_b, b)
        assert (lora.rank, lora.scaling) == (RANK, 3)


@pytest.mark.parametrize("target", [GATE_UP, DOWN])
def test_one_adapted_parameter_has_the_plain_name(target: str, tmp_path: Path) -> None:
    make = {GATE_UP: gate_up, DOWN: down}[target]
    tensors = make(EXPERT_PATHS[1])
    loaded = read(tmp_path, tensors, shapes(), target_parameters=[target])
    assert list(loaded.model.loras) == [f"{EXPERT_PATHS[1]}.{target.rpartition('.')[2]}"]


def test_the_target_decides_even_where_both_would_fit(tmp_path: Path) -> None:
    # Equal inner and outer widths, so that shapes alone can't distinguish up from down.
    path = EXPERT_PATHS[0]
    square = {
        f"{path}.{name}": ModuleShape(
            f"{path}.{name}", HIDDEN, HIDDEN, 0, kind=ModuleKind.EXPERTS, experts=EXPERTS
        )
        for name in ("up_proj", "down_proj")
    }
    tensors = fused_tensors(path, HIDDEN, HIDDEN)
    for name in ("up_proj", "down_proj"):
        loaded = read(tmp_path, tensors, square, target_parameters=[f"experts.{name}"])
        assert list(loaded.model.loras) == [f"{path}.{name}"]
    assert "must name the one that is adapted" in refusal(
        tmp_path, tensors, square, target_modules=["experts"]
    )


def test_without_targets_the_shapes_decide(tmp_path: Path) -> None:
    loaded = read(tmp_path, gate_up(EXPERT_PATHS[0]), shapes(), target_modules=["experts"])
    assert list(loaded.model.loras) == [f"{EXPERT_PATHS[0]}.gate_up_proj"]


def test_a_target_with_the_tensor_of_the_other_is_refused(tmp_path: Path) -> None:
    text = refusal(tmp_path, gate_up(EXPERT_PATHS[0]), shapes(), target_parameters=[DOWN])
    assert f"{EXPERT_PATHS[0]}.down_proj has A [8, 32] and B [48, 8]" in text


def test_one_tensor_for_two_targets_is_incomplete(tmp_path: Path) -> None:
    text = refusal(tmp_path, down(EXPERT_PATHS[0]), shapes(), target_parameters=[DOWN, GATE_UP])
    assert "must name the one that is adapted" in text


def test_a_target_without_a_tensor_is_incomplete(tmp_path: Path) -> None:
    tensors = gate_up(f"{EXPERT_PATHS[0]}.base_layer") | down(EXPERT_PATHS[0])
    targets = [DOWN, GATE_UP, "mlp.gate.weight"]
    text = refusal(tmp_path, tensors, shapes(), target_parameters=targets)
    assert "target_parameters names 'mlp.gate.weight'; no tensor is for it" in text


@pytest.mark.parametrize("is_interleaved", [False, True])
def test_mixed_mode_splits_a_fused_pair_and_shares_its_a(
    is_interleaved: bool, tmp_path: Path
) -> None:
    path = EXPERT_PATHS[0]
    tensors = gate_up(path)
    modules = shapes(is_mixed=True, is_interleaved=is_interleaved)
    loras = read(tmp_path, tensors, modules, target_parameters=[GATE_UP]).model.loras
    a, b = stacks(*tensors.values())
    halves = (b[:, ::2], b[:, 1::2]) if is_interleaved else b.split(INTER, dim=1)
    for name, half in zip(("gate_proj", "up_proj"), halves, strict=True):
        assert torch.equal(loras[f"{path}.{name}"].lora_a, a)
        assert torch.equal(loras[f"{path}.{name}"].lora_b, half)


def test_adapters_per_expert_are_stacked(tmp_path: Path) -> None:
    tensors = per_expert("mixtral", RANK)
    loaded = read(tmp_path, tensors, shapes(is_mixed=True), target_modules=["w1", "w2", "w3"])
    assert len(loaded.model.loras) == 6
    older = "base_model.model.model.layers.1.block_sparse_moe.experts"
    lora = loaded.model.loras[f"{EXPERT_PATHS[1]}.down_proj"]
    for expert in range(EXPERTS):
        name = f"{older}.{expert}.w2"
        assert torch.equal(lora.lora_a[expert], tensors[f"{name}.lora_A.weight"])
        assert torch.equal(lora.lora_b[expert], tensors[f"{name}.lora_B.weight"])


def test_a_pattern_may_select_single_experts(tmp_path: Path) -> None:
    tensors = pair_for(f"{EXPERT_PATHS[0]}.2.gate_proj", is_down=False, rank=RANK)
    modules = shapes(is_mixed=True)
    loaded = read(tmp_path, tensors, modules, target_modules=r".*experts\.2\.gate_proj")
    lora = loaded.model.loras[f"{EXPERT_PATHS[0]}.gate_proj"]
    assert torch.equal(lora.lora_a[2], next(iter(tensors.values())))
    assert not lora.lora_a[[0, 1, 3]].any()
    text = refusal(tmp_path, tensors, modules, target_modules=["gate_proj"])
    assert "lacks gate_proj of 3 experts" in text


REFUSED = {
    "an unknown projection": (
        pair_for(f"{EXPERT_PATHS[0]}.1.gate", is_down=False, rank=RANK),
        False,
        "none of the projections of these experts, which are gate_up_proj, down_proj",
    ),
    "an expert too many": (
        pair_for(f"{EXPERT_PATHS[0]}.4.down_proj", is_down=True, rank=RANK),
        True,
        "this model has 4 experts",
    ),
    "both formats in one": (
        pair_for(f"{EXPERT_PATHS[0]}.1.down_proj", is_down=True, rank=RANK)
        | gate_up(EXPERT_PATHS[0]),
        True,
        "use one of the formats",
    ),
    "another width": (
        pair_for(f"{EXPERT_PATHS[0]}.1.gate_proj", is_down=True, rank=RANK),
        True,
        "in this model it has 32 inputs and 24 outputs",
    ),
    "another rank": (
        fused_tensors(EXPERT_PATHS[0], INTER, HIDDEN, rank=3),
        True,
        "the config specifies rank 2 for each of 4 experts",
    ),
    "no B": (
        dict(list(down(EXPERT_PATHS[0]).items())[:1]),
        True,
        "has no matching lora_B",
    ),
    "ranks that differ": (
        pair_for(f"{EXPERT_PATHS[0]}.0.up_proj", is_down=False, rank=RANK)
        | pair_for(f"{EXPERT_PATHS[0]}.1.up_proj", is_down=False, rank=3),
        True,
        "all experts of one projection need the same",
    ),
    "experts that are not there": (
        down("model.layers.7.mlp.experts"),
        True,
        "tensors of experts that are not wrapped in this model",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_tensors_that_do_not_fit_are_refused_with_the_reason(case: str, tmp_path: Path) -> None:
    tensors, is_mixed, text = REFUSED[case]
    fields = {"target_modules": ".*", "rank_pattern": {r"experts\.1\.up_proj": 3}}
    assert text in refusal(tmp_path, tensors, shapes(is_mixed=is_mixed), **fields)


@pytest.mark.parametrize(
    ("second", "outer"),
    [
        ("mlp.experts.0.w1", INTER),
        ("mlp.experts.00.gate_proj", INTER),
        ("block_sparse_moe.experts.0.gate_proj", INTER),
        ("block_sparse_moe.gate", EXPERTS),
    ],
)
def test_two_pairs_for_one_matrix_are_refused(second: str, outer: int, tmp_path: Path) -> None:
    tensors = per_expert("qwen3_moe", RANK)
    for path, height in (("mlp.gate", EXPERTS), (second, outer)):
        name = f"base_model.model.model.layers.0.{path}"
        tensors[f"{name}.lora_A.weight"] = torch.randn(RANK, HIDDEN)
        tensors[f"{name}.lora_B.weight"] = torch.randn(height, RANK)
    with pytest.raises(AdapterDoesNotFit, match="the same as"):
        read(tmp_path, tensors, shapes(is_mixed=True), target_modules=list(PROJECTIONS))


def test_a_parameters_rank_is_found_under_its_own_name(tmp_path: Path) -> None:
    path = EXPERT_PATHS[0]
    tensors = fused_tensors(f"{path}.base_layer", HIDDEN, 2 * INTER, rank=3) | down(path)
    fields = {
        "target_parameters": [GATE_UP, DOWN],
        "rank_pattern": {".*gate_up_proj": 3},
        "alpha_pattern": {".*gate_up_proj": 12},
    }
    loras = read(tmp_path, tensors, shapes(), **fields).model.loras
    assert (loras[f"{path}.gate_up_proj"].rank, loras[f"{path}.gate_up_proj"].scaling) == (3, 4)
    assert (loras[f"{path}.down_proj"].rank, loras[f"{path}.down_proj"].scaling) == (2, 3)


def on_rank(modules: Mapping[str, ModuleShape], kept: range) -> dict[str, ModuleShape]:
    """Return the same modules on a rank that keeps these experts."""
    return {
        name: replace(shape, shard=Shard(experts=kept))
        if shape.kind is ModuleKind.EXPERTS
        else shape
        for name, shape in modules.items()
    }


def test_a_rank_reads_nothing_of_other_ranks_experts(tmp_path: Path) -> None:
    kept = range(2, EXPERTS)
    modules = on_rank(shapes(is_mixed=True), kept)
    tensors = per_expert("qwen3_moe", RANK)
    for name in tensors:
        if any(f".experts.{expert}." in name for expert in range(kept.start)):
            # A reader of these values would refuse them.
            tensors[name] = torch.full_like(tensors[name], torch.nan)
    targets = ["gate_proj", "up_proj", "down_proj"]
    loras = read(tmp_path, tensors, modules, is_follower=True, target_modules=targets).model.loras
    assert len(loras) == 6
    for expert in kept:
        a = tensors[f"base_model.model.{EXPERT_PATHS[0]}.{expert}.up_proj.lora_A.weight"]
        stack = loras[f"{EXPERT_PATHS[0]}.up_proj"].lora_a
        assert len(stack) == len(kept)
        assert torch.equal(stack[expert - kept.start], a)


def test_a_rank_keeps_its_experts_of_fused_tensors(tmp_path: Path) -> None:
    kept, path = range(1, 3), EXPERT_PATHS[0]
    tensors = gate_up(path)
    # A is stored expert by expert, so the rows of other experts are not read.
    a_name, b_name = tensors
    tensors[a_name][: kept.start * RANK] = torch.nan
    loras = read(
        tmp_path, tensors, on_rank(shapes(), kept), is_follower=True, target_parameters=[GATE_UP]
    ).model.loras
    a, b = stacks(tensors[a_name], tensors[b_name])
    lora = loras[f"{path}.gate_up_proj"]
    assert torch.equal(lora.lora_a, a[kept.start : kept.stop])
    assert torch.equal(lora.lora_b, b[kept.start : kept.stop])
