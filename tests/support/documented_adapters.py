"""The documented names of adapters and requests; see `tests.documented_names`."""

from typing import Final

from tests.support.documented_name import DocumentedName

MODEL: Final = (
    DocumentedName(
        "LoRAModel",
        "loradock.engine.adapters:LoRAModel",
        "lora_model_id rank loras is_3d_lora_weight",
        "Ids start at 1, because 0 is the base model in every mapping.",
    ),
    DocumentedName("LoRAModel.clone", "loradock.engine.adapters:LoRAModel.clone", "lora_model_id"),
    DocumentedName(
        "LoRAModel.get_lora", "loradock.engine.adapters:LoRAModel.get_lora", "module_name"
    ),
    DocumentedName(
        "LoRAModel.check_lora_name",
        "loradock.engine.adapters:LoRAModel.check_lora_name",
        "module_name",
    ),
    DocumentedName(
        "LoRAModel.from_lora_tensors",
        "loradock.engine.adapters:LoRAModel.from_lora_tensors",
        "lora_model_id tensors peft_helper device dtype model_vocab_size weights_mapper "
        "skip_prefixes",
        "`model=` in addition: with a manager, everything is checked against its model at once, "
        "and fused experts can be read, whose meaning follows from the model.",
    ),
    DocumentedName(
        "LoRAModel.from_local_checkpoint",
        "loradock.engine.adapters:LoRAModel.from_local_checkpoint",
        "lora_dir expected_lora_modules peft_helper * lora_model_id device dtype model_vocab_size "
        "weights_mapper tensorizer_config_dict skip_prefixes moe_ep_spec",
        "The default device is the CPU, because managers copy adapters from the host. Pickled "
        "files need `allow_pickled=True`, because a pickle may run code. `model=` as above.",
    ),
    DocumentedName(
        "MoEEPLoadSpec",
        "loradock.engine.adapters:MoEEPLoadSpec",
        "ep_rank local_num_experts global_num_experts",
    ),
    DocumentedName(
        "_is_remote_expert_key",
        "loradock.engine.adapters:MoEEPLoadSpec.is_remote",
        "name",
        "A method of the specification, which alone knows the ranks: `spec.is_remote(name)`.",
    ),
    DocumentedName("get_lora_id", "loradock.engine.adapters:get_lora_id"),
    DocumentedName(
        "LoRAModel._should_skip_module",
        "loradock.engine.adapters.target:ModulePathResolver.skips",
        "path",
        "A method of the resolver of paths, which all loaders share.",
    ),
    DocumentedName(
        "LoRALayerWeights",
        "loradock.engine.adapters:LoRALayerWeights",
        "module_name rank lora_alpha lora_a lora_b scaling",
        "Shapes are checked at construction, so that each pair can be multiplied: a wrong one "
        "is a `ValueError` there, and not at the first forward.",
    ),
    DocumentedName(
        "LoRALayerWeights.optimize, input_dim, output_dim, is_packed",
        "loradock.engine.adapters:LoRALayerWeights.optimize",
    ),
    DocumentedName(
        "LoRALayerWeights.create_dummy_lora_weights",
        "loradock.engine.adapters:LoRALayerWeights.create_dummy_lora_weights",
        "module_name input_dim output_dim rank dtype device",
    ),
    DocumentedName(
        "LoRALayerWeights.from_config",
        "loradock.engine.adapters:LoRALayerWeights",
        "module_name rank lora_alpha lora_a lora_b",
        "Absent: weights have their tensors from the start, because their shapes are checked then.",
    ),
    DocumentedName(
        "PackedLoRALayerWeights.pack",
        "loradock.engine.adapters:PackedLoRALayerWeights.pack",
        "loras",
        "The children's tensors are shared and not scaled, because an adapter that was passed is "
        "not changed; `optimize()` scales them.",
    ),
    DocumentedName(
        "PackedLoRALayerWeights.pack_moe",
        "loradock.engine.adapters:PackedLoRALayerWeights.pack_moe",
        "loras module_name is_non_gated_moe",
        "Experts without a gate have two slices, because nothing is stored twice. Weights that are "
        "passed are not changed.",
    ),
    DocumentedName(
        "PEFTHelper",
        "loradock.engine.adapters:PEFTHelper",
        "r lora_alpha target_modules",
        "Frozen. Fields that no adapter here depends on are absent.",
    ),
    DocumentedName(
        "PEFTHelper.from_local_dir",
        "loradock.engine.adapters:PEFTHelper.from_local_dir",
        "lora_path max_position_embeddings tensorizer_config_dict",
    ),
    DocumentedName(
        "PEFTHelper.from_dict", "loradock.engine.adapters:PEFTHelper.from_dict", "config"
    ),
    DocumentedName(
        "PEFTHelper.validate_legal",
        "loradock.engine.adapters:PEFTHelper.validate_legal",
        "lora_config",
        "It checks the rank; every other rule is applied when the config is read, so that no "
        "program can forget it: `from_local_dir` raises `AdapterConfigRefused`, a `ValueError`.",
    ),
    DocumentedName(
        "PEFTHelper.vllm_lora_scaling_factor, vllm_max_position_embeddings",
        "loradock.engine.adapters:PEFTHelper.vllm_lora_scaling_factor",
    ),
    DocumentedName(
        "LoRARequest",
        "loradock.engine.adapters:LoRARequest",
        "lora_name lora_int_id lora_path base_model_name load_inplace is_3d_lora_weight "
        "tensorizer_config_dict",
        "Frozen, and equal by all fields: by the name alone, another path under a known name would "
        "be taken for the known adapter. With `is_3d_lora_weight` the files are refused unless "
        "their experts are fused; False, the default, leaves it to them. Files that changed less "
        "than a second ago are waited for.",
    ),
    DocumentedName(
        "LoRARequest.adapter_id, name, path, tensorizer_config_dict",
        "loradock.engine.adapters:LoRARequest.adapter_id",
    ),
    DocumentedName(
        "get_adapter_absolute_path",
        "loradock.engine.adapters:get_adapter_absolute_path",
        "lora_path",
        "Nothing is downloaded: a path means a directory of this machine.",
    ),
    DocumentedName(
        "WeightsMapper",
        "loradock.engine.adapters:WeightsMapper",
        "orig_to_new_substr orig_to_new_prefix orig_to_new_suffix orig_to_new_regex",
        "Rules apply to module paths, because `lora_A` and `lora_B` are cut off first: map "
        "`model.layers`, not `.lora_A.weight`. Functions and mappings of prefixes are taken too; "
        "`orig_to_new_renaming` is refused.",
    ),
)
