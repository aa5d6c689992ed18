"""An adapter's tokenizer is compared with the model's; what differs is a warning of its check."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, AutoTokenizer

from loradock.engine.adapters import read_adapter, saved_tokenizer
from loradock.engine.adapters.saved_tokenizer import BaseTokenizer
from loradock.engine.config import LoRAConfig
from loradock.engine.models.held_model import prepare_loaded
from tests.support.parallel.processes import TINY

MODEL = TINY / "model"
LORA = LoRAConfig(max_lora_rank=8)


@pytest.fixture
def trained(tmp_path):
    """An adapter and its tokenizer, as trainers save them."""
    model = AutoModelForCausalLM.from_pretrained(MODEL)
    config = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    get_peft_model(model, config).save_pretrained(tmp_path / "adapter")
    tokenizer = AutoTokenizer.from_pretrained(MODEL)

    def save(**changes):
        tokenizer.add_tokens(changes.pop("tokens", []))
        tokenizer.add_special_tokens(changes)
        tokenizer.save_pretrained(tmp_path / "adapter")
        return tmp_path / "adapter"

    return save


@pytest.fixture(scope="module")
def target():
    config = AutoModelForCausalLM.from_pretrained(MODEL)
    served = prepare_loaded(config, LORA)
    return served.adapter_target(LORA.resolved_for(served))


def warnings_about(path: Path, target, **options):
    return read_adapter(path.name, [path.parent], target, **options).warnings


def test_the_same_tokenizer_is_silent(trained, target):
    path = trained()
    assert (path / "tokenizer.json").is_file()
    assert warnings_about(path, target) == ()
    shutil.copy(MODEL / "tokenizer.json", path)
    assert warnings_about(path, target) == ()
    (path / "tokenizer.json").unlink()
    assert warnings_about(path, target) == ()


def test_added_tokens_are_named(trained, target):
    path = trained(tokens=["<a>", "<b>"], eos_token="<|im_end|>")
    [warning] = warnings_about(path, target)
    assert "lacks 3 tokens that were added" in warning
    assert all(token in warning for token in ("'<a>'", "'<b>'", "'<|im_end|>'"))
    many = trained(tokens=[f"<{'x' * 300}{index}>" for index in range(99)])
    [warning] = warnings_about(many, target)
    assert "lacks 102 tokens" in warning
    assert len(warning) <= 320


def test_another_vocabulary_is_reported(trained, target):
    path = trained()
    file = json.loads((path / "tokenizer.json").read_text())
    vocabulary = file["model"]["vocab"]
    first, second = list(vocabulary)[:2]
    vocabulary[first], vocabulary[second] = vocabulary[second], vocabulary[first]
    vocabulary["other"] = 5
    (path / "tokenizer.json").write_text(json.dumps(file))
    missing, moved = warnings_about(path, target)
    assert "lacks 1 tokens of the adapter's tokenizer" in missing
    assert "'other'" in missing
    assert "2 tokens have other ids" in moved
    pairs = [[token, -1.0] for token in vocabulary]
    file["model"] = {"type": "Unigram", "unk_id": 0, "vocab": pairs}
    (path / "tokenizer.json").write_text(json.dumps(file))
    [missing, *_] = warnings_about(path, target)
    assert "'other'" in missing


def test_a_model_without_a_tokenizer_is_compared_by_its_embeddings(trained, target):
    path = trained(tokens=["<a>"])
    for known in (259, 0):
        found = warnings_about(path, replace(target, tokenizer=BaseTokenizer(lambda: None, known)))
        assert len(found) == bool(known)
        if known:
            assert "1 tokens beyond the model's 259 embeddings: '<a>'" in found[0]


def test_files_that_can_not_be_compared_are_named(trained, target, monkeypatch, tmp_path):
    path = trained()
    file = path / "tokenizer.json"
    for content in ("{", "[]", '{"model": {"vocab": 5}}', "[" * 100_000, '{"added_tokens": [1]}'):
        file.write_text(content)
        [warning] = warnings_about(path, target)
        assert "tokenizer.json is not compared" in warning
    with monkeypatch.context() as patch:
        patch.setattr(saved_tokenizer, "VALUES_MAX", 3)
        file.write_text("[1,2,3,4,5]")
        assert "more than 3 values" in warnings_about(path, target)[0]
        patch.setattr(saved_tokenizer, "BYTES_MAX", 3)
        assert "11 bytes" in warnings_about(path, target)[0]
    file.unlink()
    secret = tmp_path.parent / f"{tmp_path.name}-secret"
    secret.write_text("{}")
    file.symlink_to(secret)
    [warning] = warnings_about(path, target)
    assert "out of the adapter roots" in warning
    file.unlink()
    (path / "tokenizer.model").write_bytes(b"x")
    assert "tokenizer.model is not compared" in warnings_about(path, target)[0]
    (path / "added_tokens.json").write_text('{"<a>": 259}')
    added, old = warnings_about(path, target)
    assert "'<a>'" in added
    assert "tokenizer.model" in old


def test_followers_and_loads_do_not_compare(trained, target):
    path = trained(tokens=["<a>"])
    assert warnings_about(path, target, is_follower=True) == ()
    assert warnings_about(path, target, compares_tokenizer=False) == ()
