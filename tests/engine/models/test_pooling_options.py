"""The task of a saved model, and the settings by which its texts become vectors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, LlamaForCausalLM

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.errors import ModelRefused
from loradock.engine.models.loading import load_model
from loradock.engine.models.pooling_model import PoolingModel
from loradock.engine.models.saved_settings import Pooling, PoolingOptions, Task, pooling_options
from tests.support.engine.engine_examples import tiny_config
from tests.support.models.pooling_examples import (
    CLASSIFIERS,
    EMBEDDERS,
    write_sentence_modules,
)


def options(directory: Path, **fields: Any) -> PoolingOptions:
    return pooling_options(EngineConfig(directory, **fields), "embed")


MEAN = {"pooling_mode_mean_tokens": True}
STEPS = ["Transformer", "Pooling"]


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("pooling_mode_mean_tokens", Pooling.MEAN),
        ("pooling_mode_cls_token", Pooling.CLS),
        ("pooling_mode_lasttoken", Pooling.LAST),
    ],
)
def test_a_sentence_model_specifies_its_pooling(
    tmp_path: Path, flag: str, pooling: Pooling
) -> None:
    steps = ["Transformer", "Pooling", "Normalize"]
    flags = {"word_embedding_dimension": 32, "pooling_mode_max_tokens": False, flag: True}
    directory = write_sentence_modules(tmp_path, steps, **flags)
    assert options(directory) == PoolingOptions(pooling, normalize=True)
    assert options(directory, normalize=False) == PoolingOptions(pooling)
    assert options(directory, pooling="cls").pooling is Pooling.CLS
    write_sentence_modules(tmp_path, steps[:2], **flags)
    assert not options(directory).normalize


@pytest.mark.parametrize(
    ("saved", "pooling"),
    [
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "cls"}, Pooling.CLS),
        ({"pooling_mode": ["lasttoken"]}, Pooling.LAST),
        ({"pooling_mode": "lasttoken", "pooling_mode_mean_tokens": True}, Pooling.LAST),
        ({}, Pooling.MEAN),
        ({"pooling_mode_mean_tokens": False}, Pooling.MEAN),
    ],
)
def test_a_pooling_is_named_or_it_is_the_mean(
    tmp_path: Path, saved: dict[str, Any], pooling: Pooling
) -> None:
    assert options(write_sentence_modules(tmp_path, STEPS, **saved)).pooling is pooling


@pytest.mark.parametrize(
    ("modules", "saved", "words"),
    [
        (["Transformer", "Pooling", "Dense"], MEAN, "Dense"),
        (["Transformer", "Pooling", "Pooling"], MEAN, "in this order"),
        (["Transformer", "Normalize", "Pooling"], MEAN, "in this order"),
        (["custom_st.Transformer", "Pooling"], MEAN, r"custom_st\.Transformer"),
        (["Pooling", "Transformer"], MEAN, "in this order"),
        (STEPS, {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (STEPS, {"pooling_mode": "weightedmean"}, "weightedmean.*served are mean, cls, lasttoken"),
        (STEPS, {"pooling_mode": ["mean", "cls"]}, "'cls', 'mean'.*--pooling"),
        (STEPS, {"pooling_mode_cls_token": True, **MEAN}, "cls_token.*mean_tokens.*--pooling"),
    ],
)
def test_steps_that_are_not_served_stop_the_start(
    tmp_path: Path, modules: list[str], saved: dict[str, Any], words: str
) -> None:
    with pytest.raises(ModelRefused, match=words):
        options(write_sentence_modules(tmp_path, modules, **saved))


def test_weights_in_another_place_stop_the_start(tmp_path: Path) -> None:
    steps = [{"path": "0_Transformer", "type": "sentence_transformers.models.Transformer"}]
    (tmp_path / "modules.json").write_text(json.dumps(steps))
    with pytest.raises(ModelRefused, match=r"'0_Transformer'.*move them there"):
        options(tmp_path)


NEW_READING = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}


@pytest.mark.parametrize(
    ("saved", "tokens_max"),
    [
        ({"max_seq_length": None, "do_lower_case": False}, 0),
        ({"max_seq_length": 17}, 17),
        (NEW_READING, 0),
    ],
)
@pytest.mark.parametrize("kind", ["bert", "xlm-roberta"])
def test_settings_for_reading_texts_are_followed(
    tmp_path: Path, kind: str, saved: dict[str, Any], tokens_max: int
) -> None:
    directory = write_sentence_modules(tmp_path, STEPS, **MEAN)
    (directory / f"sentence_{kind}_config.json").write_text(json.dumps(saved))
    assert options(directory).tokens_max == tokens_max


@pytest.mark.parametrize(
    ("saved", "words"),
    [
        ({"do_lower_case": True}, "do_lower_case: True"),
        ({"transformer_task": "fill-mask"}, "fill-mask"),
        ({"module_output_name": "scores"}, "scores"),
        ({"processing_kwargs": {"text": {"add_special_tokens": False}}}, "add_special_tokens"),
        ({"modality_config": {"image": {}}}, "modality_config: None"),
        ({"modality_config": {"text": {"method": "get_text_features"}}}, "get_text_features"),
        ({"max_seq_length": "many"}, "does not have the format of sentence-transformers"),
        ([], "does not have the format of sentence-transformers"),
    ],
)
def test_settings_for_reading_texts_that_are_not_served_stop_the_start(
    tmp_path: Path, saved: object, words: str
) -> None:
    directory = write_sentence_modules(tmp_path, STEPS, **MEAN)
    (directory / "sentence_bert_config.json").write_text(json.dumps(saved))
    with pytest.raises(ModelRefused, match=words):
        options(directory)


PROMPTS = {"query": "query: ", "document": "", "old": None}


@pytest.mark.parametrize(
    ("name", "prompt"),
    [(None, ""), ("query", "query: "), ("document", ""), ("old", "")],
)
def test_the_default_prompt_is_found_by_its_name(
    tmp_path: Path, name: str | None, prompt: str
) -> None:
    directory = write_sentence_modules(tmp_path, STEPS, **MEAN)
    assert options(directory).prompt == ""
    saved = {"prompts": PROMPTS, "default_prompt_name": name, "similarity_fn_name": "cosine"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(saved))
    assert options(directory) == PoolingOptions(Pooling.MEAN, prompt=prompt)


def test_a_prompt_may_be_left_out_of_the_vector(tmp_path: Path) -> None:
    directory = write_sentence_modules(tmp_path, STEPS, include_prompt=False, **MEAN)
    saved = {"prompts": PROMPTS, "default_prompt_name": "query"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(saved))
    assert options(directory) == PoolingOptions(Pooling.MEAN, prompt="query: ", pools_prompt=False)
    assert not options(directory, pooling="last").pools_prompt
    with pytest.raises(ModelRefused, match=r"leaves its prompt out.*--pooling"):
        options(directory, pooling="cls")


def test_an_unknown_default_prompt_stops_the_start(tmp_path: Path) -> None:
    directory = write_sentence_modules(tmp_path, STEPS, **MEAN)
    saved = {"prompts": PROMPTS, "default_prompt_name": "passage"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(saved))
    with pytest.raises(ModelRefused, match=r"'passage'.*'document', 'old', 'query'"):
        options(directory)


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_only_embedding_has_options(tmp_path: Path, task: Task) -> None:
    directory = write_sentence_modules(tmp_path, ["Transformer", "Dense"])
    assert pooling_options(EngineConfig(directory), task) == PoolingOptions()
    for fields in ({"pooling": "mean"}, {"normalize": False}):
        with pytest.raises(ModelRefused, match=f"this model's task is {task}"):
            pooling_options(EngineConfig(directory, **fields), task)


@pytest.mark.parametrize("text", ["[", "[1]", "{}", '[{"type": "Pooling"}]', '[{"path": ""}]'])
def test_a_malformed_modules_file_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    if text == "{}":
        assert options(tmp_path) == PoolingOptions()
    else:
        with pytest.raises(ModelRefused, match=r"modules\.json"):
            options(tmp_path)


def test_a_task_or_pooling_is_one_of_the_known() -> None:
    for field in ("task", "pooling"):
        with pytest.raises(ValueError, match=f"{field} must be one of auto, .*, got 'sum'"):
            EngineConfig(Path(), **{field: "sum"})


def test_a_saved_model_specifies_its_task(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path / "generate")
    EMBEDDERS[0].save(tmp_path / "embed")
    CLASSIFIERS[0].save(tmp_path / "classify")
    BertForMaskedLM(EMBEDDERS[0].make().config).save_pretrained(tmp_path / "masked")
    tasks = {
        name: load_model(EngineConfig(tmp_path / name), LoRAConfig()).task
        for name in ("generate", "embed", "classify", "masked")
    }
    masked = tasks.pop("masked")
    assert all(task == name for name, task in tasks.items()), tasks
    assert masked == "embed"


@pytest.mark.parametrize("kind", ["SentenceTransformer", "CrossEncoder"])
def test_a_classifier_that_sentence_transformers_saved_is_one(tmp_path: Path, kind: str) -> None:
    CLASSIFIERS[0].save(tmp_path)
    write_sentence_modules(tmp_path, STEPS, **MEAN)
    (tmp_path / "config_sentence_transformers.json").write_text(json.dumps({"model_type": kind}))
    found = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert found.task == ("classify" if kind == "CrossEncoder" else "embed")


def test_a_causal_model_embeds_if_configured_or_saved_to(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    found = load_model(EngineConfig(tmp_path, task="embed"), LoRAConfig())
    assert (found.task, found.pooling) == ("embed", Pooling.LAST)
    write_sentence_modules(tmp_path, ["Transformer", "Pooling"], pooling_mode_mean_tokens=True)
    found = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert (found.task, found.pooling) == ("embed", Pooling.MEAN)
    assert load_model(EngineConfig(tmp_path, task="generate"), LoRAConfig()).task == "generate"


def test_positions_that_start_after_the_padding_are_fewer() -> None:
    limits = {e.name: PoolingModel(e.make(), LoRAConfig()).max_model_len for e in EMBEDDERS}
    assert limits.pop("roberta") == 62
    assert set(limits.values()) == {64}
    for example in EMBEDDERS:
        model = PoolingModel(example.make(), LoRAConfig(), max_model_len=1000)
        assert model.forward([[5] * model.max_model_len]).isfinite().all()


def test_vectors_have_length_one_where_normalize_is_set() -> None:
    vector = torch.tensor([[3.0, 4.0]])
    plain = PoolingModel(EMBEDDERS[0].make(), LoRAConfig())
    unit = PoolingModel(EMBEDDERS[0].make(), LoRAConfig(), options=PoolingOptions(normalize=True))
    assert plain.results(vector).tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(unit.results(vector), torch.tensor([[0.6, 0.8]]))
