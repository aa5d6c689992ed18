"""Flat passes: rows in groups and one by one, windows, soft-capping and sinks, and refusals."""

import sys
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM

from loradock.engine.config import LoRAConfig
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.serving import attention
from loradock.engine.serving.attention import KVSegments, SequencePlace
from loradock.engine.serving.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    blocks_around,
    blocks_of,
    root_key,
)
from loradock.engine.serving.forward import PackedModel
from loradock.engine.serving.paged_cache import PackedChunk
from loradock.engine.serving.startup import PackedRefused, probe_packed
from tests.support.engine.block_memory import poison
from tests.support.engine.engine_examples import relative_error
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX

pytest_plugins = ("tests.support.engine.engine_fixtures",)

LENGTHS = (3, 40, 17, 1, 33)
"""Of rows that decode: less than a block, several blocks, and one token into a block."""


LONG_TOKENS = 150


def build(model_type: str, context: int = CONTEXT_TOKENS_MAX, **fields: object) -> CausalModel:
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
    return CausalModel(whole, LoRAConfig(), context_tokens_max=context)


def alone(model: CausalModel, tokens: list[int]) -> Tensor:
    return model.forward(torch.tensor([tokens]), BatchKVCache([len(tokens)]))[0]


def whole(model: CausalModel, tokens: list[int]) -> Tensor:
    """Return the logits after each token of a row, [tokens, vocabulary], in one pass of its own."""
    return model.forward_all(torch.tensor([tokens]), BatchKVCache([len(tokens)]))[0]


@pytest.mark.parametrize("reads", ["copies", "segments", "groups"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_rows_of_any_length_equal_the_models_own_pass(
    model_type: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full attention, windows with soft-capped scores, and windows with sinks."""
    monkeypatch.setattr(attention, "CALL_BYTES", 0 if reads == "segments" else sys.maxsize)
    model = build(model_type)
    probe_packed(model, lambda *_: None)
    flat, pool = PackedModel(model, 32), BlockPool(32)
    flat.groups_decodes = reads == "groups"
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
        PackedChunk(tokens[:length], table)
        for tokens, length, table in zip(known, LENGTHS, tables, strict=True)
    ]
    for step in range(3):
        for row, found, tokens in zip(rows, flat.forward(rows), known, strict=True):
            row.table.advance(row.end, list)
            assert relative_error(found, alone(model, tokens[: row.table.length])) < 1e-5, step
        rows = [
            PackedChunk(tokens[t.length : t.length + 1], t)
            for tokens, t in zip(known, tables, strict=True)
        ]


SHARED = ((3, 0, 0), (3, 2, 0), (3, 2, 4), (3, 0, 9), (3, 2, 4), (1, 0, 0))
"""Rows by what they begin with: the blocks of a stem, of a branch of it, and of a twig of that."""


@pytest.mark.parametrize("token_bytes", [attention.CALL_BYTES // 64, 1 << 30])
@pytest.mark.parametrize(
    ("model_type", "fields", "together"),
    [
        ("llama", {}, 6),
        ("gpt_oss", {}, 6),
        ("granite", {"attention_multiplier": 0.9}, 6),
        ("mistral", {"sliding_window": 60}, 0),
    ],
)
def test_rows_that_share_blocks_equal_the_models_own_pass(
    model_type: str,
    fields: dict[str, float],
    together: int,
    token_bytes: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """They read shared blocks together, where their windows do not begin at different tokens."""
    read: list[KVSegments | None] = []

    def find(places: list[SequencePlace], _: int, device: torch.device) -> KVSegments | None:
        read.append(attention.find_segments(places, token_bytes, device))
        return read[-1]

    monkeypatch.setattr(attention, "find_segments", find)
    model = build(model_type, context=300, **fields)
    flat, pool = PackedModel(model, 64), BlockPool(64)
    rows = []
    for number, counts in enumerate(SHARED):
        tokens = [
            (5 * at + 30 * part) % 97
            for part, count in enumerate(counts)
            for at in range(count * BLOCK_TOKENS)
        ]
        tokens += [(11 * at + number) % 97 for at in range(5 + 7 * number)]
        table = BlockTable(pool, root_key("adapter"))
        keys = table.keys_of(tokens)
        table.reuse(table.find(keys), keys)
        table.reserve(len(tokens) + 3)
        flat.forward([PackedChunk(tokens[table.length :], table)])
        table.advance(len(tokens), partial(list, tokens))
        rows.append((tokens, table))
    assert [table.reused // BLOCK_TOKENS for _, table in rows] == [0, 3, 5, 3, 9, 1]
    read.clear()
    for step in range(3):
        for tokens, _ in rows:
            tokens.append((3 * len(tokens) + step) % 97)
        found = flat.forward([PackedChunk(tokens[-1:], table) for tokens, table in rows])
        for (tokens, table), logits in zip(rows, found, strict=True):
            table.advance(len(tokens), partial(list, tokens))
            assert relative_error(logits, alone(model, tokens)) < 1e-5, step
    assert (
        max((one.rows for found in read if found for one in found.segments), default=0) >= together
    )


def test_a_window_wider_than_the_trial_is_kept() -> None:
    """The mask function comes from the model, so that a window of any width is right."""
    model = build("mistral", sliding_window=30)
    probe_packed(model, lambda *_: None)
    flat = PackedModel(model, 8)
    table = BlockTable(BlockPool(8), None)
    tokens = [(11 * at + 2) % 97 for at in range(60)]
    table.reserve(60)
    for begin, end in ((0, 20), (20, 58), (58, 59), (59, 60)):
        [found] = flat.forward([PackedChunk(tokens[begin:end], table)])
        table.advance(end, list)
        assert relative_error(found, alone(model, tokens[:end])) < 1e-5
    narrow = build("mistral", sliding_window=20)
    assert relative_error(alone(narrow, tokens), alone(model, tokens)) > 1e-3


WINDOWS = {
    "mistral": ("mistral", {"sliding_window": 6}, 5),
    "a window of whole blocks": ("mistral", {"sliding_window": 2 * BLOCK_TOKENS}, 31),
    "one token more": ("mistral", {"sliding_window": 2 * BLOCK_TOKENS + 1}, 32),
    "starcoder2": ("starcoder2", {"sliding_window": 20}, 19),
    "phi3": ("phi3", {"sliding_window": 9}, 8),
    "all layers by their types": ("cohere2", {"layer_types": ["sliding_attention"] * 2}, 5),
    "soft-capped": ("gemma2", {"layer_types": ["sliding_attention"] * 2}, 5),
    "full layers too": ("gemma2", {}, LONG_TOKENS - 1),
    "full layers only": ("llama", {}, LONG_TOKENS - 1),
}
"""Title -> a model, its fields, and its longest lookback."""


def release_in_passes(flat: PackedModel, known: list[list[int]], steps: tuple[int, ...]) -> Tensor:
    """Run rows in chunks of these lengths, in turn, and return the last logits of each pass.

    [passes, rows, vocabulary]. Before each pass all memory that no row holds is overwritten.
    """
    pool, found = BlockPool(flat.cache.blocks), []
    tables = [BlockTable(pool, None, flat.lookback) for _ in known]
    while tables[0].length < len(known[0]):
        step = steps[len(found) % len(steps)]
        rows = []
        for table, tokens in zip(tables, known, strict=True):
            table.reserve(min(table.length + step, len(tokens)))
            rows.append(PackedChunk(tokens[table.length : table.length + step], table))
        held = {block for table in tables for block in table.blocks}
        assert len(held) <= len(known) * blocks_around(flat.lookback + step)
        poison(flat.cache, [block for block in range(pool.blocks) if block not in held])
        found.append(flat.forward(rows))
        for row in rows:
            row.table.advance(row.end, list)
    return torch.stack(found)


@pytest.mark.parametrize("groups_decodes", [False, True])
@pytest.mark.parametrize("title", WINDOWS)
def test_tokens_before_the_window_are_not_needed(title: str, groups_decodes: bool) -> None:
    """Rows of many windows, in chunks and single tokens; released blocks are overwritten."""
    model_type, fields, lookback = WINDOWS[title]
    model = build(model_type, LONG_TOKENS, max_position_embeddings=LONG_TOKENS, **fields)
    assert probe_packed(model, lambda *_: None).lookback == lookback
    flat = PackedModel(model, 2 * blocks_of(LONG_TOKENS), lookback)
    flat.groups_decodes = groups_decodes
    flat.allocate()
    known = [[(7 * at + 3 * row) % 97 for at in range(LONG_TOKENS)] for row in range(2)]
    steps = (37, 1, 1, 20, 1)
    found = release_in_passes(flat, known, steps)
    expected = [whole(model, tokens) for tokens in known]
    ends = [sum(steps[at % len(steps)] for at in range(n + 1)) for n in range(len(found))]
    for logits, end in zip(found, ends, strict=True):
        for row, own in zip(logits, expected, strict=True):
            assert relative_error(row, own[min(end, LONG_TOKENS) - 1]) < 1e-5, end


@pytest.mark.parametrize("groups_decodes", [False, True])
@pytest.mark.parametrize("step", [1, 5])
def test_a_row_that_gave_up_a_block_too_early_is_not_computed(
    step: int, groups_decodes: bool
) -> None:
    """Each token attends to the 20 before it, and the row keeps those of 19."""
    model = build("mistral", sliding_window=21)
    flat = PackedModel(model, 8)
    flat.groups_decodes = groups_decodes
    table = BlockTable(BlockPool(8), None, lookback=19)
    table.reserve(60)
    flat.forward([PackedChunk(list(range(35)), table)])
    table.advance(35, list)
    # Token 35 attends to token 15, in the first block.
    assert table.released == 1
    with pytest.raises(RuntimeError, match="blocks have been released"):
        flat.forward([PackedChunk([1] * step, table)])


def test_a_model_is_as_before_after_a_refused_trial() -> None:
    model = build("gptj")
    tokens = list(range(20))
    before = alone(model, tokens), model.model.config._attn_implementation
    with pytest.raises(PackedRefused, match="SequenceMasks"):
        probe_packed(model, lambda *_: None)
    assert torch.equal(alone(model, tokens), before[0])
    assert model.model.config._attn_implementation == before[1]


def test_a_difference_on_one_rank_refuses_flat_passes_on_all(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = build("llama")
    probe_packed(model, lambda *_: None)
    monkeypatch.setattr(type(model.group), "all_true", lambda *_: False)
    with pytest.raises(PackedRefused, match="on every rank"):
        probe_packed(model, lambda *_: None)
