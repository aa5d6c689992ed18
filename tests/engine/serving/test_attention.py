"""Packed passes: masks, shared segments, windows, soft-capping, sinks and refusals."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import GptOssConfig, GptOssForCausalLM
from transformers.masking_utils import (
    and_masks,
    bidirectional_mask_function,
    causal_mask_function,
    chunked_causal_mask_function,
    or_masks,
    sliding_window_causal_mask_function,
)

from loradock.engine.config import LoRAConfig
from loradock.engine.kernels.reference.attention import REFERENCE_ATTENTION
from loradock.engine.models.causal_model import CausalModel
from loradock.engine.models.kv_cache import BatchKVCache
from loradock.engine.serving import attention
from loradock.engine.serving.attention import (
    CALL_BYTES,
    COPY_TOKENS,
    KVSegment,
    KVSegments,
    MaskRange,
    MaskRanges,
    SequenceMasks,
    SequencePlace,
    longest_lookback,
)
from loradock.engine.serving.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    blocks_around,
    blocks_of,
    root_key,
)
from loradock.engine.serving.forward import PackedModel
from loradock.engine.serving.paged_cache import GatheredStep, MaskFunction, PackedChunk
from loradock.engine.serving.startup import PackedRefused, probe_packed
from tests.support.engine.block_memory import poison
from tests.support.engine.engine_examples import relative_error
from tests.support.models.architectures import ARCHITECTURES, CONTEXT_TOKENS_MAX

TOKENS = 60

CPU = torch.device("cpu")


def window(tokens: int) -> MaskFunction:
    return sliding_window_causal_mask_function(tokens)


def chunk(tokens: int) -> MaskFunction:
    return chunked_causal_mask_function(tokens, torch.zeros(1, dtype=torch.int64))


def strided(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The tokens at every seventh distance, and the next ones before."""
    del row, head
    return ((query - key) % 7 == 0) | (query - key < 3)


def sinks(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
    """The first tokens, which every one attends to."""
    del row, head, query
    return key < 2


@pytest.mark.parametrize("tokens", [1, 2, 7, 16, TOKENS - 1, TOKENS, 2 * TOKENS])
def test_windows_and_chunks_reach_back_by_their_length(tokens: int) -> None:
    expected = max(1, min(tokens, TOKENS) - 1)
    for function in (window(tokens), chunk(tokens)):
        assert longest_lookback([function], TOKENS, CPU) == expected
        assert longest_lookback([function, window(5), chunk(3)], TOKENS, CPU) == max(4, expected)
        assert longest_lookback([function, causal_mask_function], TOKENS, CPU) == TOKENS - 1


@pytest.mark.parametrize(
    "function",
    [
        causal_mask_function,
        bidirectional_mask_function,
        and_masks(causal_mask_function, strided),
        or_masks(window(5), and_masks(causal_mask_function, sinks)),
    ],
)
def test_a_mask_without_a_bound_reaches_all_tokens(function: MaskFunction) -> None:
    assert longest_lookback([function], TOKENS, CPU) >= TOKENS - 1


def test_without_masks_nothing_is_known_to_be_unread() -> None:
    assert longest_lookback([], TOKENS, CPU) == TOKENS


@given(st.lists(st.integers(0, 100), min_size=2, max_size=40))
def test_the_reach_is_the_longest_distance_of_any_token(distances: list[int]) -> None:
    """Masks under which each token attends to all tokens from some first one on."""
    firsts = torch.tensor([max(0, at - distance) for at, distance in enumerate(distances)])

    def function(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        del row, head
        return (key >= firsts[query]) & (key <= query)

    longest = max(int(at - first) for at, first in enumerate(firsts))
    assert longest_lookback([function], len(distances), CPU) == max(1, longest)


@pytest.mark.parametrize("tokens", [2, 7, 16, TOKENS - 2])
def test_windows_and_chunks_are_ranges(tokens: int) -> None:
    ranges, index = MaskRanges(TOKENS, CPU), torch.arange(TOKENS)
    assert ranges.of(causal_mask_function) == MaskRange()
    for function, expected in (
        (window(tokens), MaskRange(window=tokens)),
        (chunk(tokens), MaskRange(chunk=tokens)),
    ):
        found = ranges.of(function)
        assert found == expected
        assert found.lookback == tokens - 1
        attends = function(index[0], index[0], index[:, None], index)
        first = found.first(index)[:, None]
        assert torch.equal(attends, (index >= first) & (index <= index[:, None]))


@pytest.mark.parametrize(
    "function",
    [
        bidirectional_mask_function,
        and_masks(causal_mask_function, strided),
        or_masks(window(5), and_masks(causal_mask_function, sinks)),
        and_masks(window(7), chunk(20)),
    ],
)
def test_a_mask_that_is_no_range_is_refused(function: MaskFunction) -> None:
    ranges = MaskRanges(TOKENS, CPU)
    for _ in range(2):
        with pytest.raises(TypeError, match="neither a window nor a chunk"):
            ranges.of(function)


def test_masks_of_other_numbers_or_unknown_data_are_measured_again() -> None:
    """Functions are made anew in each pass; one over data of tokens is never known."""
    ranges = MaskRanges(TOKENS, CPU)
    measured: list[MaskFunction] = []
    original = ranges._measure
    ranges._measure = lambda function: [measured.append(function), original(function)][1]  # type: ignore[method-assign, func-returns-value]
    for _ in range(3):
        for function in (window(5), window(6), chunk(5), causal_mask_function):
            ranges.of(function)
    assert len(measured) == 4
    bounds = torch.arange(TOKENS)

    def by_token(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return causal_mask_function(row, head, bounds[query], key)

    for _ in range(2):
        ranges.of(by_token)
    assert len(measured) == 6


@pytest.mark.parametrize(
    ("function", "has_segments"),
    [
        (causal_mask_function, True),
        (window(40), True),
        (and_masks(causal_mask_function, strided), False),
    ],
)
def test_a_row_with_gaps_in_its_mask_is_not_read_in_pieces(
    function: MaskFunction, has_segments: bool
) -> None:
    pool = BlockPool(16)
    tables = [BlockTable(pool, None) for _ in range(2)]
    for blocks in range(1, 5):
        for table in tables:
            table.reserve(blocks * BLOCK_TOKENS)
    tables[0].advance(TOKENS, list)
    written = torch.zeros(1, dtype=torch.int64)
    masks = SequenceMasks(function, GatheredStep([PackedChunk([0], tables[0])], written))
    segments, others = masks.divided(token_bytes=1 << 30)
    assert (segments is not None) == has_segments
    assert len(others) == (not has_segments)


CALL_TOKENS = 64

TOKEN_BYTES = CALL_BYTES // CALL_TOKENS


def find_segments(
    rows: Sequence[SequencePlace], token_bytes: int = TOKEN_BYTES
) -> KVSegments | None:
    return attention.find_segments(rows, token_bytes, torch.device("cpu"))


def tokens_of(row: SequencePlace) -> list[int]:
    """Return where a row's tokens are in the memory."""
    places = [block * BLOCK_TOKENS + at for block in row.blocks for at in range(BLOCK_TOKENS)]
    return places[row.first : row.first + row.tokens]


def read_by(found: KVSegments, number: int) -> list[int]:
    """Return where the row with a number in `found.queries` reads, segment by segment."""
    own = [one for one in found.segments if one.row <= number < one.row + one.rows]
    assert [one.part for one in own] == list(range(len(own)))
    return [at for one in own for at in tokens_in(one)]


def tokens_in(segment: KVSegment) -> list[int]:
    if not segment.blocks:
        return list(range(segment.start, segment.start + segment.tokens))
    assert segment.start // BLOCK_TOKENS == segment.blocks[0]
    copied = row_of(0, [*segment.blocks], segment.tokens, segment.start % BLOCK_TOKENS)
    return tokens_of(copied)


def row_of(query: int, blocks: list[int], tokens: int, first: int = 0) -> SequencePlace:
    is_copied = any(after != before + 1 for before, after in pairwise(blocks))
    return SequencePlace(query, blocks, first, tokens, is_copied)


def adjacent(query: int, start: int, blocks: int) -> SequencePlace:
    return row_of(query, [*range(start, start + blocks)], blocks * BLOCK_TOKENS - 3)


@st.composite
def rows_of_a_tree(draw: st.DrawFn) -> list[SequencePlace]:
    """Rows that begin with blocks of rows before them, and then have blocks of their own."""
    rows: list[SequencePlace] = []
    free = iter(draw(st.permutations(range(80))) if draw(st.booleans()) else range(1000))
    for query in range(draw(st.integers(1, 8))):
        blocks: list[int] = []
        if rows and draw(st.booleans()):
            parent = draw(st.sampled_from(rows))
            # The last block of a row is its own.
            blocks += parent.blocks[: draw(st.integers(0, len(parent.blocks) - 1))]
        blocks += [next(free) for _ in range(draw(st.integers(1, 5)))]
        first = draw(st.integers(0, BLOCK_TOKENS - 1)) if draw(st.booleans()) else 0
        end = len(blocks) * BLOCK_TOKENS - draw(st.integers(0, BLOCK_TOKENS - 1 - first))
        rows.append(row_of(query, blocks, max(1, end - first), first))
    return rows


@pytest.mark.parametrize("token_bytes", [TOKEN_BYTES, 3 * TOKEN_BYTES, 1000 * TOKEN_BYTES])
@given(rows=rows_of_a_tree())
def test_the_pieces_of_a_row_are_its_tokens_in_order(
    token_bytes: int, rows: list[SequencePlace]
) -> None:
    found = find_segments(rows, token_bytes)
    if found is None:
        return
    queries = found.queries.tolist()
    assert len(set(queries)) == len(queries)
    for number, query in enumerate(queries):
        assert read_by(found, number) == tokens_of(rows[query])
    outputs = [(n, one.part) for one in found.segments for n in range(one.row, one.row + one.rows)]
    assert found.rows.tolist() == [number for number, _ in outputs]
    assert found.places.tolist() == [part * len(queries) + number for number, part in outputs]
    assert found.parts == 1 + max(part for _, part in outputs)


def test_rows_with_adjacent_blocks_of_their_own_are_in_no_pieces() -> None:
    rows = [adjacent(0, 0, 30), adjacent(1, 30, 20), adjacent(2, 60, 1)]
    assert find_segments(rows) is None


def test_a_shared_prefix_is_one_piece_and_its_branches_too() -> None:
    """Three rows share 20 blocks, and two of these 10 more."""
    stem, branch = range(20), range(100, 110)
    rows = [
        row_of(0, [*stem, *branch, 40], 31 * BLOCK_TOKENS),
        row_of(1, [*stem, 50, 51], 22 * BLOCK_TOKENS - 5),
        row_of(2, [*stem, *branch, 60, 61], 31 * BLOCK_TOKENS + 1),
        adjacent(3, 200, 9),
    ]
    found = find_segments(rows)
    assert found is not None
    assert found.queries.tolist() == [1, 0, 2]
    assert list(found.segments) == [
        KVSegment(0, 20 * BLOCK_TOKENS, 0, 3, 0),
        KVSegment(50 * BLOCK_TOKENS, 2 * BLOCK_TOKENS - 5, 0, 1, 1),
        KVSegment(100 * BLOCK_TOKENS, 10 * BLOCK_TOKENS, 1, 2, 1),
        KVSegment(40 * BLOCK_TOKENS, BLOCK_TOKENS, 1, 1, 2),
        KVSegment(60 * BLOCK_TOKENS, BLOCK_TOKENS + 1, 2, 1, 2),
    ]


def test_the_cost_of_calls_decides_between_pieces_and_copies() -> None:
    def row_of_runs(runs: int, blocks: int) -> SequencePlace:
        numbers = [100 * run + at for run in range(runs) for at in range(blocks)]
        return row_of(0, numbers, len(numbers) * BLOCK_TOKENS)

    assert find_segments([row_of_runs(2, 8)]) is not None
    assert find_segments([row_of_runs(2, 2)]) is None
    assert find_segments([row_of_runs(20, 4)]) is None
    pair = [adjacent(0, 0, 10), row_of(1, [0, 1, 40], 3 * BLOCK_TOKENS)]
    # A common beginning of 2 blocks is copied rather than read in a call more.
    assert find_segments(pair) is None
    many = [*pair, *(row_of(n, [0, 1, 50 + 2 * n], 3 * BLOCK_TOKENS) for n in range(2, 9))]
    found = find_segments(many)
    assert found is not None
    assert found.segments[0] == KVSegment(0, 2 * BLOCK_TOKENS, 0, 9, 0)


def test_scattered_blocks_that_rows_share_are_copied_once() -> None:
    stem = [*range(0, 200, 2), *range(300, 320), *range(400, 500, 2)]
    rows = [row_of(n, [*stem, 600 + 5 * n], len(stem) * BLOCK_TOKENS + 1) for n in range(4)]
    found = find_segments(rows)
    assert found is not None
    shared = [one for one in found.segments if one.rows == 4]
    assert [list(one.blocks) for one in shared] == [stem[:100], [], stem[120:]]
    assert shared[1] == KVSegment(300 * BLOCK_TOKENS, 20 * BLOCK_TOKENS, 0, 4, 1)
    assert len(found.segments) == 3 + 4
    copied = [None if one is None else one.tolist() for one in found.copied]
    assert copied == [list(one.blocks) or None for one in found.segments]


def test_as_many_branches_follow_each_other_as_there_are_rows() -> None:
    """Each row begins with all blocks of the row before but the last one."""
    rows = [
        row_of(number, [*range(number), 10_000 + number], (number + 1) * BLOCK_TOKENS)
        for number in range(1, sys.getrecursionlimit() + 2)
    ]
    found = find_segments(rows, token_bytes=1)
    assert found is not None
    assert read_by(found, len(rows) - 1) == tokens_of(rows[found.queries.tolist()[-1] - 1])


def test_short_runs_of_small_tokens_are_copied() -> None:
    """As in layers with one head of keys, where a call takes as long as reading more tokens."""
    blocks = [100 * run + at for run in range(4) for at in range(10)]
    row = row_of(0, blocks, len(blocks) * BLOCK_TOKENS)
    assert find_segments([row]) is not None
    assert find_segments([row], TOKEN_BYTES // 10) is None


@given(rows=rows_of_a_tree())
def test_pieces_are_chosen_only_where_they_cost_less(rows: list[SequencePlace]) -> None:
    found = find_segments(rows)
    if found is None:
        return
    chosen = [rows[query] for query in found.queries.tolist()]

    def cost(calls: int, read: int, copied: int) -> float:
        return CALL_TOKENS * calls + read + COPY_TOKENS * copied

    before = cost(
        len(chosen),
        sum(row.tokens for row in chosen),
        sum(row.tokens for row in chosen if row.is_copied),
    )
    after = cost(
        len(found.segments),
        sum(one.tokens for one in found.segments),
        sum(one.tokens for one in found.segments if one.blocks),
    )
    assert after < before


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
    return CausalModel(whole, LoRAConfig(), max_model_len=context)


def packed_of(
    model: CausalModel, blocks: int, reads: str, lookback: int = sys.maxsize
) -> PackedModel:
    """Return packed passes; those of "kernel" attend by its reference."""
    kernel = REFERENCE_ATTENTION if reads == "kernel" else None
    probe_packed(model, lambda *_: None, kernel)
    packed = PackedModel(model, blocks, lookback, kernel)
    packed.groups_decodes = reads == "groups"
    return packed


def alone(model: CausalModel, tokens: list[int]) -> Tensor:
    return model.forward(torch.tensor([tokens]), BatchKVCache([len(tokens)]))[0]


def whole(model: CausalModel, tokens: list[int]) -> Tensor:
    """Return the logits after each token of a row, [tokens, vocabulary], in one pass of its own."""
    return model.forward_all(torch.tensor([tokens]), BatchKVCache([len(tokens)]))[0]


@pytest.mark.parametrize("reads", ["copies", "segments", "groups", "kernel"])
@pytest.mark.parametrize("model_type", ["llama", "gemma2", "gpt_oss"])
def test_rows_of_any_length_equal_the_models_own_pass(
    model_type: str, reads: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of full attention, windows with soft-capped scores, and windows with sinks."""
    monkeypatch.setattr(attention, "CALL_BYTES", 0 if reads == "segments" else sys.maxsize)
    model = build(model_type)
    flat, pool = packed_of(model, 32, reads), BlockPool(32)
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

    original = attention.find_segments

    def find(places: list[SequencePlace], _: int, device: torch.device) -> KVSegments | None:
        read.append(original(places, token_bytes, device))
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


@pytest.mark.parametrize("reads", ["copies", "groups", "kernel"])
@pytest.mark.parametrize("title", WINDOWS)
def test_tokens_before_the_window_are_not_needed(title: str, reads: str) -> None:
    """Rows of many windows, in chunks and single tokens; released blocks are overwritten."""
    model_type, fields, lookback = WINDOWS[title]
    model = build(model_type, LONG_TOKENS, max_position_embeddings=LONG_TOKENS, **fields)
    assert probe_packed(model, lambda *_: None).lookback == lookback
    flat = packed_of(model, 2 * blocks_of(LONG_TOKENS), reads, lookback)
    flat.allocate()
    known = [[(7 * at + 3 * row) % 97 for at in range(LONG_TOKENS)] for row in range(2)]
    steps = (37, 1, 1, 20, 1)
    found = release_in_passes(flat, known, steps)
    expected = [whole(model, tokens) for tokens in known]
    ends = [sum(steps[at % len(steps)] for at in range(n + 1)) for n in range(len(found))]
    for logits, end in zip(found, ends, strict=True):
        for row, own in zip(logits, expected, strict=True):
            assert relative_error(row, own[min(end, LONG_TOKENS) - 1]) < 1e-5, end


@pytest.mark.parametrize("reads", ["copies", "groups", "kernel"])
@pytest.mark.parametrize("step", [1, 5])
def test_a_row_that_gave_up_a_block_too_early_is_not_computed(step: int, reads: str) -> None:
    """Each token attends to the 20 before it, and the row keeps those of 19."""
    model = build("mistral", sliding_window=21)
    flat = packed_of(model, 8, reads, lookback=19)
    table = BlockTable(BlockPool(8), None, lookback=19)
    table.reserve(60)
    if reads != "kernel":
        flat.forward([PackedChunk(list(range(35)), table)])
        table.advance(35, list)
        # Token 35 attends to token 15, in the first block.
        assert table.released == 1
    # A kernel's masks are compared with what rows keep, before any has given up a block.
    with pytest.raises(RuntimeError, match="blocks have been released"):
        flat.forward([PackedChunk([1] * step, table)])


def test_a_model_is_as_before_after_a_refused_trial() -> None:
    model = build("xglm")
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
