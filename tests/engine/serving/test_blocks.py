"""Blocks under any history of rows: nothing leaks, nothing is used twice, contents stay correct.

The machine has a memory. Rows write into it what they compute, and a row that reads something else
than its tokens under its version has met another row's block.
"""

import random
import sys
from functools import partial
from itertools import pairwise

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loradock.engine.serving.blocks import (
    BLOCK_TOKENS,
    BlockPool,
    BlockTable,
    NoFreeBlocks,
    Prefix,
    block_keys,
    blocks_around,
    blocks_of,
    root_key,
)
from tests.support.engine.block_memory import check_pool, references

LOOKBACKS = st.one_of(st.integers(1, 3 * BLOCK_TOKENS), st.just(sys.maxsize))

"""Of the tokens of all rows: windows of some blocks, or none."""

VERSIONS = ("base", "adapter, first version", "adapter, second version", None)

# Few different tokens, and long repeated runs: most prompts share a beginning.
TOKENS = st.builds(
    lambda begin, length: [begin] * (length // 2) + [0] * (length - length // 2),
    st.integers(0, 1),
    st.integers(1, 4 * BLOCK_TOKENS),
)


def reusable(root: bytes, tokens: list[int]) -> list[bytes]:
    """The keys of the blocks that a prompt may reuse: its last token is always computed."""
    return list(block_keys(root, tokens[:-1]))


class Row:
    """One row of the machine; `version` None is a row that shares nothing."""

    def __init__(
        self, pool: BlockPool, version: str | None, tokens: list[int], lookback: int
    ) -> None:
        self.version, self.tokens = version, tokens
        root = None if version is None else root_key(version)
        self.table = BlockTable(pool, root, lookback)
        self.keys = [] if root is None else reusable(root, tokens)

    def content(self, index: int) -> object:
        """Everything that the keys and values of a token depend on."""
        return self.version or id(self), tuple(self.tokens[: index + 1])


class Blocks(RuleBasedStateMachine):
    """Rows that start, compute, grow, end and are preempted, over a small pool."""

    @initialize(blocks=st.integers(1, 12), lookback=LOOKBACKS)
    def make(self, blocks: int, lookback: int) -> None:
        self.pool, self.lookback = BlockPool(blocks), lookback
        self.rows: list[Row] = []
        self.memory: dict[tuple[int, int], object] = {}

    def compute(self, row: Row, length: int) -> None:
        """Write the row's next tokens, which must not be in a block of another row."""
        for index in range(row.table.length, length):
            block, inside = divmod(row.table.place(index), BLOCK_TOKENS)
            assert references(self.pool, block) == 1, "a shared block is written"
            self.memory[block, inside] = row.content(index)
        row.table.advance(length, lambda: row.tokens)

    def preempt(self, row: Row) -> None:
        row.table.release()
        self.rows.remove(row)

    @rule(version=st.sampled_from(VERSIONS), tokens=TOKENS, part=st.floats(0, 1))
    def start(self, version: str | None, tokens: list[int], part: float) -> None:
        row = Row(self.pool, version, tokens, self.lookback)
        found = row.table.find(row.keys)
        needed = blocks_of(len(tokens)) - found.end
        fits = needed <= self.pool.available - self.pool.cached_among(found.blocks)
        row.table.reuse(found, row.keys)
        try:
            row.table.reserve(len(tokens), expected=2 * len(tokens))
        except NoFreeBlocks:
            assert not fits
            row.table.release()
            return
        assert fits
        self.rows.append(row)
        self.compute(row, row.table.length + int(part * (len(tokens) - row.table.length)))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), tokens=st.lists(st.integers(0, 1), min_size=1, max_size=BLOCK_TOKENS))
    def grow(self, data: st.DataObject, tokens: list[int]) -> None:
        """Finish a row's tokens and add more; rows are preempted until there is room."""
        row = data.draw(st.sampled_from(self.rows))
        self.compute(row, len(row.tokens))
        row.tokens = row.tokens + tokens
        while True:
            before = list(row.table.blocks)
            try:
                row.table.reserve(len(row.tokens))
                break
            except NoFreeBlocks:
                assert row.table.blocks == before
            others = [one for one in self.rows if one is not row]
            if not others:
                self.preempt(row)
                return
            self.preempt(data.draw(st.sampled_from(others)))
        self.compute(row, len(row.tokens))

    @precondition(lambda self: self.rows)
    @rule(data=st.data(), step=st.integers(1, BLOCK_TOKENS), steps=st.integers(1, 12))
    def advance(self, data: st.DataObject, step: int, steps: int) -> None:
        """Add tokens in steps, with blocks for one step at a time, as far as there are any."""
        row = data.draw(st.sampled_from(self.rows))
        self.compute(row, len(row.tokens))
        for _ in range(steps):
            row.tokens = row.tokens + [1] * step
            try:
                row.table.reserve(len(row.tokens))
            except NoFreeBlocks:
                row.tokens = row.tokens[: row.table.length]
                return
            assert len(row.table.blocks) <= blocks_around(
                min(self.lookback, row.table.length) + step
            )
            self.compute(row, len(row.tokens))

    @precondition(lambda self: self.rows)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        self.preempt(data.draw(st.sampled_from(self.rows)))

    @invariant()
    def every_block_is_in_one_state(self) -> None:
        check_pool(self.pool)
        held = [block for row in self.rows for block in row.table.blocks]
        assert self.pool.referenced == len(set(held))
        for block in range(self.pool.blocks):
            assert references(self.pool, block) == held.count(block)

    @invariant()
    def every_row_holds_the_tokens_that_its_next_one_attends_to(self) -> None:
        for row in self.rows:
            first = max(0, row.table.length - self.lookback)
            assert 0 <= first - row.table.start < BLOCK_TOKENS
            for index in range(row.table.start, row.table.length):
                place = divmod(row.table.place(index), BLOCK_TOKENS)
                assert self.memory[place] == row.content(index)

    def teardown(self) -> None:
        for row in getattr(self, "rows", []):
            row.table.release()
        if hasattr(self, "pool"):
            assert self.pool.available == self.pool.blocks


Blocks.TestCase.settings = settings(max_examples=40, stateful_step_count=25)

TestBlocks = Blocks.TestCase


def filled(
    pool: BlockPool, version: str, tokens: list[int], lookback: int = sys.maxsize
) -> BlockTable:
    table = BlockTable(pool, root_key(version), lookback)
    keys = reusable(root_key(version), tokens)
    table.reuse(table.find(keys), keys)
    table.reserve(len(tokens))
    table.advance(len(tokens), lambda: tokens)
    return table


def test_the_least_recently_used_prefix_is_evicted_first_from_its_end() -> None:
    pool = BlockPool(6)
    one, two = [1] * 3 * BLOCK_TOKENS, [2] * 3 * BLOCK_TOKENS
    for tokens in (one, two):
        filled(pool, "base", tokens).release()
    filled(pool, "base", [*one, 9]).release()
    # Three blocks of `one` were used last, and one block more took the end of `two`.
    found = [pool.find(reusable(root_key("base"), [*tokens, 9]), 3) for tokens in (one, two)]
    assert [prefix.end for prefix in found] == [3, 2]


def test_a_prefix_is_shared_with_a_running_row_and_outlives_it() -> None:
    pool = BlockPool(8)
    tokens = [5] * (2 * BLOCK_TOKENS + 3)
    tables = [filled(pool, "base", tokens) for _ in range(3)]
    assert pool.referenced == 2 + 3
    assert [table.reused for table in tables] == [0, 2 * BLOCK_TOKENS, 2 * BLOCK_TOKENS]
    assert filled(pool, "other", tokens).reused == 0
    for table in tables:
        table.release()
    assert filled(pool, "base", tokens).reused == 2 * BLOCK_TOKENS


def test_rows_that_grow_in_turn_have_adjacent_blocks() -> None:
    pool = BlockPool(64)
    tables = [BlockTable(pool, None) for _ in range(8)]
    for tokens in range(1, 8 * BLOCK_TOKENS, 5):
        for table in tables:
            table.reserve(tokens, expected=8 * BLOCK_TOKENS)
    for table in tables:
        first = table.blocks[0]
        assert table.blocks == list(range(first, first + 8))


def test_a_row_with_tokens_of_its_own_takes_no_other_blocks() -> None:
    pool = BlockPool(8)
    tokens = [5] * (3 * BLOCK_TOKENS)
    keys = list(block_keys(root_key("base"), tokens))
    first = filled(pool, "base", tokens)
    second = BlockTable(pool, root_key("base"))
    for count in (1, 1, 3):
        second.reuse(Prefix(count, first.blocks[:count]), keys)
        assert (second.blocks, second.length) == (first.blocks[:count], count * BLOCK_TOKENS)
    second.reserve(3 * BLOCK_TOKENS + 1)
    with pytest.raises(ValueError, match="without computed tokens"):
        second.reuse(first.prefix, keys)


def test_keys_differ_by_every_part() -> None:
    tokens = list(range(BLOCK_TOKENS))
    parts = [("ab", "c"), ("a", "bc"), ("abc",), ("abc", ""), ("ab", b"d")]
    roots = [root_key(*one) for one in parts]
    keys = [next(block_keys(root, tokens)) for root in roots]
    changed = next(block_keys(roots[0], [*tokens[:-1], 99]))
    assert len({*keys, *roots, changed}) == 2 * len(parts) + 1
    assert list(block_keys(roots[0], tokens[:-1])) == []


def test_a_window_is_reused_without_the_blocks_before_it() -> None:
    """Of a prompt of ten blocks, whose windows are of two, the first eight blocks are evicted."""
    pool = BlockPool(10)
    tokens = [5] * (10 * BLOCK_TOKENS)
    row = filled(pool, "base", tokens, 2 * BLOCK_TOKENS)
    assert (row.released, len(row.blocks), pool.referenced) == (8, 2, 2)
    filled(pool, "other", [6] * (8 * BLOCK_TOKENS)).release()
    row.release()
    assert (row.released, row.capacity, row.length) == (0, 0, 0)
    keys = reusable(root_key("base"), [*tokens, 5])
    assert [pool.find(keys, needed).end for needed in (1, 2, 3)] == [10, 10, 0]
    again = filled(pool, "base", [*tokens, 5], 2 * BLOCK_TOKENS)
    assert (again.reused, again.released) == (10 * BLOCK_TOKENS, 8)


def test_a_prefix_ends_where_a_block_of_its_window_is_missing() -> None:
    pool = BlockPool(8)
    keys = [bytes([number]) for number in range(6)]
    for block, number in zip(pool.allocate(4), (0, 1, 3, 4), strict=True):
        pool.register(block, keys[number])
    ends = [[pool.find(keys[:count], needed).end for count in range(7)] for needed in (1, 2, 3)]
    assert ends == [[0, 1, 2, 2, 4, 5, 5], [0, 1, 2, 2, 2, 5, 5], [0, 1, 2, 2, 2, 2, 2]]


def test_most_rows_are_adjacent_after_all_blocks_were_used() -> None:
    """16 rows run at a time; their prompts are kept, so hardly any block is ever free."""
    chance, pool = random.Random(1), BlockPool(512)
    rows: list[tuple[BlockTable, int]] = []
    adjacent = []
    for number in range(600):
        length = chance.randint(50, 150)
        table = BlockTable(pool, root_key(str(number)))
        table.reserve(length, length + 48)
        table.advance(length, partial(range, length))
        rows.append((table, length + 48))
        if len(rows) == 16:
            ended, end = rows.pop(chance.randrange(16))
            ended.reserve(end, end)
            ended.advance(end, partial(range, end))
            adjacent.append(all(after == before + 1 for before, after in pairwise(ended.blocks)))
            ended.release()
    check_pool(pool)
    assert sum(adjacent[-300:]) > 150


def test_at_most_a_quarter_is_evicted_to_make_blocks_adjacent() -> None:
    """Also where many rows have more room than there is."""
    pool = BlockPool(160)
    tables = [BlockTable(pool, root_key(str(number))) for number in range(160)]
    for table in tables:
        table.reserve(BLOCK_TOKENS)
        table.advance(BLOCK_TOKENS, partial(range, BLOCK_TOKENS))
    # Every second block is held, so no two can be adjacent.
    for table in tables[::2]:
        table.release()
    last = -1
    for count in range(1, 21):
        [last] = pool.allocate(1, last, room=1000)
        assert pool.available == 80 - count
        assert pool.cached_among(range(160)) >= 80 - 160 // 4 - count


def test_a_row_without_room_for_all_its_blocks_has_many_adjacent_ones() -> None:
    pool = BlockPool(100)
    pool.allocate(100)
    pool.release([0, 2, 4, *range(40, 80), 90])
    first = pool.allocate(10, room=70)
    assert first == list(range(first[0], first[0] + 10))
    # Two runs of at least ten blocks are left, and no longer one than that.
    blocks = pool.allocate(25, room=70)
    assert sum(after != before + 1 for before, after in pairwise(blocks)) <= 2
