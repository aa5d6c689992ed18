"""Layers without tensors: those that PEFT would adapt, by its own rule, and the texts for them."""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from peft import LoraConfig
from peft.tuners.tuners_utils import _ExcludedModule, check_target_module_exists

from loradock.engine.adapters import PEFTHelper
from loradock.engine.adapters.problems import Problems
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.adapters.targets import check_targets
from loradock.engine.config import LoRAConfig
from loradock.engine.layout import ModuleShape
from loradock.messages.errors import DETAIL_CHARACTERS_MAX, DETAILS_MAX

LAYERS = range(12)
ATTENTION = ("self_attn.q_proj", "self_attn.o_proj")
PATHS = (
    *(f"model.layers.{layer}.{module}" for layer, module in product(LAYERS, ATTENTION)),
    *(f"model.layers.{layer}.mixer.blocks.{block}.in_proj" for layer in (1, 3) for block in (0, 1)),
    *("model.embed_tokens", "model.norm_in.in_proj", "lm_head", "h.0.o_proj", "tower.h.1.o_proj"),
)
NAMES = (
    *("q_proj", "o_proj", "in_proj", "self_attn", "self_attn.q_proj", "proj", "lm_head", "layers"),
    *("model.layers.3.self_attn.q_proj", "layers.1.mixer.blocks.0.in_proj", "blocks.1.in_proj"),
    *("embed_tokens", "model", "mixer", "h.0.o_proj"),
)


def target(paths: Iterable[str] = PATHS) -> AdapterTarget:
    shapes = {path: ModuleShape(path, 8, 8, index) for index, path in enumerate(paths)}
    return AdapterTarget(shapes, LoRAConfig())


def findings(
    config: dict[str, Any], touched: Collection[str], model: AdapterTarget
) -> tuple[str, tuple[str, ...]]:
    """Return the text of the refusal, empty for none, and the warnings."""
    problems = Problems(8)
    helper = PEFTHelper.from_dict({"r": 1, "lora_alpha": 1, **config})
    warnings = check_targets(touched, helper, model, problems)
    return str(problems.error()) if problems else "", warnings


names = st.lists(st.sampled_from(NAMES), max_size=3, unique=True)
configs = st.fixed_dictionaries(
    {"target_modules": st.lists(st.sampled_from(NAMES), min_size=1, max_size=4, unique=True)},
    optional={
        "exclude_modules": names,
        "modules_to_save": names,
        "layers_to_transform": st.one_of(
            st.integers(-1, 12), st.lists(st.integers(-1, 12), max_size=6)
        ),
        "layers_pattern": st.one_of(
            st.sampled_from(["layers", "h", "blocks"]),
            st.lists(st.sampled_from(["layers", "h", "blocks", "model.layers"]), max_size=2),
        ),
    },
)


@given(configs, st.sampled_from(PATHS))
@example({"target_modules": ["q_proj", "lm_head"], "layers_to_transform": 0}, "lm_head")
def test_one_layer_without_tensors_is_reported_if_peft_adapts_it(
    config: dict[str, Any], left_out: str
) -> None:
    if "layers_to_transform" not in config:
        # PEFT refuses such a config.
        config.pop("layers_pattern", None)
    peft = LoraConfig(**config)
    # PEFT keeps names in a set.
    peft.target_modules = config["target_modules"]
    found = check_target_module_exists(peft, left_out)
    is_adapted = bool(found) and not isinstance(found, _ExcludedModule)
    text, warnings = findings(config, set(PATHS) - {left_out}, target())
    assert bool(text or warnings) == is_adapted
    assert all(left_out.rpartition(".")[2] in one for one in warnings)


def test_a_name_without_any_tensor_is_refused_and_layers_are_warned_of() -> None:
    config = {"target_modules": ["q_proj", "o_proj"], "modules_to_save": ["h", "tower"]}
    touched = {path for path in PATHS if "q_proj" in path}
    text, warnings = findings(config, touched, target())
    assert "target_modules without a tensor: 'o_proj'" in text
    present = {path for path in PATHS if "_proj" in path and ".9." not in path}
    text, warnings = findings(
        config,
        present - {f"model.layers.{at}.{m}" for at in (2, 3, 4, 6) for m in ATTENTION},
        target(),
    )
    assert not text
    assert warnings == (
        "no tensors for self_attn.q_proj, self_attn.o_proj of model.layers.2-4, 6, 9, although the "
        "config names them; of 24 targets, 10 stay as in the base model",
    )


@pytest.mark.parametrize("layers", [0, [0, 11]])
def test_names_that_the_chosen_layers_lack_are_no_targets(layers: int | list[int]) -> None:
    """As in hybrids, whose layers are of two kinds: `in_proj` is in others than these."""
    config = {
        "target_modules": ["q_proj", "in_proj"],
        "layers_to_transform": layers,
        "layers_pattern": "layers",
    }
    touched = {f"model.layers.{at}.self_attn.q_proj" for at in LAYERS}
    assert findings(config, touched, target()) == ("", ())


@pytest.mark.parametrize(
    "field",
    [
        {"target_modules": ".*q_proj"},
        {"target_modules": ["q_proj"], "exclude_modules": r".*\.[0-9]\..*"},
        {
            "target_modules": ["q_proj"],
            "layers_to_transform": [1],
            "layers_pattern": "(?:layers|h)",
        },
    ],
)
def test_nothing_is_compared_where_a_pattern_decides(field: dict[str, Any]) -> None:
    assert findings(field, {PATHS[0]}, target()) == ("", ())


def test_warnings_fit_into_a_message() -> None:
    paths = [f"{'m' * 90}.layers.{at}.{'x' * 90}{at // 2}" for at in range(600)]
    paths += [f"{path}.more" for path in paths[::2]]
    config = {"target_modules": [*{path.rpartition(".")[2] for path in paths}]}
    touched = set(paths[1::2]) | {"a.more"}
    _, warnings = findings(config, touched, target([*paths, "a.more"]))
    assert len(warnings) == DETAILS_MAX
    assert max(map(len, warnings)) == DETAIL_CHARACTERS_MAX
