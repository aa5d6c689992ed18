"""The generator of the lists of supported models and layers: SUPPORTED.md, and a list in README.md.

`make supported` writes both, and a test checks that they are up to date. Every line comes from the
table that decides it, or from preparing a model of the parity tests. Only the text between the
marks is replaced.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from loradock.engine.adapters.peft_config import FIELD_RULES
from loradock.engine.config import LoRAConfig
from loradock.engine.layers import CONVOLUTION_WRAPPERS, FULLY_SHARDED, WRAPPERS, BaseLayerWithLoRA
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.layout import ModuleKind
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.packing import PACKING_RULES
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.punica import MappingType
from loradock.messages.engine_options import QUANTIZATIONS
from tests.matrix import COLUMNS, read_rows
from tests.parity import read_results
from tests.support.documents import between_marks
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX, Architecture
from tests.support.models.causal_configs import SAME
from tests.support.models.causal_parity import Outcome
from tests.support.models.expert_adapters import make_model
from tests.support.models.expert_examples import SERVED_FAMILIES, SPLIT_FAMILIES
from tests.support.models.image_examples import IMAGE_MODELS
from tests.support.models.image_text_examples import KINDS, MORE_KINDS, build
from tests.support.models.pooling_examples import CLASSIFIERS, EMBEDDERS

ADAPTER_FORMS: Final = (
    ("`rank_pattern`, `alpha_pattern`, rsLoRA", "every layer", "rank and scaling by module"),
    ("`target_parameters`", "experts, linear layers", "fused (3-D) experts and parameters"),
    ("experts one by one", "experts", "stacked by projection, without an option"),
    (
        "`modules_to_save`",
        "linear layers, heads, embeddings, norms that see every token; on several ranks heads of "
        "classifiers and norms",
        "kept whole in the arena; tied modules as `ensure_weight_tying` specifies",
    ),
    (
        "copies of base weights (`save_embedding_layers`, `base_layer`, `original_module`)",
        "every layer whose values are the base's; others as `modules_to_save`, with A and B",
        "compared with the base within the rounding of the coarser dtype; equal ones are ignored",
    ),
    (
        "`trainable_token_indices`",
        "embeddings, heads and what is tied to them, also on several ranks",
        "a row per token",
    ),
    (
        "`use_dora`",
        "linear layers that are not quantised, on one rank",
        "a scale per output, folded with the base weight",
    ),
    ("`lora_bias`", "as `use_dora`", "a shift per output"),
    ("`bias`", "as `use_dora`, and norms", "a shift per output, or the norm with its bias"),
)
"""Forms of adapters beyond a plain A and B."""

REFUSED_FORMS: Final = (
    ("`use_dora`", "experts", "PEFT trains no magnitude for fused experts"),
    ("`use_dora`", "embeddings", "PEFT's scale is one value per token, and not per output"),
    ("`use_dora`", "convolutions, routers, heads of classifiers", "no scale is stored for them"),
    (
        "`use_dora`, `lora_bias`, `bias`",
        "quantised layers",
        "the scale is folded with the base weight, which a quantised layer has only rounded",
    ),
    (
        "`use_dora`, `lora_bias`, `bias`",
        "several ranks",
        "a rank has a part of the weight, and a magnitude is relative to whole rows",
    ),
    (
        "`modules_to_save`",
        "experts, convolutions, any other module",
        "only a product, a lookup or a norm can be replaced for single rows of a batch",
    ),
    (
        "`modules_to_save`",
        "linear layers, heads of language models and embeddings on several ranks",
        "they are split, and a saved module is kept whole",
    ),
    (
        "copies with other values than the base's",
        "layers for which `modules_to_save` is refused, or with a magnitude or a trained bias",
        "the adapter was trained on the copy, and PEFT writes it into the base model",
    ),
    (
        "`trainable_token_indices`",
        "layers that the adapter also adapts or saves; split heads with a bias",
        "PEFT can't combine them either; a rank has only a part of the bias",
    ),
    (
        "lora_A and lora_B",
        "convolutions with groups, with dilation, or with a forward of their own",
        "PEFT's A has no dilation and no forward of its own, and its B has a block per group",
    ),
    (
        "lora_A and lora_B",
        "convolutions of models that are tried out at start (text, images)",
        "the trial has no observation for them",
    ),
)
"""Forms of adapters that are refused for some layers, each with the reason."""

ROOT: Final = Path(__file__).parent.parent
BEGIN: Final = "<!-- supported: generated by make supported -->"
END: Final = "<!-- end of supported -->"

QUANTIZED_ON_CPU: Final = {
    "torchao-int8": "torchao",
    "torchao-int4": "torchao",
    "bitsandbytes-8bit": "bitsandbytes",
    "bitsandbytes-4bit": "bitsandbytes",
}
"""The quantisations whose parity with PEFT is tested on a CPU, and their libraries."""


def full() -> str:
    """Return SUPPORTED.md's tables."""
    return "\n\n".join((*_of_models(), *_of_adapters()))


def _of_models() -> tuple[str, ...]:
    return (
        "## Architectures",
        _table(("model", "`model_type`", "packed", "unpacked"), _served()),
        "These models are compared with PEFT. Any other `transformers` model whose layers pass "
        "the probe at start is served too.",
        "## Every causal architecture",
        _table(("`model_type`", "in process", "served", "rows"), _judged()),
        "`make parity` compares each type that `AutoModelForCausalLM` of the installed "
        "`transformers` knows, as a tiny model with PEFT's `all-linear` adapters of three "
        "ranks and the base in one batch: in process, and served with rows that join and leave "
        "in 24 cached steps. Equal means a relative norm below 1e-5 in float32, and the tokens "
        "of the model's own `generate`. Rows are one left-padded batch (padded), prefilled "
        "alone and decoded together (together), run one by one (single), or computed from their "
        "first token at each step (whole).",
        "## Versions of transformers, torch and Python",
        _table(COLUMNS, (row.cells() for row in read_rows())),
        "`make matrix` installs each environment, and judges every causal architecture that its "
        "version of `transformers` knows; what can't be installed has no row. `oldest` has the "
        "lower bounds of all dependencies, the versions of Python have the newest of all, with "
        "CUDA's libraries and without a card. Python 3.14 and torch 2.14 are allowed and were not "
        "run; every dependency of `loradock[serve]` has a wheel for Python 3.14 (Linux, x86-64).",
        "## Mixtures of experts",
        _table(
            ("model", "`model_type`", "other layers", "experts", "in mixed mode", "ranks"),
            _experts(),
        ),
        "Several ranks share experts by columns, also with `fully_sharded_loras`, or whole "
        "(`expert_parallel`); of experts that return their input (`longcat_flash`), one rank adds "
        "what they return. Experts without a gate (`up_proj`, `down_proj`) have the same format "
        "in both modes. Other experts modules are served if `transformers` specifies their "
        "layout.",
        "## Models that embed or classify",
        _table(("class", "task", "pooling", "wrapped"), _pooled()),
        "An adapter may contain its own classification head (`modules_to_save`).",
        "## Image-text models",
        _table(
            ("`model_type`", "packed", "unpacked", "in the tower", "in the connector"),
            _image_text(),
        ),
        "These models are compared with PEFT with several images of unlike sizes in one batch, "
        f"each row with its own adapter. {_names(IMAGE_MODELS)} are also compared from prompts "
        "that their own processors read. Tower and connector are wrapped with "
        "`enable_tower_connector_lora`. Other image-text models are served if the probes at "
        "start verify that rows with images can be batched, and that layers keep images apart.",
        "## Layers",
        _table(("layer", "role", "wrapper", "slices"), _wrappers()),
        "With `fully_sharded_loras`, the second class replaces the first:",
        _table(("wrapper", "fully sharded"), _sharded()),
        "## Quantised bases",
        _table(("`--quantization`", "on a CPU"), _quantized()),
        "A model that was saved quantised by one of these libraries needs no option, and is "
        "compared in the same way. Wrapped layers call their base layer and never read its "
        "weight, so quantised projections are not packed. Quantised models are served on one "
        "rank. `loradock[quantization]` has the libraries. `transformers` has kernels of FP8 "
        "for GPUs alone: on a CPU `--quantization fp8` is refused, and a model that was saved "
        "in FP8 is served dequantised. Its layer is tested with a product in place of the "
        "kernel, and not yet on a GPU.",
        "## Packed projections",
        _table(("packed layer", "children"), _packing_rules()),
        "Children are packed only if the probe observed that they receive the same tensor.",
    )


def _of_adapters() -> tuple[str, ...]:
    return (
        "## Adapter forms",
        _table(("in an adapter", "served for", "how"), ADAPTER_FORMS),
        "Each is compared with PEFT in `tests/integration`. Forms that need the base weights "
        "are loaded in memory with `model=`. Decode steps with rows of the last six are not "
        "replayed from captured ones.",
        "## Refused for some layers",
        _table(("in an adapter", "layers", "reason"), REFUSED_FORMS),
        "The error names the layer, or the tensor. Names in `modules_to_save` of none of the "
        "model's modules are ignored, as PEFT does.",
        "## Layers without tensors",
        "The layers that `target_modules` names, less those that `layers_to_transform` with "
        "`layers_pattern`, `exclude_modules` or `modules_to_save` leave out, are compared with "
        "the file, and so are `target_parameters`. A name without any tensor is refused. "
        "If only some of its layers have none, as in one file of several, the adapter is "
        "served with a warning that names them: in the log, in the answer to `load`, and in "
        "`list`. Fused experts whose projections `target_modules` names, as in `gate_proj`, "
        "are such layers too: PEFT adapts them by `target_parameters` alone. If a pattern "
        "decides (`target_modules`, `exclude_modules`), nothing is compared, because patterns "
        "are not evaluated.",
        "## Refused in an adapter's config",
        _table(("field", "reason"), ((f"`{rule.field}`", rule.text) for rule in FIELD_RULES)),
    )


def _quantized() -> Iterator[tuple[str, ...]]:
    for name in QUANTIZATIONS:
        compared = "compared with PEFT" if name in QUANTIZED_ON_CPU else "refused"
        yield f"`{name}`", compared


def short() -> str:
    """Return the README's list."""
    served = [architecture.title for architecture in ARCHITECTURES]
    wrappers = dict.fromkeys(f"`{rule.wrapper.__name__}`" for rule in WRAPPERS)
    refused = dict.fromkeys(f"`{rule.field}`" for rule in FIELD_RULES)
    return "\n".join(
        (
            f"- Models, {len(served)} architectures compared with PEFT: {', '.join(served)}.",
            f"- Mixtures of experts: {', '.join(SERVED_FAMILIES.values())}.",
            f"- Image-text models: {_names((*KINDS, *MORE_KINDS))}.",
            f"- Embedding and classifying: {', '.join(_pooled_classes())}.",
            f"- Layers: {', '.join(wrappers)}.",
            f"- Packed: {', '.join(f'`{rule.parent}`' for rule in PACKING_RULES)}.",
            "- Checked in an adapter's config, and refused if their value is not served: "
            f"{', '.join(refused)}.",
        )
    )


def with_text(document: str, text: str) -> str:
    """Return `document` with `text` between its marks; raise `ValueError` without marks."""
    return between_marks(document, BEGIN, END, text)


def _served() -> Iterator[tuple[str, ...]]:
    for architecture in ARCHITECTURES:
        packed, unpacked = map(_names, _layers(architecture))
        yield architecture.title, f"`{architecture.model_type}`", packed, unpacked


def _layers(architecture: Architecture) -> tuple[list[str], list[str]]:
    """Return the last names of a model's packed layers, and of its other wrapped layers."""
    config = LoRAConfig()
    model = CausalModel(architecture.build(), config, max_model_len=CONTEXT_TOKENS_MAX)
    lasts = {name.rpartition(".")[2]: layer for name, layer in model.layers.items()}
    packed = [name for name, layer in lasts.items() if _is_packed(layer)]
    return packed, [name for name in lasts if name not in packed]


def _experts() -> Iterator[tuple[str, ...]]:
    for family, title in SERVED_FAMILIES.items():
        fused, mixed = (
            CausalModel(make_model(family), LoRAConfig(enable_mixed_moe_lora_format=is_mixed))
            for is_mixed in (False, True)
        )
        unpacked = dict.fromkeys(
            name.rpartition(".")[2]
            for name, layer in fused.layers.items()
            if not isinstance(layer, ExpertsWithLoRA) and not _is_packed(layer)
        )
        yield (
            *(title, f"`{family}`", _names(unpacked)),
            *(_names(_expert_columns(model)) for model in (fused, mixed)),
            "one or more" if family in SPLIT_FAMILIES else "one",
        )


def _expert_columns(model: CausalModel) -> list[str]:
    columns = [shape.name for shape in model.shapes if shape.kind is ModuleKind.EXPERTS]
    return list(dict.fromkeys(name.rpartition(".")[2] for name in columns))


def _is_packed(layer: BaseLayerWithLoRA) -> bool:
    return any(shape.name for shape in layer.slice_shapes)


def _pooled() -> Iterator[tuple[str, ...]]:
    for task, examples in (("embed", EMBEDDERS), ("classify", CLASSIFIERS)):
        for example in examples:
            model = PoolingModel(example.make(), LoRAConfig(), task=task)
            pooling = "" if task == "classify" else str(model.pooling)
            wrapped = dict.fromkeys(name.rpartition(".")[2] for name in model.layers)
            yield f"`{type(model.model).__name__}`", task, pooling, _names(wrapped)


def _pooled_classes() -> Iterator[str]:
    return (f"`{type(example.make()).__name__}`" for example in (*EMBEDDERS, *CLASSIFIERS))


def _image_text() -> Iterator[tuple[str, ...]]:
    for kind in (*KINDS, *MORE_KINDS):
        model = CausalModel(build(kind), LoRAConfig(enable_tower_connector_lora=True))
        language = _layers_of(model, MappingType.LANGUAGE)
        packed = [name for name, layer in language.items() if _is_packed(layer)]
        yield (
            *(f"`{kind}`", _names(packed), _names(name for name in language if name not in packed)),
            _names(_layers_of(model, MappingType.TOWER)),
            _names(_layers_of(model, MappingType.CONNECTOR, names=3)),
        )


def _layers_of(
    model: CausalModel, part: MappingType, names: int = 1
) -> dict[str, BaseLayerWithLoRA]:
    """Return a part's layers, by the last `names` parts of their paths."""
    return {
        ".".join(name.split(".")[-names:]): layer
        for name, layer in model.layers.items()
        if model.parts[name] is part
    }


def _judged() -> Iterator[tuple[str, ...]]:
    for name, found in sorted(read_results().items()):
        if found.missing:
            yield f"`{name}`", "not built", found.missing, ""
        else:
            texts = (_verdict(found.manager), _verdict(found.server))
            yield f"`{name}`", *texts, found.mode
    for name, other in SAME.items():
        yield f"`{name}`", f"as `{other}`", f"as `{other}`", ""


def _verdict(outcome: Outcome | None) -> str:
    if outcome is None or outcome.verdict == "equal":
        return "equal"
    text = outcome.text.replace("|", "\\|").replace("\n", " ")
    return outcome.verdict if outcome.verdict == "differs" else f"{outcome.verdict}: {text}"


def _wrappers() -> Iterator[tuple[str, ...]]:
    for rule in (*WRAPPERS, *CONVOLUTION_WRAPPERS):
        summary = (rule.wrapper.__doc__ or "").partition("\n")[0].replace("|", "\\|")
        yield (
            *(f"`{rule.base_type.__name__}`", rule.role.value),
            *(f"`{rule.wrapper.__name__}`", summary),
        )


def _sharded() -> Iterator[tuple[str, ...]]:
    for wrapper, sharded in FULLY_SHARDED.items():
        yield f"`{wrapper.__name__}`", f"`{sharded.__name__}`"


def _packing_rules() -> Iterator[tuple[str, ...]]:
    for rule in PACKING_RULES:
        yield f"`{rule.parent}`", _names(rule.children)


def _names(names: Iterable[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = (head, ("---",) * len(head), *rows)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def main() -> None:
    """Write both documents."""
    for name, text in (("SUPPORTED.md", full()), ("README.md", short())):
        path = ROOT / name
        path.write_text(with_text(path.read_text(), text))


if __name__ == "__main__":
    main()
