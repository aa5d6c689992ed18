"""Properties of adapters in memory: pairs can be multiplied, scaling is applied once."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.engine.adapters import (
    LoRALayerWeights,
    LoRAModel,
    LoRARequest,
    PackedLoRALayerWeights,
    PEFTHelper,
)
from loradock.engine.errors import (
    AdapterConfigRefused,
    AdapterDoesNotFit,
    NotFinite,
    PathNotAllowed,
)
from tests.support.engine.adapter_examples import CONFIG, Q, V, key, pair, tensors, write

HELPER = PEFTHelper.from_dict(CONFIG)


def layer(b: torch.Tensor, scaling: float) -> LoRALayerWeights:
    return LoRALayerWeights("m", b.shape[1], 1.0, torch.ones(b.shape[1], 3), b, scaling)


@settings(max_examples=100)
@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.floats(0.01, 50) | st.floats(-50, -0.01),
    st.integers(0, 2**32),
)
def test_optimizing_applies_the_scaling_once(dtype: torch.dtype, scaling: float, seed: int) -> None:
    b = torch.randn(5, 2, generator=torch.Generator().manual_seed(seed)).to(dtype)
    original = b.clone()
    lora = layer(b, scaling)
    assert lora.optimize() is lora
    once = lora.lora_b
    assert once.dtype == dtype
    assert torch.equal(once, (original.float() * scaling).to(dtype))
    assert lora.scaling == 1
    assert lora.optimize().lora_b is once
    assert torch.equal(b, original), "the caller's tensor was changed"


@pytest.mark.parametrize(
    ("a", "b"), [((3, 4), (5, 2)), ((2, 4), (5, 3)), ((2,), (5, 2)), ((0, 4), (5, 0))]
)
def test_a_pair_that_can_not_be_multiplied_is_refused(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    with pytest.raises(AdapterDoesNotFit, match="rank 2"):
        LoRALayerWeights("m", 2, 4.0, torch.ones(a), torch.ones(b))


def test_the_default_scaling_is_alpha_over_rank() -> None:
    lora = LoRALayerWeights("m", 2, 5.0, torch.ones(2, 4), torch.ones(3, 2))
    assert (lora.scaling, lora.size_bytes) == (2.5, 56)


def test_packed_weights_have_one_entry_per_child() -> None:
    q, v = (layer(torch.full((5, rank), float(rank)), 2.0) for rank in (2, 3))
    packed = PackedLoRALayerWeights.pack([q, None, v])
    assert (packed.rank, packed.scaling) == (3, [2.0, None, 2.0])
    assert packed.lora_a == [q.lora_a, None, v.lora_a]
    assert packed.size_bytes == q.size_bytes + v.size_bytes
    assert packed.optimize().scaling == [1.0, None, 1.0]
    found = [None if b is None else b[0, 0].item() for b in packed.lora_b]
    assert found == [4.0, None, 6.0]
    assert (packed.module_name, packed.is_packed, q.is_packed) == ("m", True, False)
    assert PackedLoRALayerWeights.pack([q, v], "qkv").module_name == "qkv"
    with pytest.raises(ValueError, match="touches no child of the packed layer"):
        PackedLoRALayerWeights.pack([None, None])


def test_a_config_is_made_of_three_values() -> None:
    """As a program writes it that has no files; lists and dicts are those of a config."""
    helper = PEFTHelper(r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
    assert (helper.of_module(Q).scaling, helper.target_modules) == (2.0, ("q_proj", "v_proj"))
    assert LoRAModel.from_lora_tensors(1, tensors(), helper).loras[Q].scaling == 2
    patterns = PEFTHelper(
        r=4, lora_alpha=8, target_modules="all-linear", rank_pattern={"q_proj": 2}, use_rslora=True
    )
    assert (patterns.of_module(Q).rank, patterns.of_module(V).rank) == (2, 4)
    assert (
        PEFTHelper(r=4, lora_alpha=8, target_modules=[], modules_to_save=None).of_module(V).scaling
        == 2
    )
    for values in ({"r": 0}, {"r": "4"}, {"lora_alpha": 0}):
        with pytest.raises(AdapterConfigRefused):
            PEFTHelper(**({"r": 4, "lora_alpha": 8, "target_modules": ["q_proj"]} | values))


def single_experts(is_gated: bool = True) -> dict[str, LoRALayerWeights]:
    """Return the weights of four experts by path, with different scalings."""
    names = ("gate_proj", "down_proj", "up_proj") if is_gated else ("up_proj", "down_proj")
    return {
        f"experts.{expert}.{name}": LoRALayerWeights(
            f"experts.{expert}.{name}", 2, 1.0 + expert, torch.randn(2, 6), torch.randn(5, 2)
        )
        for expert in range(4)
        for name in names
    }


def test_experts_are_packed_by_projection() -> None:
    singles = single_experts()
    packed = PackedLoRALayerWeights.pack_moe(list(singles.values()), "experts")
    names = ("gate_proj", "down_proj", "up_proj")
    assert [lora.module_name for lora in packed.loras] == [f"experts.{name}" for name in names]
    assert [list(a.shape) for a in packed.lora_a] == [[4, 2, 6]] * 3
    for name, lora in zip(names, packed.loras, strict=True):
        for expert in range(4):
            single = singles[f"experts.{expert}.{name}"]
            delta = lora.scaling * lora.lora_b[expert] @ lora.lora_a[expert]
            assert torch.allclose(delta, single.scaling * single.lora_b @ single.lora_a)
            assert single.scaling == (1 + expert) / 2, "what was passed is not changed"


def test_experts_without_a_gate_have_two_slices() -> None:
    singles = list(single_experts(is_gated=False).values())
    loras = [one for pair in zip(singles[::2], singles[1::2], strict=True) for one in (*pair, None)]
    packed = PackedLoRALayerWeights.pack_moe(loras, "experts", is_non_gated_moe=True)
    assert [lora and lora.module_name for lora in packed.loras] == [
        "experts.up_proj",
        "experts.down_proj",
        None,
    ]
    with pytest.raises(ValueError, match="without up_proj"):
        PackedLoRALayerWeights.pack_moe(loras, "experts")
    with pytest.raises(ValueError, match="got 4 weights"):
        PackedLoRALayerWeights.pack_moe(loras[:4], "experts")
    loras[1] = layer(torch.ones(5, 3), 1.0)
    with pytest.raises(AdapterDoesNotFit, match="differ in rank"):
        PackedLoRALayerWeights.pack_moe(loras, "experts", is_non_gated_moe=True)


def test_weights_for_warming_up_have_the_sizes_of_the_module() -> None:
    weights = LoRALayerWeights.create_dummy_lora_weights("m", 3, 5, 2, torch.bfloat16, "cpu")
    assert (weights.input_dim, weights.output_dim, weights.rank) == (3, 5, 2)
    assert not weights.lora_a.any()
    assert not weights.lora_b.any()


def test_a_clone_shares_tensors_under_another_id() -> None:
    model = LoRAModel.from_lora_tensors(1, tensors(), HELPER)
    other = model.clone(7)
    assert (other.id, other.rank) == (7, 4)
    assert other.loras[Q].lora_a is model.loras[Q].lora_a
    del other.loras[Q]
    assert model.check_lora_name(Q)
    assert not other.check_lora_name(Q)
    assert other.get_lora(Q) is None
    with pytest.raises(ValueError, match="at least 1"):
        model.clone(0)


def test_tensors_in_memory_are_shared_unless_they_must_change() -> None:
    given_tensors = tensors()
    shared = LoRAModel.from_lora_tensors(3, given_tensors, HELPER)
    assert shared.loras[Q].lora_a is given_tensors[key(Q, "A")]
    rounded = LoRAModel.from_lora_tensors(3, given_tensors, HELPER, dtype=torch.bfloat16)
    assert rounded.loras[Q].lora_a.dtype == torch.bfloat16
    assert rounded.loras[V].scaling == 2


def test_tensors_in_memory_are_checked_like_files() -> None:
    for weights, kind in {
        "no B": (tensors(q_B=None), AdapterDoesNotFit),
        "rank": (pair(Q, rank=3), AdapterDoesNotFit),
        "name": (tensors() | {"x": torch.ones(1)}, AdapterDoesNotFit),
        "NaN": (tensors(q_A=torch.full((4, 16), torch.nan)), NotFinite),
    }.values():
        with pytest.raises(kind):
            LoRAModel.from_lora_tensors(1, weights, HELPER)
    far = tensors(q_B=torch.full((16, 4), 40_000.0))
    assert LoRAModel.from_lora_tensors(1, far, HELPER).loras
    with pytest.raises(NotFinite, match="float16"):
        LoRAModel.from_lora_tensors(1, far, HELPER, dtype=torch.float16)


def test_a_checkpoint_is_renamed_and_prefixes_are_skipped(tmp_path: Path) -> None:
    extra = {"base_model.model.mtp.x.lora_A.weight": torch.ones(4, 3)}
    config = {**CONFIG, "rank_pattern": {"q_proj": 2}}
    directory = write(tmp_path / "a", config=config, weights=pair(Q, rank=2) | pair(V) | extra)
    helper = PEFTHelper.from_local_dir(str(directory))
    model = LoRAModel.from_local_checkpoint(
        str(directory),
        {"query", V.replace("v_proj", "value")},
        helper,
        lora_model_id=9,
        weights_mapper=lambda name: name.replace("q_proj", "query").replace("v_proj", "value"),
        skip_prefixes=["mtp."],
    )
    assert model.id == 9
    assert model.loras.keys() == {Q.replace("q_proj", "query"), V.replace("v_proj", "value")}
    assert model.loras[Q.replace("q_proj", "query")].rank == 2
    assert model.rank == 4


def test_a_checkpoint_with_other_modules_or_links_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path / "a")
    for expected in ({"q_proj"}, {"proj", "v_proj"}, {"attn.q_proj"}, set[str]()):
        with pytest.raises(AdapterDoesNotFit, match="not among the expected modules"):
            LoRAModel.from_local_checkpoint(str(directory), expected, HELPER)
    assert LoRAModel.from_local_checkpoint(str(directory), {"q_proj", "attn.v_proj"}, HELPER).loras
    (directory / "adapter_config.json").rename(tmp_path / "config")
    (directory / "adapter_config.json").symlink_to(tmp_path / "config")
    with pytest.raises(PathNotAllowed):
        LoRAModel.from_local_checkpoint(str(directory), {"q_proj", "v_proj"}, HELPER)


def test_a_request_names_an_adapter() -> None:
    request = LoRARequest("name", 1, "/path")
    assert (request.lora_int_id, request.base_model_name) == (1, None)
    assert (request.load_inplace, request.is_3d_lora_weight) == (False, False)
    for name, number in (("name", 0), ("name", -1), ("name", True), ("name", 1.5), ("", 1)):
        with pytest.raises(ValueError, match="lora_"):
            LoRARequest(name, number)


def test_load_inplace_is_cleared_once_loaded() -> None:
    request = LoRARequest("name", 1, "/path", load_inplace=True)
    assert request.loaded() == LoRARequest("name", 1, "/path")
    assert request.loaded().loaded() == request.loaded()
    with pytest.raises(ValueError, match="lora_path"):
        LoRARequest("name", 1, load_inplace=True)


def test_stacks_of_experts_are_refused_with_their_own_shapes() -> None:
    module = "model.layers.0.mlp.experts.gate_up_proj"
    stacks = {key(module, "A"): torch.ones(3, 4, 16), key(module, "B"): torch.ones(3, 8, 4)}
    with pytest.raises(AdapterDoesNotFit, match=r"A \[3, 4, 16\] and B \[3, 8, 4\]; .* rank 4"):
        LoRAModel.from_lora_tensors(1, stacks, HELPER)


def test_without_a_model_nothing_is_said_about_what_it_wraps() -> None:
    module = "model.layers.0.mlp.experts"
    fused = {key(module, "A"): torch.ones(12, 16), key(module, "B"): torch.ones(8, 12)}
    with pytest.raises(AdapterDoesNotFit, match="pass model=") as caught:
        LoRAModel.from_lora_tensors(1, fused, HELPER)
    assert "wrapped" not in str(caught.value).partition("pass model=")[0]
    assert "unexpected" not in str(caught.value)
