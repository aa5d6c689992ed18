"""Flat passes: rows in groups and one by one, windows, soft-capping and sinks, and refusals."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from engine.config import LoRAConfig
from engine.models.causal_model import CausalModel
from engine.models.kv_cache import BatchKVCache
from engine.paging.block_pool import BLOCK_TOKENS, BlockPool
from engine.paging.block_table import BlockTable
from engine.paging.flat_model import FlatModel, FlatRefused, try_flat
from engine.paging.paged_cache import FlatRow
from tests.support.engine.engine_examples import relative_error
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX

LENGTHS = (3, 40, 17, 1, 33)
"""Of rows that decode: less than a block, several blocks, and one token into a block."""


def build(model_type: str, **fields: object) -> CausalModel:
    if model_type == "gpt_oss":
        torch.manual_seed(1)
        config = GptOssConfig(
            vocab_size=97,
            hidden_size=32,
            intermediate_size=16,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            num_local_experts=4,
            sliding_window=6,
            max_position_embeddings=CONTEXT_TOKENS_MAX,
        )
        whole = GptOssForCausalLM(config).eval()
        for layer in whole.model.layers:
            torch.nn.init.normal_(layer.self_attn.sinks)
    else:
        row = next(one for one in ARCHITECTURES if one.model_type == model_type)
        whole = replace(row, fields={**row.fields, **fields}).build()
    return CausalModel(whole, LoRAConfig(), context_tokens_max=CONTEXT_TOKENS_MAX)


def alone(model: CausalModel, tokens: list[int]) -> Tensor:
    return model.forward(torch.tensor([tokens]), BatchKVCache([len(tokens)]))[0]


@pytest.mark.parametrize("groups_rows", [False, True])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_rows_of_any_length_equal_the_models_own_pass(model_type: str, groups_rows: bool) -> None:
    """Of full attention, windows with soft-capped scores, and windows with sinks."""
    model = build(model_type)
    try_flat(model, lambda *_: None)
    flat, pool = FlatModel(model, 32), BlockPool(32)
    flat.groups_rows = groups_rows
    known = [
        [(7 * at + row) % 97 for at in range(length + 2)] for row, length in enumerate(LENGTHS)
    ]
    tables = [BlockTable(pool, None) for _ in known]
    for blocks in range(1, 4):
        # In turn, so that no row's blocks are adjacent.
        for table, tokens in zip(tables, known, strict=True):
            table.reserve(min(blocks * BLOCK_TOKENS, len(tokens)))
    # Every prompt at once, and then two steps in which all rows decode.
    rows = [
        FlatRow(tokens[:length], table)
        for tokens, length, table in zip(known, LENGTHS, tables, strict=True)
    ]
    for step in range(3):
        for row, found, tokens in zip(rows, flat.forward(rows), known, strict=True):
            row.table.advance(row.end, list)
            assert relative_error(found, alone(model, tokens[: row.table.length])) < 1e-5, step
        rows = [
            FlatRow(tokens[t.length : t.length + 1], t)
            for tokens, t in zip(known, tables, strict=True)
        ]


def test_a_window_wider_than_the_trial_is_kept() -> None:
    """The mask function comes from the model, so that a window of any width is right."""
    model = build("mistral", sliding_window=30)
    try_flat(model, lambda *_: None)
    flat = FlatModel(model, 8)
    table = BlockTable(BlockPool(8), None)
    tokens = [(11 * at + 2) % 97 for at in range(60)]
    table.reserve(60)
    for begin, end in ((0, 20), (20, 58), (58, 59), (59, 60)):
        [found] = flat.forward([FlatRow(tokens[begin:end], table)])
        table.advance(end, list)
        assert relative_error(found, alone(model, tokens[:end])) < 1e-5
    narrow = build("mistral", sliding_window=20)
    assert relative_error(alone(narrow, tokens), alone(model, tokens)) > 1e-3


def test_a_model_is_as_before_after_a_refused_trial() -> None:
    model = build("gptj")
    tokens = list(range(20))
    before = alone(model, tokens), model.model.config._attn_implementation
    with pytest.raises(FlatRefused, match="RowMasks"):
        try_flat(model, lambda *_: None)
    assert torch.equal(alone(model, tokens), before[0])
    assert model.model.config._attn_implementation == before[1]
