"""Every documented name has a place here, which takes the documented arguments in their order."""

import inspect
import re
from typing import Final, NamedTuple

import pytest

import loradock.client
import loradock.engine.adapters.experts
import loradock.engine.adapters.target
import loradock.engine.config
import loradock.engine.errors
import loradock.engine.layers
import loradock.engine.manager.worker_manager
import loradock.engine.models.preparation
import loradock.engine.punica
import loradock.engine.residency.staging
from tests.support.sources import ROOT

DOCUMENT = ROOT / "docs" / "from-vllm.md"
MODULES: Final = {
    module.__name__: module
    for module in (
        *(loradock.client, loradock.engine.adapters, loradock.engine.adapters.experts),
        *(loradock.engine.adapters.target, loradock.engine.config, loradock.engine.errors),
        *(loradock.engine.layers, loradock.engine.manager, loradock.engine.manager.worker_manager),
        *(loradock.engine.models.preparation, loradock.engine.punica),
        loradock.engine.residency.staging,
    )
}


class DocumentedName(NamedTuple):
    """A row of the document.

    `place`: module and attribute here. `arguments`: the documented ones, in order, between spaces;
    those after `*` are keywords. `difference`: what differs, with the reason; empty for nothing.
    """

    name: str
    place: str
    arguments: str
    difference: str


ROW: Final = re.compile(r"^\| `([^`]+)` \| `([\w.]+)(?:\(([^)]*)\))?` \| (.*) \|$", re.M)


def documented_names() -> list[DocumentedName]:
    _, _, rest = DOCUMENT.read_text().partition("<!-- names: ")
    text, _, _ = rest.partition("<!-- end of the names -->")
    return [
        DocumentedName(name, place, arguments.replace(",", ""), "" if reason == "-" else reason)
        for name, place, arguments, reason in ROW.findall(text)
    ]


NAMES = documented_names()

OWNERS: Final = {
    name: found
    for module in (
        loradock.engine.adapters,
        loradock.engine.config,
        loradock.engine.layers,
        loradock.engine.manager,
    )
    for name, found in vars(module).items()
    if isinstance(found, type)
}


AUDITED: Final = """
    LoRAModel from_local_checkpoint from_lora_tensors clone get_lora check_lora_name
    is_3d_lora_weight skip_prefixes weights_mapper WeightsMapper model_vocab_size
    tensorizer_config_dict moe_ep_spec MoEEPLoadSpec ep_rank _should_skip_module
    _is_remote_expert_key LoRAConfig lora_dtype max_cpu_loras fully_sharded_loras target_modules
    default_mm_loras enable_tower_connector_lora specialize_active_lora
    enable_mixed_moe_lora_format VLLM_LORA_ENABLE_DUAL_STREAM compute_hash
    verify_with_model_config LoRAModelManager vllm_config lora_config lora_index_to_id device
    max_num_seqs max_num_batched_tokens vocab_size adapter_type supported_lora_modules
    packed_modules_mapping packed_modules modules is_pooling_model supports_mm punica_wrapper
    punica_wrapper_mapping _last_mapping lora_manager add_adapter remove_adapter
    remove_all_adapters activate_adapter deactivate_adapter list_adapters get_adapter
    set_adapter_mapping LoRAMapping index_mapping prompt_mapping is_prefill LoRAMappingType LANGUAGE
    TOWER CONNECTOR create_dummy_lora embedding_modules get_dummy_lora_warmup_rank pin_adapter
    _match_target_modules _create_lora_modules PPMissingLayer register_module
    _register_packed_modules _init_punica_wrapper _maybe_init_mm _get_punica_wrapper
    _create_merged_loras_inplace _stack_moe_lora_weights _convert_3d_to_2d_moe_lora
    _slice_moe_lora_ep _pad_lora_pairs_to_triplets _get_lora_layer_weights
    LRUCacheLoRAModelManager remove_oldest_adapter create_lora_manager lora_manager_cls
    MergedColumnParallelLinearWithLoRA expand_packed_lora set_lora embeddings_tensor bias
    FusedMoEWithLoRA reset_lora slice_lora_a slice_lora_b create_lora_weights set_mapping
    can_replace_layer lora_a_stacked lora_b_stacked n_slices tp_rank tp_size output_size
    output_sizes output_slices output_ids input_size q_proj_shard_size kv_proj_shard_size forward
    _verify_ep_fs adapter_enabled hidden_size local_num_experts global_num_experts use_ep
    w13_input_size w13_output_size w2_input_size w2_output_size quant_method runner
    is_internal_router _slice_w13_b LogitsProcessorWithLoRA dtype sharded_to_full_mapping scale
    soft_cap _get_logits WorkerLoRAManager _load_adapter get_adapter_absolute_path PEFTHelper
    from_local_dir max_position_embeddings validate_legal set_active_adapters LoRARequest
    lora_name lora_int_id lora_path adapter_id LLMEngine add_lora remove_lora L001 L002 L003 L004
    L005 utilization adapter_memory_mb gpu_memory_usage memory_efficiency avg_activation_time
    avg_switching_time punica_kernel_enabled
"""
"""The names of the documentation's classes, methods, fields, errors and metrics."""


def test_every_name_of_the_documentation_has_a_row() -> None:
    rows = [line.split("|") for line in DOCUMENT.read_text().splitlines() if line.startswith("|")]
    # The name itself, or an argument of the call here.
    listed = set(re.findall(r"\w+", " ".join(" ".join(row[1:-2]) for row in rows if len(row) > 3)))
    listed |= {word for row in rows for word in re.findall(r"`([^`]+)`", row[-2])}
    assert not [name for name in AUDITED.split() if name not in listed]


def found_at(place: str) -> object:
    module = max((one for one in MODULES if place.startswith(f"{one}.")), key=len)
    found: object = MODULES[module]
    for name in place.removeprefix(f"{module}.").split("."):
        found = getattr(found, name)
    return found


@pytest.mark.parametrize("name", NAMES, ids=lambda one: one.name)
def test_a_documented_name_takes_its_documented_arguments(name: DocumentedName) -> None:
    found = found_at(name.place)
    if not name.arguments:
        return
    parameters = inspect.signature(found).parameters
    taken = [one for one in parameters if one != "self"]
    positional, _, keywords = name.arguments.partition(" * ")
    assert taken[: len(positional.split())] == positional.split()
    assert set(keywords.split()) <= set(taken)


def is_attribute(owner: type, attribute: str) -> bool:
    """Whether instances have an attribute; those that are set without one are arguments."""
    declared = {name for base in owner.__mro__ for name in inspect.get_annotations(base)}
    return (
        hasattr(owner, attribute)
        or attribute in declared
        or attribute in inspect.signature(owner).parameters
    )


OWNED = [
    (*one.name.partition(".")[::2], one)
    for one in NAMES
    if one.name.partition(".")[0] in OWNERS and "(" not in one.name
]


@pytest.mark.parametrize(("owner", "attributes", "name"), OWNED, ids=lambda one: str(one)[:30])
def test_every_attribute_of_a_row_is_there_or_absent_as_stated(
    owner: str, attributes: str, name: DocumentedName
) -> None:
    is_absent = name.difference.startswith("Absent: ")
    for attribute in attributes.split(", ") if attributes else ():
        is_private = attribute.startswith("_")
        assert is_private or is_attribute(OWNERS[owner], attribute) is not is_absent, attribute


@pytest.mark.parametrize(
    "name", [one for one in NAMES if not one.difference], ids=lambda one: one.name
)
def test_a_name_without_a_difference_needs_no_other_arguments(name: DocumentedName) -> None:
    found = found_at(name.place)
    if not callable(found) or (isinstance(found, type) and issubclass(found, Exception)):
        return
    needed = [
        one.name
        for one in inspect.signature(found).parameters.values()
        if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and one.name != "self"
    ]
    assert set(needed) <= set(name.arguments.split())


def test_every_difference_is_a_sentence_and_no_name_is_listed_twice() -> None:
    # A row that the pattern does not match is in no other test.
    assert len(NAMES) >= 142
    assert len({name.name for name in NAMES}) == len(NAMES)
    for name in NAMES:
        assert not name.difference or name.difference.endswith("."), name.name
