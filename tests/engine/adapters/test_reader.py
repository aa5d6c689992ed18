"""Properties of reading adapters: those of PEFT mean what they mean in PEFT; others are refused."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from loradock.engine.adapters import read_adapter, safetensors_header, target
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import (
    AdapterConfigRefused,
    AdapterDoesNotFit,
    AdapterUnsound,
    EngineError,
)
from loradock.engine.layout import ModuleShape
from loradock.engine.residency.staging import stage
from loradock.messages.errors import ErrorCode
from tests.support.engine.adapter_examples import (
    CONFIG,
    MODULES,
    Q,
    V,
    key,
    pair,
    read,
    stored,
    tensors,
    write,
)

CONFIG_REFUSED, DOES_NOT_FIT = ErrorCode.CONFIG_REFUSED, ErrorCode.DOES_NOT_FIT
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL_LINEAR = [*ATTENTION, "gate_proj", "up_proj", "down_proj"]

MADE_BY_PEFT: dict[str, dict[str, Any]] = {
    "plain": {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj"]},
    "all": {"r": 8, "lora_alpha": 8, "target_modules": ALL_LINEAR},
    "all-linear": {"r": 2, "lora_alpha": 3, "target_modules": "all-linear"},
    "rslora": {"r": 5, "lora_alpha": 7, "target_modules": ATTENTION, "use_rslora": True},
    "patterns": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ALL_LINEAR,
        "rank_pattern": {r"layers\.0\..*q_proj": 2, "q_proj": 6, "^model.layers.1.mlp.up_proj": 1},
        "alpha_pattern": {"mlp.(up|gate)_proj": 3, "proj": 99, "layers.[01].self_attn.o_proj": 1.5},
    },
    "patterns-rslora": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["k_proj", "down_proj"],
        "rank_pattern": {"down_proj": 8},
        "alpha_pattern": {"model.layers.1.self_attn.k_proj": 32},
        "use_rslora": True,
    },
    "one-layer": {
        "r": 4,
        "lora_alpha": 8,
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
    },
}


@dataclass(frozen=True)
class FromPeft:
    """A base model, its modules, and adapters saved by PEFT."""

    root: Path
    base: Callable[[], LlamaForCausalLM]
    modules: dict[str, ModuleShape]


@pytest.fixture(scope="module")
def from_peft(tmp_path_factory: pytest.TempPathFactory) -> FromPeft:
    root = tmp_path_factory.mktemp("adapters")
    config = LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=50,
    )

    def base() -> LlamaForCausalLM:
        torch.manual_seed(0)
        return LlamaForCausalLM(config)

    for seed, (name, fields) in enumerate(MADE_BY_PEFT.items()):
        model = get_peft_model(base(), LoraConfig(task_type="CAUSAL_LM", **fields))
        torch.manual_seed(seed)
        with torch.no_grad():
            for parameter_name, parameter in model.named_parameters():
                if "lora_" in parameter_name:
                    parameter.normal_()
        model.save_pretrained(root / name)
    linear = [(n, m) for n, m in base().model.named_modules() if isinstance(m, torch.nn.Linear)]
    shapes = {
        f"model.{name}": ModuleShape(f"model.{name}", m.in_features, m.out_features, index)
        for index, (name, m) in enumerate(linear)
    }
    return FromPeft(root, base, shapes)


def deltas_by_peft(from_peft: FromPeft, name: str) -> dict[str, torch.Tensor]:
    model = PeftModel.from_pretrained(from_peft.base(), from_peft.root / name).double()
    found = {}
    for path, module in model.base_model.model.named_modules():
        if hasattr(module, "get_delta_weight") and "default" in module.lora_A:
            found[path] = module.get_delta_weight("default")
    return found


@pytest.mark.parametrize("name", MADE_BY_PEFT)
def test_an_adapter_of_peft_has_the_same_delta_as_in_peft(from_peft: FromPeft, name: str) -> None:
    config = LoRAConfig(max_lora_rank=8, lora_dtype="float32")
    loaded = read_adapter(name, [from_peft.root], AdapterTarget(from_peft.modules, config))
    expected = deltas_by_peft(from_peft, name)
    assert loaded.model.loras.keys() == expected.keys()
    for path, delta in expected.items():
        lora = loaded.model.get_lora(path)
        assert lora is not None
        ours = lora.scaling * (lora.lora_b.double() @ lora.lora_a.double())
        torch.testing.assert_close(ours, delta, rtol=1e-12, atol=1e-12)
    assert loaded.rank == max(lora.rank for lora in loaded.model.loras.values())
    assert loaded.host_bytes == sum(lora.size_bytes for lora in loaded.model.loras.values())
    blob = stage(loaded.model, list(from_peft.modules.values()), config.dtype)
    assert blob.size_bytes == loaded.blob_bytes


def test_names_may_lack_the_prefix(tmp_path: Path) -> None:
    plain = {name.removeprefix("base_model.model."): t for name, t in tensors().items()}
    with_prefix = read(write(tmp_path / "a"))
    without = read(write(tmp_path / "b", weights=plain))
    assert with_prefix.model.loras.keys() == without.model.loras.keys() == {Q, V}
    assert with_prefix.host_bytes == without.host_bytes
    assert with_prefix.fingerprint != without.fingerprint


def test_names_may_have_the_name_that_peft_gives_an_adapter(tmp_path: Path) -> None:
    named = {name.replace(".weight", ".default.weight"): t for name, t in tensors().items()}
    assert len(named) == 4
    found, expected = (read(write(tmp_path / w, weights=t)) for w, t in (("a", named), ("b", None)))
    for module, lora in expected.model.loras.items():
        assert torch.equal(found.model.loras[module].lora_a, lora.lora_a)
        assert torch.equal(found.model.loras[module].lora_b, lora.lora_b)
    with pytest.raises(AdapterDoesNotFit, match="the same as"):
        read(write(tmp_path / "c", weights=named | tensors()))


def test_the_fingerprint_covers_every_byte_of_both_files(tmp_path: Path) -> None:
    first = read(write(tmp_path / "a"))
    assert read(write(tmp_path / "copy")).fingerprint == first.fingerprint
    assert len(first.fingerprint) == 32
    other_config = read(write(tmp_path / "b", config={**CONFIG, "lora_alpha": 4}))
    changed = tensors()
    changed[key(V, "B")][7, 3] += 1
    other_value = read(write(tmp_path / "c", weights=changed))
    assert len({first.fingerprint, other_config.fingerprint, other_value.fingerprint}) == 3


ones = torch.ones
HEAD = "base_model.model."


def renamed(old: str, new: str) -> dict[str, torch.Tensor]:
    return {name.replace(old, new): tensor for name, tensor in tensors().items()}


def with_one(shape: tuple[int, int], row: int, column: int, value: float) -> torch.Tensor:
    found = ones(shape)
    found[row, column] = value
    return found


DOES_NOT_FIT_TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "no B": (tensors(q_B=None), f"{Q}.lora_A.weight has no matching lora_B"),
    "no A": (tensors(v_A=None), f"{V}.lora_B.weight has no matching lora_A"),
    "A too wide": (tensors(q_A=ones(4, 32)), "A [4, 32] and B [16, 4]; in this model it has 16"),
    "A too narrow": (tensors(q_A=ones(4, 8)), "A [4, 8] and B [16, 4]; in this model it has 16"),
    "B too narrow": (
        tensors(v_B=ones(4, 4)),
        "B [4, 4]; in this model it has 16 inputs and 8 outputs",
    ),
    "A of another rank": (
        tensors(q_A=ones(2, 16)),
        "A [2, 16] and B [16, 4]; the config specifies",
    ),
    "B of another rank": (tensors(q_B=ones(16, 5)), "B [16, 5]; the config specifies rank 4"),
    "both of another rank": (pair(Q, 3) | pair(V), "A [3, 16] and B [16, 3]; the config specifies"),
    "A transposed": (tensors(q_A=ones(16, 4)), "A [16, 4]"),
    "A flat": (tensors(q_A=ones(64)), "[64]; two dimensions"),
    "whole numbers": (
        tensors(q_A=ones(4, 16).int()),
        "must have a floating dtype, got torch.int32",
    ),
    "bytes": (tensors(q_A=ones(4, 16).bool()), "must have a floating dtype, got torch.bool"),
    "a suffix only": (
        renamed(".layers.0", ""),
        "in this model (2 of 2 modules): model.attn.q_proj",
    ),
    "without model.": (renamed("model.layers", "layers"), f"(there is {Q})"),
    "another layer": (renamed("layers.0", "layers.7"), "model.layers.7.attn.q_proj"),
    "nothing": ({}, "no tensor is an A or a B"),
    "half of the targets": (pair(Q), "target_modules without a tensor: 'v_proj'"),
    "twice": (tensors() | {key(Q, "A").removeprefix(HEAD): ones(4, 16)}, "the same as"),
    "embedding": (
        tensors() | {f"{HEAD}model.embed_tokens.lora_embedding_A": ones(4, 9)},
        "model.embed_tokens.lora_embedding_A has no matching lora_B",
    ),
    "experts": (
        tensors() | {f"{HEAD}model.mlp.experts.lora_A": ones(4, 9)},
        "experts that are not wrapped in this model: base_model",
    ),
    "magnitudes": (
        tensors() | {f"{HEAD}{Q}.lora_magnitude_vector": ones(16)},
        "(use_dora is off in the config)",
    ),
    "a bias": (tensors() | {f"{HEAD}{Q}.bias": ones(16)}, "(bias is 'none' in the config)"),
    "a head": (tensors() | {f"{HEAD}score.weight": ones(2, 16)}, f"tensors: {HEAD}score.weight"),
    "an adapter's name": (tensors() | {f"{HEAD}{Q}.lora_A.x.weight": ones(4, 16)}, "lora_A.x"),
}

NOT_FINITE_TENSORS: dict[str, tuple[dict[str, torch.Tensor], str]] = {
    "NaN in A": (tensors(q_A=with_one((4, 16), 2, 3, math.nan)), f"{key(Q, 'A')} contains NaN"),
    "infinity in B": (
        tensors(v_B=with_one((8, 4), 7, 3, -math.inf)),
        f"{key(V, 'B')} contains NaN",
    ),
    "half": (tensors(v_B=with_one((8, 4), 0, 0, math.inf).half()), f"{key(V, 'B')} contains NaN"),
    "8 bits": (
        tensors(v_A=with_one((4, 16), 3, 15, math.nan).to(torch.float8_e4m3fn)),
        f"{key(V, 'A')} contains NaN",
    ),
    "too far for the dtype": (tensors(q_A=ones(4, 16).double() * 1e39), "from 1e+39 to 1e+39"),
    "too far once scaled": (
        tensors(q_B=with_one((16, 4), 5, 1, -2e38)),
        "has values from -2e+38 to 1; times 2 they are too large for torch.bfloat16",
    ),
}


@pytest.mark.parametrize("name", DOES_NOT_FIT_TENSORS)
def test_tensors_that_do_not_fit_are_refused(tmp_path: Path, name: str) -> None:
    weights, text = DOES_NOT_FIT_TENSORS[name]
    with pytest.raises(EngineError) as caught:
        read(write(tmp_path / "adapter", weights=weights))
    assert caught.value.code == DOES_NOT_FIT, caught.value
    assert text in str(caught.value)


@pytest.mark.parametrize("name", NOT_FINITE_TENSORS)
def test_values_that_are_not_finite_are_refused(tmp_path: Path, name: str) -> None:
    weights, text = NOT_FINITE_TENSORS[name]
    with pytest.raises(EngineError) as caught:
        read(write(tmp_path / "adapter", weights=weights))
    assert caught.value.code == ErrorCode.NOT_FINITE, caught.value
    assert text in str(caught.value)


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16", "float8_e5m2"])
def test_every_floating_dtype_is_read_as_stored(tmp_path: Path, dtype: str) -> None:
    torch_dtype = getattr(torch, dtype)
    weights = {name: tensor.to(torch_dtype) for name, tensor in tensors().items()}
    loaded = read(write(tmp_path / "adapter", weights=weights))
    lora = loaded.model.loras[Q]
    assert lora.lora_a.dtype == torch_dtype
    assert torch.equal(lora.lora_a.float(), weights[key(Q, "A")].float())
    assert torch.equal(lora.lora_b.float(), weights[key(Q, "B")].float())


def test_all_problems_are_reported_at_once(tmp_path: Path) -> None:
    config = {**CONFIG, "use_qalora": True, "bias": "some", "r": 9}
    weights = tensors(q_B=None, v_A=ones(4, 9)) | {"what": ones(1)}
    with pytest.raises(AdapterConfigRefused) as caught:
        read(write(tmp_path / "adapter", config=config, weights=weights))
    for text in (
        "use_qalora",
        "bias",
        "max_lora_rank is 8",
        "no matching lora_B",
        "rank 9",
        "tensors: what",
    ):
        assert any(text in finding for finding in caught.value.details), text
    assert "use_qalora" in str(caught.value)


def test_an_error_text_stays_short_with_many_problems(tmp_path: Path) -> None:
    weights = {f"{i}{'x' * 400}.lora_A.weight": ones(1) for i in range(2000)}
    config = {**CONFIG, "bias": "y" * 100_000, "peft_type": "\ud800\n\x1b"}
    with pytest.raises(EngineError) as caught:
        read(write(tmp_path / "adapter", config=config, weights=weights))
    text = str(caught.value)
    assert len(text) < 12_000
    assert text.isascii()
    assert text.isprintable()
    assert "more" in text


def test_a_refused_adapter_leaves_no_memory_and_no_open_file(tmp_path: Path) -> None:
    directory = write(tmp_path / "adapter", weights=tensors(q_A=ones(4, 16) * math.nan))
    before = set(Path("/proc/self/fd").iterdir())
    for _ in range(3):
        with pytest.raises(EngineError):
            read(directory)
    assert set(Path("/proc/self/fd").iterdir()) == before


def test_more_tensors_than_the_model_could_use_are_refused_before_they_are_decoded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(target, "OTHER_TENSORS_MAX", 10)
    most = target.TENSORS_PER_MODULE * len(MODULES) + 10

    def weights(first: int, end: int) -> bytes:
        names = (f"x.{i}" for i in range(first, end))
        entries = {
            name: {"dtype": "U8", "shape": [1], "data_offsets": [at, at + 1]}
            for at, name in enumerate(names)
        }
        return stored(entries, bytes(end - first))

    with pytest.raises(AdapterDoesNotFit, match="unexpected tensors"):
        read(write(tmp_path / "most", weights=weights(0, most)))
    shards = write(tmp_path / "shards")
    (shards / "adapter_model.safetensors").unlink()
    for number, part in enumerate((weights(0, 9), weights(9, most + 1)), start=1):
        (shards / f"adapter_model-0000{number}-of-00002.safetensors").write_bytes(part)
    with pytest.raises(AdapterUnsound, match=f"names {most - 8} tensors; at most {most - 9}"):
        read(shards)
    decoded = lambda *_: pytest.fail("the header was decoded")  # noqa: E731
    monkeypatch.setattr(safetensors_header, "decode_object", decoded)
    with pytest.raises(AdapterUnsound, match=f"names {most + 1} tensors; at most {most}"):
        read(write(tmp_path / "more", weights=weights(0, most + 1)))
