"""Attention over blocks: Triton's kernels against the reference, and this against PyTorch's."""

from itertools import accumulate, pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from loradock.engine.kernels.block_attention import AttentionOptions, BlockOperands
from loradock.engine.kernels.reference.attention import REFERENCE_ATTENTION, attend_reference
from tests.support.kernels.kernel_cases import IS_COMPILED, IS_INTERPRETED, NAMES

if "triton" in NAMES:
    from triton._C.libtriton import interpreter

    from loradock.engine.kernels.gpu import attention
    from loradock.engine.kernels.gpu.attention import DECODE, TritonAttention, attention_constants


needs_triton = pytest.mark.skipif("triton" not in NAMES, reason="needs TRITON_INTERPRET or a GPU")

BLOCK_TOKENS = 16
DEVICE = "cuda" if IS_COMPILED else "cpu"
ERRORS_MAX = {torch.float32: 1e-5, torch.float16: 4e-3}


class Case(NamedTuple):
    """Operands of the operation; blocks that no sequence has are NaN."""

    query: Tensor
    keys: Tensor
    values: Tensor
    blocks: BlockOperands
    options: AttentionOptions

    def run(self, attend: Any, device: str = "cpu") -> Tensor:
        """Return the output of an implementation."""
        moved = [one.to(device) for one in (self.query, self.keys, self.values)]
        tables = [one.to(device) if isinstance(one, Tensor) else one for one in self.blocks]
        sinks = self.options.sinks
        options = self.options._replace(sinks=None if sinks is None else sinks.to(device))
        shape = (self.query.shape[1], self.query.shape[0], self.values.shape[2])
        y = torch.full(shape, torch.nan, dtype=self.query.dtype, device=device)
        attend(y, *moved, BlockOperands(*tables), options)
        return y.cpu()

    def only(self, row: int) -> "Case":
        """Return the case of one row alone."""
        begins = self.blocks.begins
        begin, end = begins[row : row + 2].tolist()
        own = slice(row, row + 1)
        blocks = self.blocks._replace(
            begins=begins[row : row + 2] - begin,
            firsts=self.blocks.firsts[own],
            rows=self.blocks.rows[own],
            longest=int(self.blocks.firsts[row]) + end - begin,
            is_decode=end - begin == 1,
        )
        return self._replace(query=self.query[:, begin:end], blocks=blocks)


class Shape(NamedTuple):
    """Heads of queries and of keys, the widths of keys and of values, and a dtype."""

    heads: int = 4
    kv_heads: int = 2
    width: int = 16
    v_width: int = 16
    dtype: torch.dtype = torch.float32


def make_case(
    counts: list[int], firsts: list[int], shape: Shape, seed: int, **options: Any
) -> Case:
    """Return new tokens after `firsts` tokens of each row, in blocks in a random order."""
    generator = torch.Generator().manual_seed(seed)
    window = options.get("window", 0)
    needed = [
        -(-(first + count) // BLOCK_TOKENS) for first, count in zip(firsts, counts, strict=True)
    ]
    total = sum(needed) + 3
    free = iter(torch.randperm(total, generator=generator).tolist())
    table = torch.full((len(counts) + 2, max(needed)), total + 7, dtype=torch.int32)
    rows = torch.randperm(len(counts) + 2, generator=generator)[: len(counts)]
    keys = torch.full((shape.kv_heads, total * BLOCK_TOKENS, shape.width), torch.nan)
    values = torch.full((shape.kv_heads, total * BLOCK_TOKENS, shape.v_width), torch.nan)
    for row, first, count, blocks in zip(rows, firsts, counts, needed, strict=True):
        oldest = max(0, first - window + 1) if window else 0
        for number in range(oldest // BLOCK_TOKENS, blocks):
            block = table[row, number] = next(free)
            for token in range(
                number * BLOCK_TOKENS, min((number + 1) * BLOCK_TOKENS, first + count)
            ):
                place = block * BLOCK_TOKENS + token % BLOCK_TOKENS
                if token >= oldest:
                    keys[:, place] = torch.randn(shape.kv_heads, shape.width, generator=generator)
                    values[:, place] = torch.randn(
                        shape.kv_heads, shape.v_width, generator=generator
                    )
    query = torch.randn(sum(counts), shape.heads, shape.width, generator=generator)
    if options.pop("has_sinks", False):
        options["sinks"] = torch.randn(shape.heads, generator=generator)
    longest = max(map(sum, zip(firsts, counts, strict=True)))
    begins = torch.tensor([*accumulate(counts, initial=0)])
    blocks = BlockOperands(
        begins, torch.tensor(firsts), rows, table, BLOCK_TOKENS, longest, set(counts) == {1}
    )
    moved = [one.to(shape.dtype) for one in (query.transpose(0, 1), keys, values)]
    return Case(*moved, blocks, AttentionOptions(**options))


SHAPES = st.builds(
    lambda kv_heads, group, width, v_width, dtype: Shape(
        kv_heads * group, kv_heads, width, v_width, dtype
    ),
    st.sampled_from([1, 2]),
    st.sampled_from([1, 3, 7, 65]),
    st.sampled_from([8, 16, 24]),
    st.sampled_from([8, 16, 40]),
    st.sampled_from([torch.float32, torch.float16]),
)

OPTIONS = st.fixed_dictionaries(
    {},
    optional={
        "scale": st.just(0.3),
        "softcap": st.just(2.5),
        "has_sinks": st.just(True),
        "window": st.sampled_from([1, 5, 16, 40, 200]),
        "chunk": st.sampled_from([7, 32]),
    },
)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    rows = draw(st.integers(1, 3))
    one = st.just(1) if draw(st.booleans()) else st.integers(1, 20)
    counts = draw(st.lists(one, min_size=rows, max_size=rows))
    firsts = draw(st.lists(st.integers(0, 100), min_size=rows, max_size=rows))
    return make_case(counts, firsts, draw(SHAPES), draw(st.integers(0, 99)), **draw(OPTIONS))


@st.composite
def shared_cases(draw: st.DrawFn) -> tuple[Case, Case]:
    """A decode step whose rows have beginnings in common, and the same with what is shared stated.

    There, the table of a row that others read for has a block of NaN in place of each shared one.
    """
    rows = draw(st.integers(2, 6))
    firsts = draw(st.lists(st.integers(0, 100), min_size=rows, max_size=rows))
    case = make_case([1] * rows, firsts, draw(SHAPES), draw(st.integers(0, 99)), **draw(OPTIONS))
    table, own = case.blocks.table, case.blocks.rows
    # Blocks that a window has left are NaN, and no row shares them.
    empty = next(b for b in range(len(case.keys[0]) // BLOCK_TOKENS) if b not in table[own])
    stated, rows_max = table.clone(), draw(st.sampled_from([3, 8]))
    shared = torch.full((rows, 1 + rows_max), -1)
    shared[:, 0] = 0
    order = draw(st.permutations(range(rows)))
    for begin in range(0, rows, 3):
        group = order[begin : begin + draw(st.integers(1, 3))]
        blocks = min(firsts[row] for row in group) // BLOCK_TOKENS
        if len(group) < 2 or not blocks or case.options.window or case.options.chunk:
            continue
        blocks = draw(st.integers(1, blocks))
        shared[group[0], 1 : 1 + len(group)] = torch.tensor(group)
        for row in group:
            shared[row, 0] = blocks * BLOCK_TOKENS
        for row in group[1:]:
            table[own[row], :blocks] = table[own[group[0]], :blocks]
            stated[own[row], :blocks] = empty
    blocks = case.blocks._replace(table=stated, shared=shared)
    return case, case._replace(blocks=blocks)


def error_of(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).abs().max())


@needs_triton
@given(case=cases(), processors=st.sampled_from([1, 8]))
@settings(max_examples=8)
def test_random_tables_have_the_output_of_the_reference(case: Case, processors: int) -> None:
    """In parts or whole: more processors divide the tokens into more parts."""
    expected = case.run(attend_reference)
    allowed = ERRORS_MAX[case.query.dtype]
    for attend in (TritonAttention(processors=processors), TritonAttention(batch_invariant=True)):
        assert error_of(case.run(attend, DEVICE), expected) <= allowed


@needs_triton
@given(pair=shared_cases(), processors=st.sampled_from([1, 8]))
@settings(max_examples=15)
def test_shared_tokens_are_read_for_all_rows_that_have_them(
    pair: tuple[Case, Case], processors: int
) -> None:
    """From one row's blocks, in any number of rows; rows without shared tokens are as before."""
    case, stated = pair
    found = stated.run(TritonAttention(processors=processors), DEVICE)
    assert error_of(found, case.run(attend_reference)) <= ERRORS_MAX[case.query.dtype]


@needs_triton
def test_rows_with_windows_share_tokens() -> None:
    """A window ends within the shared tokens of one row, and after those of another."""
    case = make_case([1, 1, 1], [100, 70, 140], Shape(8, 2), seed=2)
    table, own = case.blocks.table, case.blocks.rows
    table[own[1:], :4] = table[own[0], :4]
    shared = torch.tensor([[64, 0, 1, 2], [64, -1, -1, -1], [64, -1, -1, -1]])
    for options in (AttentionOptions(window=50), AttentionOptions(chunk=48)):
        windowed = case._replace(options=options)
        stated = windowed._replace(blocks=case.blocks._replace(shared=shared))
        expected = windowed.run(attend_reference)
        for processors in (1, 8):
            found = stated.run(TritonAttention(processors=processors), DEVICE)
            assert error_of(found, expected) <= ERRORS_MAX[torch.float32]
        invariant = TritonAttention(batch_invariant=True)
        assert torch.equal(stated.run(invariant, DEVICE), windowed.run(invariant, DEVICE))


@needs_triton
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_invariant_rows_have_the_same_bits_in_every_batch(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last token of a chunk has the bits of a decode step, too."""
    monkeypatch.setattr(attention, "PART_TOKENS", 64)
    counts, firsts = [1, 5, 1, 9], [150, 62, 3, 30]
    shape = Shape(6, 2, 16, 16, dtype)
    case = make_case(counts, firsts, shape, seed=3, window=100, has_sinks=True)
    attend = TritonAttention(batch_invariant=True)
    together = case.run(attend, DEVICE)
    begins = case.blocks.begins.tolist()
    for row, (begin, end) in enumerate(pairwise(begins)):
        alone = case.only(row)
        assert torch.equal(alone.run(attend, DEVICE), together[begin:end])
        last = alone.blocks._replace(
            begins=torch.tensor([0, 1]),
            firsts=alone.blocks.firsts + counts[row] - 1,
            is_decode=True,
        )
        decode = alone._replace(query=alone.query[:, -1:], blocks=last)
        assert torch.equal(decode.run(attend, DEVICE), together[end - 1 : end])


@given(case=cases())
@settings(max_examples=25)
def test_the_reference_is_pytorchs_function_over_gathered_blocks(case: Case) -> None:
    query, keys, values, blocks, options = case
    if options.sinks is not None or options.softcap:
        return
    found = case.run(attend_reference)
    for row, (begin, end) in enumerate(pairwise(blocks.begins)):
        length = int(blocks.firsts[row] + end - begin)
        index = torch.arange(length)
        own = index[length - int(end - begin) :, None]
        mask = index <= own
        if options.window:
            mask &= index > own - options.window
        if options.chunk:
            mask &= index // options.chunk == own // options.chunk
        table = blocks.table[blocks.rows[row]].long()
        used = index[mask.any(0)]
        places = table[used // BLOCK_TOKENS] * BLOCK_TOKENS + used % BLOCK_TOKENS
        expected = scaled_dot_product_attention(
            query[None, :, begin:end],
            keys[None, :, places],
            values[None, :, places],
            attn_mask=mask[:, used],
            scale=options.scale,
            enable_gqa=True,
        )[0].transpose(0, 1)
        assert error_of(found[begin:end], expected) <= ERRORS_MAX[query.dtype]


@pytest.mark.skipif(not IS_INTERPRETED, reason="counts addresses in Triton's interpreter")
@pytest.mark.parametrize("processors", [1, 60])
@pytest.mark.parametrize("shares", [False, True])
def test_a_decode_step_reads_each_key_and_value_once(
    shares: bool, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[np.ndarray] = []
    original = interpreter.load

    def load(addresses: Any, mask: Any, *rest: Any) -> Any:
        loads.append(np.asarray(addresses)[np.asarray(mask)])
        return original(addresses, mask, *rest)

    case = make_case([1, 1, 1], [100, 7, 260], Shape(8, 2), seed=5, window=0 if shares else 90)
    attended = sum(min(90, first + 1) for first in (100, 7, 260))
    if shares:
        table, own = case.blocks.table, case.blocks.rows
        table[own[2], :5] = table[own[0], :5]
        shared = torch.tensor([[80, 0, 2], [0, -1, -1], [80, -1, -1]])
        case = case._replace(blocks=case.blocks._replace(shared=shared))
        attended = 101 + 8 + 261 - 80
    monkeypatch.setattr(interpreter, "load", load)
    case.run(TritonAttention(processors=processors))
    for buffer in (case.keys, case.values):
        begin = buffer.data_ptr()
        read = np.concatenate(loads)
        read = read[(read >= begin) & (read < begin + buffer.nbytes)]
        assert len(read) == len(np.unique(read)) == attended * 2 * 16


@needs_triton
def test_tiles_have_at_least_the_rows_of_a_tensor_core() -> None:
    for group in (1, 2, 3, 7, 16, 71, 128):
        for width in (8, 64, 80, 128, 256):
            found = attention_constants(DECODE, group, width, width, 2)
            assert found["BLOCK_Q"] * found["BLOCK_H"] >= 16
            assert found["HEAD_BLOCKS"] * found["BLOCK_H"] >= group
            assert min(found["BLOCK_N"], found["BLOCK_D"]) >= 16


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"keys": torch.zeros(3, 64, 16)}, "4 query heads"),
        ({"values": torch.zeros(2, 48, 16)}, "values of"),
        ({"values": torch.zeros(2, 64, 16, dtype=torch.float16)}, "values of torch.float16"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Tensor], reason: str) -> None:
    case = make_case([1], [3], Shape(), seed=1)
    with pytest.raises(ValueError, match=reason):
        case._replace(**change).run(attend_reference)


@needs_triton
@given(shape=SHAPES, tokens=st.integers(0, 5))
@settings(max_examples=8)
def test_tokens_are_written_to_their_places(shape: Shape, tokens: int) -> None:
    """From any strides; every other place keeps what it has."""
    generator = torch.Generator().manual_seed(tokens)
    places = torch.randperm(40, generator=generator)[:tokens]
    widths = (shape.width, shape.v_width)
    memory = [torch.randn(shape.kv_heads, 40, width, generator=generator) for width in widths]
    # As a projection leaves them, where heads are next to each other.
    new = [torch.randn(tokens, shape.kv_heads, width, generator=generator) for width in widths]
    operands = [one.to(shape.dtype) for one in (*memory, *(one.transpose(0, 1) for one in new))]
    expected = [one.clone() for one in operands[:2]]
    REFERENCE_ATTENTION.write(*expected, *operands[2:], places)
    found = [one.to(DEVICE) for one in (*operands, places)]
    attention.write_tokens(*found)
    for own, other in zip(found, expected, strict=False):
        assert torch.equal(own.cpu(), other)
