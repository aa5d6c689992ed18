"""Adapters in every form in which a program may load them: shards, mappers, ids, experts."""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from loradock.engine.adapters import (
    LoRAModel,
    LoRARequest,
    MoEEPLoadSpec,
    PEFTHelper,
    WeightsMapper,
    get_adapter_absolute_path,
)
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.errors import AdapterDoesNotFit, AdapterNotFound, AdapterUnsound
from loradock.engine.layout import ModuleKind, ModuleShape
from tests.support.engine.adapter_examples import (
    CONFIG,
    LORA_CONFIG,
    Q,
    V,
    pair,
    tensors,
    write,
)

HELPER = PEFTHelper.from_dict(CONFIG)
EXPECTED = {"q_proj", "v_proj"}
WEIGHTS = "adapter_model.safetensors"
EXPERTS = "model.layers.0.mlp.experts"


def load(directory: Path, **options: object) -> LoRAModel:
    return LoRAModel.from_local_checkpoint(str(directory), EXPECTED, HELPER, **options)


def split(directory: Path, names: tuple[str, str]) -> dict[str, str]:
    """Write an adapter whose two modules are in two files; return the file of each tensor."""
    write(directory)
    (directory / WEIGHTS).unlink()
    found: dict[str, str] = {}
    for module, name in zip((Q, V), names, strict=True):
        part = pair(module)
        save_file(part, directory / name)
        found |= dict.fromkeys(part, name)
    return found


def assert_same(found: LoRAModel, whole: LoRAModel) -> None:
    assert found.loras.keys() == whole.loras.keys()
    for name, lora in whole.loras.items():
        assert torch.equal(found.loras[name].lora_a, lora.lora_a)
        assert torch.equal(found.loras[name].lora_b, lora.lora_b)


SHARDS = ("adapter_model-00001-of-00002.safetensors", "adapter_model-00002-of-00002.safetensors")


def test_shards_are_one_adapter(tmp_path: Path) -> None:
    whole = load(write(tmp_path / "whole"))
    split(tmp_path / "numbered", SHARDS)
    assert_same(load(tmp_path / "numbered"), whole)
    index = split(tmp_path / "indexed", ("one.safetensors", "two.safetensors"))
    (tmp_path / "indexed" / f"{WEIGHTS}.index.json").write_text(json.dumps({"weight_map": index}))
    assert_same(load(tmp_path / "indexed"), whole)


def test_a_single_file_may_have_any_name(tmp_path: Path) -> None:
    directory = write(tmp_path / "a")
    whole = load(directory)
    (directory / WEIGHTS).rename(directory / "lora.safetensors")
    assert_same(load(directory), whole)
    save_file({"x": torch.ones(1)}, directory / "other.safetensors")
    with pytest.raises(AdapterNotFound, match="2 safetensors files"):
        load(directory)


@pytest.mark.parametrize("missing", SHARDS)
def test_a_missing_shard_is_a_missing_file(missing: str, tmp_path: Path) -> None:
    split(tmp_path / "a", SHARDS)
    (tmp_path / "a" / missing).unlink()
    with pytest.raises(AdapterNotFound, match="all of one set"):
        load(tmp_path / "a")


@pytest.mark.parametrize(
    "index",
    [
        "[]",
        "{",
        "{}",
        '{"weight_map": {"x": "../secret.safetensors"}}',
        '{"weight_map": {"x": "/etc/passwd"}}',
        '{"weight_map": {"x": 3}}',
    ],
)
def test_an_index_lists_files_of_its_own_directory(index: str, tmp_path: Path) -> None:
    split(tmp_path / "a", SHARDS)
    (tmp_path / "a" / f"{WEIGHTS}.index.json").write_text(index)
    with pytest.raises(AdapterUnsound, match=r"index\.json"):
        load(tmp_path / "a")


def test_a_tensor_in_two_shards_is_refused(tmp_path: Path) -> None:
    split(tmp_path / "a", SHARDS)
    save_file(tensors(), tmp_path / "a" / SHARDS[1])
    with pytest.raises(AdapterUnsound, match="in another shard"):
        load(tmp_path / "a")


def test_adapters_without_an_id_get_different_ones(tmp_path: Path) -> None:
    directory = write(tmp_path / "a")
    models = [load(directory), load(directory, lora_model_id=None)]
    models.append(LoRAModel.from_lora_tensors(None, tensors(), HELPER))
    assert len({model.id for model in models}) == 3


def test_the_home_directory_may_be_abbreviated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "mine")
    assert get_adapter_absolute_path("~/mine") == str(tmp_path / "mine")
    assert PEFTHelper.from_local_dir("~/mine", 4096, None).r == HELPER.r
    assert load(Path("~/mine")).loras
    stream = {"tensorizer_dir": str(tmp_path / "mine")}
    assert PEFTHelper.from_local_dir("/nowhere", tensorizer_config_dict=stream).r == HELPER.r
    assert load(Path("/nowhere"), tensorizer_config_dict=stream).loras
    with pytest.raises(ValueError, match="encryption"):
        load(tmp_path / "mine", tensorizer_config_dict={"encryption_keyfile": "x"})


class Rules:
    """An object with the attributes of vLLM's mapper."""

    orig_to_new_prefix = {"model.": "language_model.model."}  # noqa: RUF012
    orig_to_new_substr = {".attn.": ".self_attn."}  # noqa: RUF012
    orig_to_new_suffix = {"v_proj": None, "q_proj": "query"}  # noqa: RUF012


@pytest.mark.parametrize(
    ("mapper", "expected"),
    [
        (None, {Q, V}),
        (lambda path: f"x.{path}", {f"x.{Q}", f"x.{V}"}),
        (lambda path: None if path == V else path, {Q}),
        ({"model.": "m."}, {Q.replace("model.", "m.", 1), V.replace("model.", "m.", 1)}),
        ({V: None}, {Q}),
        (
            WeightsMapper(orig_to_new_suffix={"q_proj": "query"}),
            {Q.replace("q_proj", "query"), V},
        ),
        (Rules(), {"language_model.model.layers.0.self_attn.query"}),
        (
            WeightsMapper(
                orig_to_new_regex={
                    re.compile(r"layers\.(\d+)\."): r"blocks.\1.",
                    re.compile("v_proj$"): None,
                },
                orig_to_new_substr={"blocks.0": "blocks.00"},
            ),
            {Q.replace("layers.0", "blocks.00")},
        ),
    ],
)
def test_a_weights_mapper_is_a_function_a_mapping_or_rules(
    mapper: object, expected: set[str]
) -> None:
    options = {"weights_mapper": mapper, "skip_prefixes": None}
    model = LoRAModel.from_lora_tensors(1, tensors(), HELPER, "cpu", None, None, **options)
    assert model.loras.keys() == expected
    with pytest.raises(TypeError, match="weights_mapper is 3"):
        LoRAModel.from_lora_tensors(1, tensors(), HELPER, weights_mapper=3)


def test_rules_that_would_not_be_applied_are_refused() -> None:
    mapper = Rules()
    mapper.orig_to_new_renaming = [object()]
    with pytest.raises(TypeError, match="orig_to_new_renaming"):
        LoRAModel.from_lora_tensors(1, tensors(), HELPER, weights_mapper=mapper)


def test_an_embedding_has_the_rows_of_the_vocabulary() -> None:
    given = {
        "base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(4, 7),
        "base_model.model.model.embed_tokens.lora_embedding_B": torch.ones(3, 4),
    }
    assert LoRAModel.from_lora_tensors(1, given, HELPER, model_vocab_size=7).loras
    with pytest.raises(AdapterDoesNotFit, match="A for 7 tokens; the model has 8"):
        LoRAModel.from_lora_tensors(1, given, HELPER, model_vocab_size=8)


def expert_tensors(experts: int) -> dict[str, Tensor]:
    return {
        f"base_model.model.{EXPERTS}.{expert}.down_proj.lora_{letter}.weight": torch.randn(shape)
        for expert in range(experts)
        for letter, shape in (("A", (4, 6)), ("B", (5, 4)))
    }


@pytest.mark.parametrize("ep_rank", [0, 1])
def test_only_the_experts_of_one_rank_are_loaded(ep_rank: int, tmp_path: Path) -> None:
    directory = write(tmp_path / "a", weights=expert_tensors(4))
    spec = MoEEPLoadSpec(ep_rank=ep_rank, local_num_experts=2, global_num_experts=4)
    expected = {f"experts.{expert}.down_proj" for expert in range(4)}
    model = LoRAModel.from_local_checkpoint(str(directory), expected, HELPER, moe_ep_spec=spec)
    local = range(2 * ep_rank, 2 * ep_rank + 2)
    assert model.loras.keys() == {f"{EXPERTS}.{expert}.down_proj" for expert in local}
    with pytest.raises(ValueError, match="within 4 experts"):
        MoEEPLoadSpec(2, 2, 4)


def test_fused_experts_need_the_model_and_may_be_those_of_one_rank(tmp_path: Path) -> None:
    fused = {
        f"base_model.model.{EXPERTS}.lora_A.weight": torch.randn(16, 6),
        f"base_model.model.{EXPERTS}.lora_B.weight": torch.randn(5, 16),
    }
    helper = PEFTHelper.from_dict(
        {**CONFIG, "target_modules": [], "target_parameters": ["mlp.experts.down_proj"]}
    )
    directory = write(tmp_path / "a", weights=fused)

    def read(**options: object) -> LoRAModel:
        return LoRAModel.from_local_checkpoint(str(directory), {"experts"}, helper, **options)

    with pytest.raises(AdapterDoesNotFit, match="pass model="):
        read()
    with pytest.raises(TypeError, match="a manager"):
        read(model=object())
    up, column = (
        ModuleShape(f"{EXPERTS}.{name}", *widths, index, kind=ModuleKind.EXPERTS, experts=4)
        for index, (name, widths) in enumerate({"up_proj": (5, 6), "down_proj": (6, 5)}.items())
    )
    target = AdapterTarget({up.name: up, column.name: column}, LORA_CONFIG)
    whole = read(model=target)
    part = read(model=target, moe_ep_spec=MoEEPLoadSpec(1, 2, 4))
    assert whole.is_3d_lora_weight
    assert torch.equal(part.loras[column.name].lora_a, whole.loras[column.name].lora_a[2:])
    assert torch.equal(part.loras[column.name].lora_b, whole.loras[column.name].lora_b[2:])


def test_ids_of_requests_may_come_out_of_arrays() -> None:
    request = LoRARequest("a", torch.tensor([3]).numpy()[0], "/a")
    assert (request.lora_int_id, request.adapter_id, request.name, request.path) == (
        3,
        3,
        "a",
        "/a",
    )
    for wrong in (0, True, 1.0, "1"):
        with pytest.raises(ValueError, match="lora_int_id"):
            LoRARequest("a", wrong, "/a")
