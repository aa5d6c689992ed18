"""Properties of module paths: a known path means itself; others mean one module, or are refused."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    BertConfig,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    PreTrainedModel,
)

from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.target import (
    AdapterTarget,
    Equivalence,
    ModulePathResolver,
    equivalences_of,
)
from loradock.engine.adapters.tensor_names import EMBEDDING_NAMES
from loradock.engine.config import LoRAConfig
from loradock.engine.errors import AdapterDoesNotFit
from loradock.engine.layout import ModuleKind, ModuleShape
from tests.support.models.architectures import ARCHITECTURES

TEXT: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 50,
}
LLAMA = LlamaConfig(**TEXT, num_labels=3)
BERT = BertConfig(**TEXT)
LLAVA = LlavaConfig(
    vision_config=CLIPVisionConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        image_size=16,
        patch_size=8,
    ),
    text_config=LLAMA,
)
LORA = LoRAConfig(max_lora_rank=8, lora_dtype="float32")
PATHS = st.lists(st.sampled_from("ab"), min_size=1, max_size=4).map(".".join)


@given(st.lists(PATHS), PATHS, st.lists(st.builds(Equivalence, PATHS, PATHS)))
def test_a_known_path_means_itself_and_another_means_one_module_at_most(
    modules: list[str], path: str, equivalences: list[Equivalence]
) -> None:
    resolver = ModulePathResolver(modules, equivalences)
    for module in modules:
        assert resolver.resolve(module) == module
    try:
        found = resolver.resolve(path)
    except AdapterDoesNotFit:
        return
    is_known = any(f"{module}.".startswith(f"{found}.") for module in modules)
    assert found == path or is_known


def test_paths_are_renamed_first_and_prefixes_skipped() -> None:
    resolver = ModulePathResolver(
        ["x.q"], [Equivalence("m.", "x.")], lambda p: p.replace("wq", "q"), ["mtp."]
    )
    assert resolver.resolve("m.wq") == resolver.resolve("x.wq") == "x.q"
    assert resolver.resolve("m.k") == "m.k"
    assert resolver.skips("mtp.q")
    assert not resolver.skips("m.mtp.q")


def test_an_ambiguous_path_is_refused_with_its_candidates() -> None:
    resolver = ModulePathResolver(["a.q", "b.q"], [Equivalence("", "a."), Equivalence("", "b.")])
    with pytest.raises(AdapterDoesNotFit, match=r"q may be a\.q or b\.q"):
        resolver.resolve("q")


@dataclass(frozen=True)
class Model:
    """A model's modules, and the alternative paths for them."""

    modules: dict[str, ModuleShape]
    equivalences: tuple[Equivalence, ...]


def served(model: PreTrainedModel) -> Model:
    """Return a model's linear layers, embeddings and heads by path."""
    kinds: dict[str, tuple[int, int, ModuleKind]] = {}
    for name, layer in model.named_modules():
        if isinstance(layer, torch.nn.Linear):
            is_head = name.rpartition(".")[2] in ("score", "classifier")
            kind = ModuleKind.HEAD if is_head else ModuleKind.LINEAR
            kinds[name] = (layer.in_features, layer.out_features, kind)
        elif isinstance(layer, torch.nn.Embedding):
            widths = (layer.num_embeddings, layer.embedding_dim)
            kinds[name] = (*widths, ModuleKind.EMBEDDING)
    shapes = {
        name: ModuleShape(name, a, b, index, kind=kind)
        for index, (name, (a, b, kind)) in enumerate(kinds.items())
    }
    return Model(shapes, equivalences_of(model))


def load(path: Path, model: Model) -> LoadedAdapter:
    target = AdapterTarget(model.modules, LORA, model.equivalences)
    return read_adapter(path.name, [path.parent], target)


def save(model: PreTrainedModel, path: Path, **config: Any) -> Path:
    torch.manual_seed(0)
    peft = get_peft_model(model, LoraConfig(r=4, **config))
    # Copies would be compared with the values of the other model.
    peft.save_pretrained(path, save_embedding_layers=False)
    return path


Q = {"target_modules": ["q_proj"]}
OTHER_CLASSES: dict[str, tuple[Any, Any, Any, Any, dict[str, Any], str]] = {
    "text to embedding": (AutoModelForCausalLM, LLAMA, AutoModel, LLAMA, Q, "layers.0"),
    "embedding to classes": (
        *(AutoModel, LLAMA, AutoModelForSequenceClassification, LLAMA, Q),
        "model.layers.0",
    ),
    "classes to embedding, bert": (
        *(AutoModelForSequenceClassification, BERT, AutoModel, BERT),
        {"target_modules": ["query"]},
        "encoder.layer.0",
    ),
    "text to multimodal": (
        *(AutoModelForCausalLM, LLAMA, AutoModelForImageTextToText, LLAVA, Q),
        "model.language_model.layers.0",
    ),
    "text embedding to multimodal embedding": (
        *(AutoModel, LLAMA, AutoModel, LLAVA, {"target_modules": ["q_proj", "embed_tokens"]}),
        "language_model.layers.0",
    ),
    "head to multimodal": (
        *(AutoModelForCausalLM, LLAMA, AutoModelForImageTextToText, LLAVA),
        {"target_modules": ["q_proj", "lm_head"]},
        "lm_head",
    ),
}


@pytest.mark.parametrize("name", OTHER_CLASSES)
def test_an_adapter_from_another_class_of_the_same_model_is_found(
    name: str, tmp_path: Path
) -> None:
    trained, trained_config, other, config, peft, expected = OTHER_CLASSES[name]
    base = trained.from_config(trained_config)
    own = served(base)
    path = save(base, tmp_path / "a", **peft)
    model = served(other.from_config(config))
    loaded = load(path, model)
    assert any(module.startswith(expected) for module in loaded.model.loras)
    assert loaded.model.loras.keys() <= model.modules.keys()
    assert load(path, own).model.loras.keys() <= own.modules.keys()


def test_a_text_model_has_no_alternative_paths(tmp_path: Path) -> None:
    path = save(AutoModel.from_config(LLAMA), tmp_path / "a", **Q)
    model = served(AutoModelForCausalLM.from_config(LLAMA))
    assert model.equivalences == ()
    with pytest.raises(AdapterDoesNotFit, match="not wrapped in this model"):
        load(path, model)


def test_older_paths_are_resolved() -> None:
    model = served(AutoModelForImageTextToText.from_config(LLAVA))
    resolver = ModulePathResolver(model.modules, model.equivalences)
    text, tower = "layers.0.self_attn.q_proj", "vision_tower.encoder.layers.0.self_attn.q_proj"
    for old, new in {
        f"language_model.model.{text}": f"model.language_model.{text}",
        f"model.{text}": f"model.language_model.{text}",
        "language_model.lm_head": "lm_head",
        tower: f"model.{tower}",
        f"model.{tower}": f"model.{tower}",
        tower.replace(".", ".vision_model.", 1): f"model.{tower}",
        f"model.{tower.replace('.', '.vision_model.', 1)}": f"model.{tower}",
        "multi_modal_projector.linear_1": "model.multi_modal_projector.linear_1",
        "model.layers.7.self_attn.q_proj": "model.layers.7.self_attn.q_proj",
    }.items():
        assert resolver.resolve(old) == new


def test_embeddings_and_heads_of_every_architecture_are_known_by_name() -> None:
    """PEFT saves copies of an embedding and a head under their names in the model."""
    for architecture in ARCHITECTURES:
        with torch.device("meta"):
            model = architecture.build(layers=1)
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        paths = [path for path, module in model.named_modules() if module in ends]
        assert paths
        for path in paths:
            assert path.rpartition(".")[2] in EMBEDDING_NAMES, architecture.model_type
