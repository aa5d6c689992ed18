"""Files of models that gateways read: damaged and missing ones are reported, not fatal."""

import json
from pathlib import Path
from typing import Any

import pytest

from loradock.gateway.inference.model_files import read_model_files
from loradock.gateway.inference.sampling import SamplingDefaults
from loradock.gateway.inference.templates import Templates
from loradock.gateway.inference.tokenizer import Tokenizer
from tests.support.gateway.served import model_directory


def test_a_directory_without_a_tokenizer_serves_no_chats(tmp_path: Path) -> None:
    files = read_model_files(str(tmp_path))
    assert (files.tokenizer, files.templates, files.context) == (None, Templates(), None)
    assert read_model_files("").tokenizer is None


@pytest.mark.parametrize("content", ["", "{}", "[1", '{"model": {"type": "Other"}}'])
def test_a_damaged_tokenizer_is_reported(tmp_path: Path, content: Any) -> None:
    directory = model_directory(tmp_path)
    (directory / "tokenizer.json").write_text(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json"):
        Tokenizer(directory)
    assert read_model_files(str(directory)).tokenizer is None


def test_the_context_is_the_models_or_the_configured_one(tmp_path: Path) -> None:
    directory = str(model_directory(tmp_path))
    assert read_model_files(directory).context == 512
    assert read_model_files(directory, context=64).context == 64


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, SamplingDefaults()),
        ({"temperature": 0.6, "top_k": 20, "top_p": None}, SamplingDefaults(0.6, 1.0, 20)),
        (
            {"min_p": 0.1, "repetition_penalty": 1.05, "max_new_tokens": 9, "do_sample": False},
            SamplingDefaults(min_p=0.1, repetition_penalty=1.05, max_new_tokens=9),
        ),
        ({"stop_token_ids": [1], "eos_token_id": [1, 2]}, SamplingDefaults()),
        # They are reported.
        ({"temperature": "hot"}, SamplingDefaults()),
        ({"temperature": -1}, SamplingDefaults()),
        ([], SamplingDefaults()),
    ],
)
def test_recommended_sampling_is_read(tmp_path: Path, config: Any, expected: Any) -> None:
    directory = model_directory(tmp_path)
    (directory / "generation_config.json").write_text(json.dumps(config))
    assert read_model_files(str(directory)).defaults == expected


def test_tokens_that_end_an_output_are_read(tmp_path: Path) -> None:
    directory = model_directory(tmp_path)
    for saved, expected in ((258, {258}), ([257, 258], {257, 258}), (None, set())):
        (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": saved}))
        assert read_model_files(str(directory)).end_tokens == expected


@pytest.mark.parametrize("entry", ["<s>", {"content": "<s>", "lstrip": False}])
def test_special_tokens_are_texts_or_objects(tmp_path: Path, entry: Any) -> None:
    directory = model_directory(tmp_path)
    (directory / "tokenizer_config.json").write_text(json.dumps({"bos_token": entry}))
    tokenizer = Tokenizer(directory)
    assert tokenizer.special_tokens == {"bos_token": "<s>"}
    assert not tokenizer.adds_bos


TEXT = "a é😀 \u0900\x00\n"


def vocabulary_of_bytes(tmp_path: Path, name_of_byte: Any, decoders: Any) -> Tokenizer:
    """Write a tokenizer with one token per byte, and without merges."""
    vocabulary = {name_of_byte(byte): byte for byte in range(256)}
    model = {"type": "BPE", "vocab": vocabulary, "merges": [], "byte_fallback": True}
    file = {"version": "1.0", "model": model, "added_tokens": [], "decoder": decoders}
    (tmp_path / "tokenizer.json").write_text(json.dumps(file))
    return Tokenizer(tmp_path)


def test_the_bytes_of_tokens_make_the_text(tmp_path: Path) -> None:
    byte_level = Tokenizer(model_directory(tmp_path))
    tokens = byte_level.encode(TEXT, special=False)
    assert b"".join(map(byte_level.token_bytes, tokens)) == TEXT.encode()
    assert len(tokens) == len(TEXT.encode())
    decoders = [{"type": "ByteFallback"}, {"type": "Fuse"}]
    fallback = vocabulary_of_bytes(
        tmp_path, "<0x{:02X}>".format, {"type": "Sequence", "decoders": decoders}
    )
    tokens = fallback.encode(TEXT, special=False)
    assert tokens == [*TEXT.encode()]
    assert b"".join(map(fallback.token_bytes, tokens)) == TEXT.encode()
