"""What a saved model is for, and how its texts become vectors."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BertForMaskedLM, LlamaForCausalLM

from engine.config import EngineConfig, LoRAConfig
from engine.errors import ModelRefused
from engine.model import load_model
from engine.pooled_model import PooledModel
from engine.pooling_options import Pooling, PoolingOptions, pooling_options
from tests.engine_examples import tiny_config
from tests.pooling_examples import CLASSIFIERS, EMBEDDERS


def sentence_model(directory: Path, modules: list[str], **pooling: Any) -> Path:
    """What sentence-transformers writes beside a model."""
    directory.mkdir(exist_ok=True)
    steps = [
        {"idx": at, "path": f"{at}_{name}" if at else "", "type": f"st.models.{name}"}
        for at, name in enumerate(modules)
    ]
    (directory / "modules.json").write_text(json.dumps(steps))
    (directory / "1_Pooling").mkdir(exist_ok=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    return directory


def options(directory: Path, **fields: Any) -> PoolingOptions:
    return pooling_options(EngineConfig(directory, **fields))


@pytest.mark.parametrize(
    ("flag", "pooling"),
    [
        ("pooling_mode_mean_tokens", Pooling.MEAN),
        ("pooling_mode_cls_token", Pooling.CLS),
        ("pooling_mode_lasttoken", Pooling.LAST),
    ],
)
def test_a_sentence_model_says_how_it_pools(tmp_path: Path, flag: str, pooling: Pooling) -> None:
    steps = ["Transformer", "Pooling", "Normalize"]
    flags = {"word_embedding_dimension": 32, "pooling_mode_max_tokens": False, flag: True}
    directory = sentence_model(tmp_path, steps, **flags)
    assert options(directory) == PoolingOptions(pooling, normalize=True)
    assert options(directory, normalize=False) == PoolingOptions(pooling)
    assert options(directory, pooling="cls").pooling is Pooling.CLS
    (directory / "sentence_bert_config.json").write_text('{"max_seq_length": 17}')
    assert options(directory).tokens_max == 17
    sentence_model(tmp_path, steps[:2], **flags)
    assert not options(directory).normalize


@pytest.mark.parametrize(
    ("modules", "flags", "words"),
    [
        (["Transformer", "Pooling", "Dense"], {"pooling_mode_cls_token": True}, "Dense"),
        (["Transformer", "Pooling"], {"pooling_mode_max_tokens": True}, "pooling_mode_max_tokens"),
        (["Transformer", "Pooling"], {}, "one is served"),
        (
            ["Transformer", "Pooling"],
            {"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True},
            "cls_token.*mean_tokens.*--pooling",
        ),
    ],
)
def test_what_a_sentence_model_needs_and_is_not_served_stops_the_start(
    tmp_path: Path, modules: list[str], flags: dict[str, bool], words: str
) -> None:
    with pytest.raises(ModelRefused, match=words):
        options(sentence_model(tmp_path, modules, **flags))


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('{"do_lower_case": true}', "lowers the case"),
        ('{"max_seq_length": "many"}', "not as sentence-transformers writes it"),
        ("[]", "not as sentence-transformers writes it"),
    ],
)
def test_how_a_sentence_model_reads_texts_is_followed_or_stops_the_start(
    tmp_path: Path, text: str, words: str
) -> None:
    flags = {"pooling_mode_mean_tokens": True}
    directory = sentence_model(tmp_path, ["Transformer", "Pooling"], **flags)
    reading = directory / "sentence_bert_config.json"
    reading.write_text('{"max_seq_length": null, "do_lower_case": false}')
    assert options(directory).tokens_max == 0
    reading.write_text(text)
    with pytest.raises(ModelRefused, match=words):
        options(directory)


@pytest.mark.parametrize("text", ["[", "[1]", "{}", '[{"type": "Pooling"}]', '[{"path": ""}]'])
def test_an_unsound_modules_file_is_told(tmp_path: Path, text: str) -> None:
    (tmp_path / "modules.json").write_text(text)
    if text == "{}":
        assert options(tmp_path) == PoolingOptions()
    else:
        with pytest.raises(ModelRefused, match=r"modules\.json"):
            options(tmp_path)


def test_a_choice_is_one_of_the_known() -> None:
    for field in ("task", "pooling"):
        with pytest.raises(ValueError, match=f"{field} is 'sum'; auto, or one of"):
            EngineConfig(Path(), **{field: "sum"})


def test_a_saved_model_says_what_it_is_for(tmp_path: Path) -> None:
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


def test_a_causal_model_embeds_where_it_is_told_to_or_was_saved_to(tmp_path: Path) -> None:
    torch.manual_seed(0)
    LlamaForCausalLM(tiny_config()).save_pretrained(tmp_path)
    found = load_model(EngineConfig(tmp_path, task="embed"), LoRAConfig())
    assert (found.task, found.pooling) == ("embed", Pooling.LAST)
    sentence_model(tmp_path, ["Transformer", "Pooling"], pooling_mode_mean_tokens=True)
    found = load_model(EngineConfig(tmp_path), LoRAConfig())
    assert (found.task, found.pooling) == ("embed", Pooling.MEAN)
    assert load_model(EngineConfig(tmp_path, task="generate"), LoRAConfig()).task == "generate"


def test_positions_that_count_on_from_the_padding_are_fewer() -> None:
    limits = {e.name: PooledModel(e.make(), LoRAConfig()).context_tokens_max for e in EMBEDDERS}
    assert limits == {"bert": 64, "roberta": 62, "eurobert": 64, "qwen3": 64}
    for example in EMBEDDERS:
        model = PooledModel(example.make(), LoRAConfig(), context_tokens_max=1000)
        assert model.forward([[5] * model.context_tokens_max]).isfinite().all()


def test_vectors_have_length_one_where_that_is_said() -> None:
    vector = torch.tensor([[3.0, 4.0]])
    plain = PooledModel(EMBEDDERS[0].make(), LoRAConfig())
    unit = PooledModel(EMBEDDERS[0].make(), LoRAConfig(), options=PoolingOptions(normalize=True))
    assert plain.results(vector).tolist() == [[3.0, 4.0]]
    torch.testing.assert_close(unit.results(vector), torch.tensor([[0.6, 0.8]]))
