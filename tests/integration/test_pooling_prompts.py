"""Texts with the model's default prompt, as sentence-transformers pools them."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import BertPreTokenizer
from tokenizers.processors import TemplateProcessing
from torch import Tensor
from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

from loradock.engine.config import EngineConfig, LoRAConfig
from loradock.engine.models.loading import load_model
from loradock.messages.commands import StartPooling
from loradock.messages.reports import OperationFailed, Report
from loradock.messages.requests import VectorsStreamed
from tests.support.engine.engine_bench import EngineBench
from tests.support.engine.vectors import unpack_vector
from tests.support.models.pooling_examples import write_sentence_modules

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "search", "for", ":", "a", "cat", "two", "dogs"]
PROMPT = "search for: "
TEXTS = ("a cat", "two dogs", "a", "two dogs for a cat")
CLS, SEP = WORDS.index("[CLS]"), WORDS.index("[SEP]")


def tokens_of(text: str) -> list[int]:
    return [WORDS.index(word) for word in text.replace(":", " :").split()]


@pytest.fixture(scope="module")
def model() -> BertModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "num_attention_heads": 2}
    return BertModel(
        BertConfig(
            vocab_size=len(WORDS),
            num_hidden_layers=1,
            max_position_embeddings=16,
            initializer_range=0.3,
            **sizes,
        )
    ).eval()


def tokenizer(ends: bool) -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: index for index, word in enumerate(WORDS)}, "[UNK]"))
    words.pre_tokenizer = BertPreTokenizer()
    if ends:
        special = [("[CLS]", CLS), ("[SEP]", SEP)]
        words.post_processor = TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=special)
    return PreTrainedTokenizerFast(
        tokenizer_object=words,
        model_max_length=12,
        cls_token="[CLS]",
        sep_token="[SEP]",
        unk_token="[UNK]",
        pad_token="[PAD]",
    )


def start(model: BertModel, directory: Path, ends: bool = True, **pooling: object) -> EngineBench:
    """Return an engine on the saved model; without `ends` texts have no [CLS] and [SEP]."""
    model.save_pretrained(directory)
    tokenizer(ends).save_pretrained(directory)
    write_sentence_modules(directory, ["Transformer", "Pooling"], **pooling)
    settings = {"prompts": {"query": PROMPT}, "default_prompt_name": "query"}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(settings))
    config = EngineConfig(directory, device="cpu")
    return EngineBench(load_model(config, LoRAConfig()), config, LoRAConfig())


def embed(bench: EngineBench, *inputs: object) -> Report:
    request_id = f"r{bench.op}"
    base = {"adapter_id": 0, "slot": -1, "generation": 0}
    end = bench.do(StartPooling, request_id=request_id, task="embed", inputs=inputs, **base)
    found = [one for one in bench.reports if isinstance(one, VectorsStreamed)]
    return found[-1] if found else end


@torch.no_grad()
def states(model: BertModel, tokens: list[int]) -> Tensor:
    return model(input_ids=torch.tensor([tokens])).last_hidden_state[0]


@pytest.mark.parametrize("pooling", ["mean", "cls", "lasttoken"])
def test_the_prompt_is_prepended_to_every_text(
    model: BertModel, tmp_path: Path, pooling: str
) -> None:
    found = embed(start(model, tmp_path, pooling_mode=pooling), *TEXTS)
    for text, vector in zip(TEXTS, found.vectors, strict=True):
        whole = states(model, [CLS, *tokens_of(PROMPT + text), SEP])
        expected = {"mean": whole.mean(0), "cls": whole[0], "lasttoken": whole[-1]}[pooling]
        torch.testing.assert_close(
            torch.tensor(unpack_vector(vector)), expected, rtol=1e-5, atol=1e-6
        )


@pytest.mark.parametrize("ends", [True, False])
@pytest.mark.parametrize("pooling", ["mean", "lasttoken"])
def test_a_prompt_that_is_not_pooled_is_still_read(
    model: BertModel, tmp_path: Path, pooling: str, ends: bool
) -> None:
    bench = start(model, tmp_path, ends, pooling_mode=pooling, include_prompt=False)
    found = embed(bench, *TEXTS)
    before, after = ([CLS], [SEP]) if ends else ([], [])
    first = len(before) + len(tokens_of(PROMPT))
    for text, vector in zip(TEXTS, found.vectors, strict=True):
        whole = states(model, [*before, *tokens_of(PROMPT + text), *after])
        expected = whole[first:].mean(0) if pooling == "mean" else whole[-1]
        torch.testing.assert_close(
            torch.tensor(unpack_vector(vector)), expected, rtol=1e-5, atol=1e-6
        )


def test_token_ids_are_read_unchanged(model: BertModel, tmp_path: Path) -> None:
    bench = start(model, tmp_path, pooling_mode="mean", include_prompt=False)
    tokens = (CLS, *tokens_of("two dogs"), SEP)
    found = embed(bench, tokens, "a cat")
    expected = states(model, list(tokens)).mean(0)
    torch.testing.assert_close(
        torch.tensor(unpack_vector(found.vectors[0])), expected, rtol=1e-5, atol=1e-6
    )


def test_a_text_without_tokens_of_its_own_is_refused_if_the_prompt_is_not_pooled(
    model: BertModel, tmp_path: Path
) -> None:
    bench = start(model, tmp_path / "ends", pooling_mode="mean", include_prompt=False)
    assert isinstance(embed(bench, ""), VectorsStreamed)
    bench = start(model, tmp_path / "none", ends=False, pooling_mode="mean", include_prompt=False)
    failed = embed(bench, "a", "")
    assert isinstance(failed, OperationFailed)
    assert failed.message.startswith("input 1 has only the tokens of the model's own prompt")


def test_a_text_may_be_as_long_as_the_tokenizer_reads(model: BertModel, tmp_path: Path) -> None:
    bench = start(model, tmp_path, pooling_mode="mean")
    longest = "a " * (12 - 2 - len(tokens_of(PROMPT)))
    assert isinstance(embed(bench, longest), VectorsStreamed)
    bench.reports.clear()
    failed = embed(bench, longest + "a")
    assert isinstance(failed, OperationFailed)
    assert "the prompt is too long: 13 tokens > 12 maximum" in failed.message
