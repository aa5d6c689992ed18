"""The documented names of the configuration, layers and errors; see `tests.documented_names`."""

from typing import Final

from tests.support.documented_name import DocumentedName

CONFIG: Final = (
    DocumentedName(
        "LoRAConfig",
        "loradock.engine.config:LoRAConfig",
        "max_lora_rank max_loras fully_sharded_loras max_cpu_loras lora_dtype target_modules "
        "default_mm_loras enable_tower_connector_lora specialize_active_lora "
        "enable_mixed_moe_lora_format",
        "Frozen, because values are checked together, once: use `dataclasses.replace` to change "
        "one. An empty `target_modules` is refused, because "
        "it would wrap nothing. A target that names no layer is a `ModelRefused`, a `ValueError`. "
        "The second stream is the field `dual_stream`, whose default is the environment variable.",
    ),
    DocumentedName(
        "LoRAConfig.compute_hash",
        "loradock.engine.config:LoRAConfig.compute_hash",
        "",
        "It also covers `specialize_active_lora`, `dual_stream` and `batch_invariant`, which "
        "change the computation, so hashes of vLLM and of LoRADock differ.",
    ),
    DocumentedName(
        "LoRAConfig.verify_with_model_config",
        "loradock.engine.config:LoRAConfig.verify_with_model_config",
        "model_config",
        "In place, and it returns the configuration too. Managers use `resolved_for`, a copy, so "
        "that one configuration can serve models of several dtypes.",
    ),
    DocumentedName(
        "default_mm_loras without a request",
        "loradock.engine.manager:WorkerLoRAManager.default_request",
        "modalities lora_int_id",
        "Ids and names are the documented ones. The request has to be made by the caller, because "
        "there is no `LLM` class here; `loradock serve` applies it to prompts with images, the "
        "only other modality that its prompts have.",
    ),
    DocumentedName(
        "VLLM_LORA_ENABLE_DUAL_STREAM",
        "loradock.engine.config:DUAL_STREAM_VARIABLE",
        "",
        "The default of `LoRAConfig.dual_stream` where there is CUDA; elsewhere there is no second "
        "stream, and `dual_stream=True` is refused.",
    ),
)

_BASE: Final = "loradock.engine.layers:BaseLayerWithLoRA"
LAYERS: Final = (
    DocumentedName(
        f"{_BASE.partition(':')[2]}.set_lora", f"{_BASE}.set_lora", "index lora_a lora_b"
    ),
    DocumentedName("BaseLayerWithLoRA.reset_lora", f"{_BASE}.reset_lora", "index"),
    DocumentedName("BaseLayerWithLoRA.slice_lora_a", f"{_BASE}.slice_lora_a", "lora_a"),
    DocumentedName("BaseLayerWithLoRA.slice_lora_b", f"{_BASE}.slice_lora_b", "lora_b"),
    DocumentedName("BaseLayerWithLoRA.set_mapping", f"{_BASE}.set_mapping", "punica_wrapper"),
    DocumentedName(
        "BaseLayerWithLoRA.create_lora_weights",
        f"{_BASE}.create_lora_weights",
        "arena columns",
        "The arena and the layer's columns take the place of the configurations, because a layer "
        "has no buffers: all weights are in one arena, at exact ranks.",
    ),
    DocumentedName(
        "BaseLayerWithLoRA.can_replace_layer",
        f"{_BASE}.can_replace_layer",
        "layer",
        "It takes the layer alone: the configuration decides in the table `WRAPPERS`, and names in "
        "`PACKING_RULES`, so that a class of your own answers for its layer only.",
    ),
    *(
        DocumentedName(f"BaseLayerWithLoRA.{name}", f"{_BASE}.{name}")
        for name in (
            *("tp_rank", "tp_size", "n_slices", "input_size", "output_size", "output_sizes"),
            "output_slices",
        )
    ),
    DocumentedName(
        "set_lora(..., embeddings_tensor, bias)",
        f"{_BASE}.set_lora",
        "index lora_a lora_b",
        "The two are not accepted, as in newer vLLM: adapters with additional tokens are refused, "
        "and biases have columns of their own, which loading an adapter fills.",
    ),
    DocumentedName(
        "BaseLayerWithLoRA.output_ids, q_proj_shard_size, kv_proj_shard_size, q_shard_id, "
        "kv_shard_id",
        f"{_BASE}.slice_shapes",
        "",
        "Absent: each slice's shape has its shard, which may be several ranges, which one number "
        "and an id can't name. Read `slice_shapes[n].shard`.",
    ),
    DocumentedName(
        "BaseLayerWithLoRA.lora_a_stacked, lora_b_stacked",
        f"{_BASE}.lora_a_stacked",
        "",
        "Views of the arena by slice and slot, at each adapter's rank, because nothing is padded; "
        "of experts also `w13_…` and `w2_…`.",
    ),
    DocumentedName(
        "expand_packed_lora",
        "loradock.engine.layers:MergedColumnParallelLinearWithLoRA.expand_packed_lora",
        "lora_a lora_b",
    ),
    *(
        DocumentedName(name, f"loradock.engine.layers:{name}", "base_layer")
        for name in (
            "ReplicatedLinearWithLoRA",
            "ColumnParallelLinearWithLoRA",
            "ColumnParallelLinearWithShardedLoRA",
            "MergedColumnParallelLinearWithLoRA",
            "MergedColumnParallelLinearWithShardedLoRA",
            "MergedColumnParallelLinearVariableSliceWithLoRA",
            "QKVParallelLinearWithLoRA",
            "QKVParallelLinearWithShardedLoRA",
            "MergedQKVParallelLinearWithLoRA",
            "MergedQKVParallelLinearWithShardedLoRA",
            "RowParallelLinearWithLoRA",
            "RowParallelLinearWithShardedLoRA",
            "VocabParallelEmbeddingWithLoRA",
        )
    ),
    DocumentedName(
        "LogitsProcessorWithLoRA",
        "loradock.engine.layers:LogitsProcessorWithLoRA",
        "base_layer",
        "It wraps the head's linear layer, because `transformers` has no logits processor of that "
        "kind. The vocabulary has no bound; vLLM's is that of its kernels.",
    ),
    DocumentedName(
        "LogitsProcessorWithLoRA.hidden_size, dtype, device, scale, soft_cap, _get_logits, "
        "sharded_to_full_mapping",
        "loradock.engine.layers:LogitsProcessorWithLoRA.weight",
        "",
        "Absent: they are a logits processor's, which `transformers` lacks. `weight`, `input_size` "
        "and `output_size` are the head's.",
    ),
    DocumentedName(
        "FusedMoEWithLoRA.set_lora",
        "loradock.engine.layers:FusedMoEWithLoRA.set_lora",
        "index lora_a lora_b",
        "In the order w1, w2, w3; a list of two is w13 and w2, because some adapters have one "
        "tensor for gate and up.",
    ),
    *(
        DocumentedName(
            f"FusedMoEWithLoRA.{name}", f"loradock.engine.layers:FusedMoEWithLoRA.{name}"
        )
        for name in ("hidden_size", "global_num_experts", "local_num_experts", "ep_rank", "use_ep")
    ),
    DocumentedName(
        "FusedMoEWithLoRA.w13_input_size, w13_output_size, w2_input_size, w2_output_size, "
        "quant_method, runner, is_internal_router",
        "loradock.engine.layers:FusedMoEWithLoRA.slice_shapes",
        "",
        "Absent: the base layer computes its own product, quantised or not. Read the sizes from "
        "`slice_shapes`.",
    ),
    DocumentedName(
        "_slice_w13_b",
        "loradock.engine.layers:FusedMoEWithLoRA.slice_lora_b",
        "lora_b",
        "Public, and by the layout of the experts, which may interleave gate and up.",
    ),
    DocumentedName(
        "_verify_ep_fs",
        "loradock.engine.errors:ModelRefused",
        "",
        "A `ModelRefused`, which is a ValueError, and no assertion, which `python -O` skips.",
    ),
    DocumentedName(
        "FusedMoE3DWithLoRA",
        "loradock.engine.layers:FusedMoE3DWithLoRA",
        "base_layer",
        "It serves adapters of both formats; `enable_mixed_moe_lora_format` stores both alike.",
    ),
    DocumentedName(
        "adapter_enabled",
        "loradock.engine.layers:FusedMoEWithLoRA.adapter_enabled",
        "slot",
        "A method: the directory on the host has the answer, so no tensor is kept. Write "
        "`adapter_enabled(slot)` for `adapter_enabled[slot]`.",
    ),
    DocumentedName(
        "forward of linear layers",
        "loradock.engine.layers:ReplicatedLinearWithLoRA.forward",
        "",
        "Takes the base layer's own arguments and returns its output alone instead of output and "
        "bias, because models of `transformers` are called, which expect that.",
    ),
)

ERRORS: Final = tuple(
    DocumentedName(f"{code} ({built_in})", f"loradock.engine.errors:{name}", "", difference)
    for code, built_in, name, difference in (
        (
            "L001",
            "RuntimeError",
            "NoRoom",
            "`NoFreeSlot`, of `activate_adapter`, is a ValueError too, as documented there.",
        ),
        ("L002", "FileNotFoundError", "AdapterNotFound", ""),
        ("L003", "ValueError", "AdapterDoesNotFit", ""),
        ("L004", "RuntimeError", "DeviceOutOfMemory", ""),
        ("L005", "ValueError", "AdapterConfigRefused", ""),
        (
            "Failed to add LoRA",
            "RuntimeError",
            "EngineError",
            "The error has the code and the reason; there is no general one.",
        ),
        ("an unknown id", "KeyError", "UnknownAdapter", "L006."),
        ("pin of an unknown id", "ValueError", "NotRegistered", "L006, a KeyError too."),
    )
)
