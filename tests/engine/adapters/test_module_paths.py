"""Laws of names: a path that is there means itself; what PEFT saved elsewhere is found or told."""

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

from engine.adapters import LoadedAdapter, read_adapter
from engine.adapters.compatibility import ModelSide
from engine.adapters.module_paths import Equivalence, Naming, equivalences_of
from engine.adapters.tensor_names import EMBEDDING_NAMES
from engine.config import LoRAConfig
from engine.errors import AdapterDoesNotFit
from engine.layout import ModuleKind, ModuleShape
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
def test_a_path_that_is_there_means_itself_and_another_never_two(
    modules: list[str], path: str, equivalences: list[Equivalence]
) -> None:
    naming = Naming(modules, equivalences)
    for module in modules:
        assert naming.resolve(module) == module
    try:
        found = naming.resolve(path)
    except AdapterDoesNotFit:
        return
    is_there = any(f"{module}.".startswith(f"{found}.") for module in modules)
    assert found == path or is_there


def test_the_callers_renaming_comes_first_and_prefixes_are_skipped() -> None:
    naming = Naming(["x.q"], [Equivalence("m.", "x.")], lambda p: p.replace("wq", "q"), ["mtp."])
    assert naming.resolve("m.wq") == naming.resolve("x.wq") == "x.q"
    assert naming.resolve("m.k") == "m.k"
    assert naming.skips("mtp.q")
    assert not naming.skips("m.mtp.q")


def test_what_may_be_two_modules_is_told() -> None:
    naming = Naming(["a.q", "b.q"], [Equivalence("", "a."), Equivalence("", "b.")])
    with pytest.raises(AdapterDoesNotFit, match=r"q may be a\.q or b\.q"):
        naming.resolve("q")


@dataclass(frozen=True)
class Model:
    """A model as an adapter sees it: what can be adapted, and how else it may be called."""

    modules: dict[str, ModuleShape]
    equivalences: tuple[Equivalence, ...]


def served(model: PreTrainedModel) -> Model:
    """Linear layers and embeddings by path; a head that is saved whole as such."""
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
    side = ModelSide(model.modules, LORA, model.equivalences)
    return read_adapter(path.name, [path.parent], side)


def save(model: PreTrainedModel, path: Path, **config: Any) -> Path:
    torch.manual_seed(0)
    get_peft_model(model, LoraConfig(r=4, **config)).save_pretrained(path)
    return path


Q = {"target_modules": ["q_proj"]}
ELSEWHERE: dict[str, tuple[Any, Any, Any, Any, dict[str, Any], str]] = {
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


@pytest.mark.parametrize("name", ELSEWHERE)
def test_an_adapter_from_another_class_of_the_same_model_is_found(
    name: str, tmp_path: Path
) -> None:
    trained, trained_config, other, config, peft, expected = ELSEWHERE[name]
    base = trained.from_config(trained_config)
    own = served(base)
    path = save(base, tmp_path / "a", **peft)
    model = served(other.from_config(config))
    loaded = load(path, model)
    assert any(module.startswith(expected) for module in loaded.model.loras)
    assert loaded.model.loras.keys() <= model.modules.keys()
    assert load(path, own).model.loras.keys() <= own.modules.keys()


def test_a_text_model_finds_nothing_that_is_not_called_as_it_is(tmp_path: Path) -> None:
    path = save(AutoModel.from_config(LLAMA), tmp_path / "a", **Q)
    model = served(AutoModelForCausalLM.from_config(LLAMA))
    assert model.equivalences == ()
    with pytest.raises(AdapterDoesNotFit, match="not wrapped in this model"):
        load(path, model)


def test_paths_of_the_time_before_the_prefix_are_found() -> None:
    model = served(AutoModelForImageTextToText.from_config(LLAVA))
    naming = Naming(model.modules, model.equivalences)
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
        assert naming.resolve(old) == new


def test_what_peft_saves_beside_adapters_is_known_by_name_in_every_architecture() -> None:
    """PEFT calls the copies of an embedding and a head as the model calls these."""
    for architecture in ARCHITECTURES:
        if not architecture.refused:
            with torch.device("meta"):
                model = architecture.build(layers=1)
            ends = (model.get_input_embeddings(), model.get_output_embeddings())
            paths = [path for path, module in model.named_modules() if module in ends]
            assert paths
            for path in paths:
                assert path.rpartition(".")[2] in EMBEDDING_NAMES, architecture.model_type
