"""Adapter configs: what is refused with which code, what is ignored, and which pattern counts."""

from pathlib import Path
from typing import Any

import pytest

from loradock.engine.adapters import PEFTHelper
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import EngineError
from loradock.messages.errors import ErrorCode
from tests.support.engine.adapter_examples import (
    CONFIG,
    DOWN,
    LORA_CONFIG,
    Q,
    V,
    read,
    write,
)

CONFIG_REFUSED, DOES_NOT_FIT = ErrorCode.CONFIG_REFUSED, ErrorCode.DOES_NOT_FIT

REFUSED_CONFIGS: dict[str, tuple[dict[str, Any], ErrorCode, str]] = {
    "no r": ({"r": None}, CONFIG_REFUSED, "r is missing"),
    "no alpha": ({"lora_alpha": None}, CONFIG_REFUSED, "lora_alpha is missing"),
    "no targets": ({"target_modules": None}, CONFIG_REFUSED, "target_modules is missing"),
    "empty targets": ({"target_modules": []}, CONFIG_REFUSED, "target_modules is []"),
    "numbered targets": ({"target_modules": [1]}, CONFIG_REFUSED, "target_modules is [1]"),
    "r 0": ({"r": 0}, CONFIG_REFUSED, "r is 0"),
    "r below 0": ({"r": -4}, CONFIG_REFUSED, "r is -4"),
    "r a bool": ({"r": True}, CONFIG_REFUSED, "r is True"),
    "r a float": ({"r": 4.0}, CONFIG_REFUSED, "r is 4.0"),
    "r a text": ({"r": "4"}, CONFIG_REFUSED, "r is '4'"),
    "r over the maximum": ({"r": 9}, DOES_NOT_FIT, "rank 9; this engine's max_lora_rank is 8"),
    "r huge": ({"r": 10**40}, DOES_NOT_FIT, "max_lora_rank is 8"),
    "alpha 0": ({"lora_alpha": 0}, CONFIG_REFUSED, "lora_alpha is 0"),
    "alpha a bool": ({"lora_alpha": True}, CONFIG_REFUSED, "lora_alpha is True"),
    "alpha a text": ({"lora_alpha": "8"}, CONFIG_REFUSED, "lora_alpha is '8'"),
    "alpha huge": ({"lora_alpha": 10**60}, CONFIG_REFUSED, "scaling is 2.5e+59"),
    "alpha of too many digits": ({"lora_alpha": 10**400}, CONFIG_REFUSED, "more than 64 digits"),
    "scaling huge": ({"lora_alpha": 1e300}, CONFIG_REFUSED, "scaling is 2.5e+299"),
    "scaling tiny": ({"lora_alpha": 1e-300}, CONFIG_REFUSED, "scaling is 2.5e-301"),
    "bias": ({"bias": "some"}, CONFIG_REFUSED, "bias is 'some'"),
    "bias in B": ({"lora_bias": True}, DOES_NOT_FIT, "adapted modules without a bias in B"),
    "bias in B as a text": ({"lora_bias": "yes"}, CONFIG_REFUSED, "lora_bias is 'yes'"),
    "DoRA": ({"use_dora": True}, DOES_NOT_FIT, "adapted modules without a magnitude"),
    "DoRA as a text": ({"use_dora": "yes"}, CONFIG_REFUSED, "use_dora is 'yes'"),
    "aLoRA": ({"alora_invocation_tokens": [1]}, CONFIG_REFUSED, "activated LoRA"),
    "replication": ({"layer_replication": [[0, 1]]}, CONFIG_REFUSED, "layer_replication"),
    **{
        f"modules_to_save {saved}": ({"modules_to_save": saved}, CONFIG_REFUSED, "modules_to_save")
        for saved in ("score", [["score"]], [""])
    },
    **{
        f"modules_to_save {saved} without weights": (
            {"modules_to_save": saved},
            DOES_NOT_FIT,
            "no tensor belongs to them",
        )
        for saved in (["lm_head"], ["score", "embed_tokens"], ["norm"])
    },
    "a head without weights": (
        {"modules_to_save": ["score"]},
        DOES_NOT_FIT,
        "no tensor belongs to them",
    ),
    "unknown parameter": (
        {"target_parameters": ["x"]},
        DOES_NOT_FIT,
        "target_parameters names 'x'",
    ),
    "numbered parameters": ({"target_parameters": [1]}, CONFIG_REFUSED, "target_parameters is [1]"),
    "a token twice": ({"trainable_token_indices": [3, 3]}, CONFIG_REFUSED, "distinct token ids"),
    "no tokens of a module": ({"trainable_token_indices": {"wte": []}}, CONFIG_REFUSED, "distinct"),
    "a negative token": ({"trainable_token_indices": {"wte": [-1]}}, CONFIG_REFUSED, "distinct"),
    "token rows": (
        {"trainable_token_indices": [3]},
        DOES_NOT_FIT,
        "trainable_token_indices names these modules, but no tensor belongs to them",
    ),
    "another type": ({"peft_type": "IA3"}, CONFIG_REFUSED, "peft_type is 'IA3'"),
    "QA-LoRA": ({"use_qalora": True}, CONFIG_REFUSED, "use_qalora"),
    "BD-LoRA": ({"use_bdlora": {"x": 1}}, CONFIG_REFUSED, "use_bdlora"),
    "KaSA": ({"kasa_config": {"beta": 1}}, CONFIG_REFUSED, "kasa_config"),
    "MonteCLoRA": ({"monteclora_config": {"x": 1}}, CONFIG_REFUSED, "monteclora_config"),
    "arrow": ({"arrow_config": {"x": 1}}, CONFIG_REFUSED, "arrow_config"),
    "a variant of tomorrow": ({"use_xlora": True}, CONFIG_REFUSED, "'use_xlora' is True"),
    "a config of tomorrow": (
        {"x_config": {"a": 1}},
        CONFIG_REFUSED,
        "this variant of LoRA is not supported",
    ),
    "code": ({"auto_map": {"AutoModel": "x.y"}}, CONFIG_REFUSED, "names code"),
    "remote code": ({"trust_remote_code": True}, CONFIG_REFUSED, "names code"),
    "fan_in_fan_out": ({"fan_in_fan_out": True}, CONFIG_REFUSED, "fan_in_fan_out is True"),
    "fan a text": ({"fan_in_fan_out": "no"}, CONFIG_REFUSED, "true or false"),
    "rslora a text": ({"use_rslora": "no"}, CONFIG_REFUSED, "true or false"),
    "pattern rank 0": ({"rank_pattern": {"q_proj": 0}}, CONFIG_REFUSED, "rank_pattern is"),
    "pattern rank over": ({"rank_pattern": {"no": 16}}, DOES_NOT_FIT, "rank 16"),
    "pattern a list": ({"rank_pattern": ["q_proj"]}, CONFIG_REFUSED, "an object of at most"),
    "pattern alpha 0": ({"alpha_pattern": {"q_proj": 0}}, CONFIG_REFUSED, "alpha_pattern is"),
    "pattern unclosed": (
        {"alpha_pattern": {"(q": 1}},
        CONFIG_REFUSED,
        "can't be used as a pattern: missing )",
    ),
    "pattern lookahead": (
        {"alpha_pattern": {"(?=q)": 1}},
        CONFIG_REFUSED,
        "'(?=q)' can't be used as a pattern: invalid perl operator",
    ),
    "pattern long": ({"rank_pattern": {"q" * 600: 1}}, CONFIG_REFUSED, "at most 512 characters"),
    **{
        f"start {name}": ({"init_lora_weights": name}, CONFIG_REFUSED, "changing the base weights")
        for name in ("pissa", "pissa_niter_16", "olora", "OLoRA", "corda", "loftq", "lora_ga")
    },
    **{
        f"start {name}": ({"init_lora_weights": name}, CONFIG_REFUSED, "is not known")
        for name in ("tomorrow", "gaussian_2", "", 1, 0, ["x"], {})
    },
    **{
        f"layers {value}": ({"layers_to_transform": value}, CONFIG_REFUSED, "layers_to_transform")
        for value in ("1", [True], [1.0], {"x": 1}, [["1"]])
    },
    **{
        f"lists {value}": ({field: value}, CONFIG_REFUSED, f"{field} is")
        for field in ("layers_pattern", "exclude_modules")
        for value in (1, [1], [""], {"x": 1})
    },
    "many lists": (
        {"layers_pattern": ["h"] * 5000},
        CONFIG_REFUSED,
        "layers_pattern has 5000 names; at most 4096",
    ),
}


@pytest.mark.parametrize("name", REFUSED_CONFIGS)
def test_a_config_is_refused_with_its_code(tmp_path: Path, name: str) -> None:
    changes, code, text = REFUSED_CONFIGS[name]
    config = {k: v for k, v in {**CONFIG, **changes}.items() if v is not None}
    with pytest.raises(EngineError) as caught:
        read(write(tmp_path / "adapter", config=config))
    assert caught.value.code == code, caught.value
    assert text in str(caught.value)
    assert "adapter 'sample'" in str(caught.value)


HARMLESS: dict[str, dict[str, Any]] = {
    **{
        f"start {name}": {"init_lora_weights": name}
        for name in (True, False, None, "gaussian", "eva", "orthogonal", "mica")
    },
    "eva_config": {"eva_config": {"rho": 2.0}, "init_lora_weights": "eva"},
    "a class by name": {"auto_mapping": {"base_model_class": "X", "parent_library": "y"}},
    "megatron": {"megatron_core": "megatron.core", "megatron_config": None},
    "null patterns": {"rank_pattern": None, "alpha_pattern": None, "use_rslora": None},
    "alpha below 0": {"lora_alpha": -8},
    "a target that this model lacks": {"target_modules": ["q_proj", "v_proj", "wq"]},
    "targets as a pattern": {"target_modules": r".*\.(q|v)_proj"},
    "unknown words": {"my_trainer": {"x": [1, 2]}, "lora_dropout": 0.1},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_fields_that_only_describe_training_are_ignored(tmp_path: Path, name: str) -> None:
    assert read(write(tmp_path / "a", config={**CONFIG, **HARMLESS[name]})).model.loras


def test_only_the_first_matching_pattern_counts() -> None:
    helper = PEFTHelper.from_dict(
        {**CONFIG, "rank_pattern": {"q_proj": 2, ".*proj": 3}, "alpha_pattern": {"attn.q_proj": 5}}
    )
    assert [helper.of_module(name).rank for name in (Q, DOWN, "model.norm")] == [2, 3, 4]
    assert (helper.of_module(Q).alpha, helper.of_module(V).alpha) == (5, 8)
    assert helper.of_module(Q).scaling == 2.5


def test_the_helper_reads_a_directory_and_checks_the_limit(tmp_path: Path) -> None:
    helper = PEFTHelper.from_local_dir(str(write(tmp_path / "a")))
    assert (helper.r, helper.lora_alpha, helper.target_modules) == (4, 8, ("q_proj", "v_proj"))
    helper.validate_legal(LORA_CONFIG)
    with pytest.raises(EngineError, match="max_lora_rank is 1"):
        helper.validate_legal(LoRAConfig(max_lora_rank=1))
