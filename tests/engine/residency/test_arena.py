"""Properties of the arena: a slot holds what was written there until it is reset."""

from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from loradock.engine.errors import Conflict, DeviceOutOfMemory, NotResident
from loradock.engine.layout import (
    ABSENT,
    ALIGNMENT_BYTES,
    ModuleKind,
    ModuleShape,
    slice_elements,
)
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.pinned import PinnedMemory
from tests.support.engine.arena_examples import (
    CAPACITY_BYTES,
    MODULES,
    SLOTS,
    CopyFailedError,
    ManualCopier,
    ManualCopy,
    Matrices,
    assert_same,
    make_arena,
    make_blob,
    matrices_in,
)

NEEDS_CUDA = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
DEVICES = ["cpu", pytest.param("cuda", marks=NEEDS_CUDA)]
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.float16])
SLOT = st.integers(0, SLOTS - 1)
COLUMN = st.integers(0, len(MODULES) - 1)
RANKS = st.dictionaries(COLUMN, st.integers(1, 12), min_size=1, max_size=3)


class ArenaMachine(RuleBasedStateMachine):
    """The arena compared with a dictionary, with copies that end late or fail."""

    @initialize(dtype=DTYPES, bounce_bytes=st.sampled_from([128, 384, 1 << 20]))
    def start(self, dtype: torch.dtype, bounce_bytes: int) -> None:
        self.dtype = dtype
        self.copier = ManualCopier()
        with patch("loradock.engine.residency.extents._BOUNCE_BYTES_MAX", bounce_bytes):
            self.arena = make_arena(dtype, self.copier)
        self.published: dict[int, Matrices] = {}
        self.generations: dict[int, int] = {}
        self.writes: dict[int, tuple[int, Matrices, ManualCopy]] = {}
        self.sizes: dict[tuple[int, int], int] = {}
        self.last = 0

    @property
    def free_bytes(self) -> int:
        return CAPACITY_BYTES - sum(self.sizes.values())

    def is_used(self, slot: int) -> bool:
        return slot in self.generations or any(owner == slot for owner, _ in self.sizes)

    def try_to_begin(self, slot: int, ranks: dict[int, int]) -> None:
        """Begin a write, and record it where it must succeed."""
        blob, expected = make_blob(ranks, self.last, self.dtype)
        self.last += 1
        free = [other for other in range(SLOTS) if not self.is_used(other)]
        if self.last % 10 and free:
            slot = free[slot % len(free)]
        wanted: type[Exception] | None = CopyFailedError if self.copier.start_fails else None
        if self.is_used(slot):
            wanted = Conflict
        elif blob.size_bytes > self.free_bytes:
            wanted = DeviceOutOfMemory
        if wanted:
            with pytest.raises(wanted):
                self.arena.begin_write(slot, self.last, blob)
            return
        self.arena.begin_write(slot, self.last, blob)
        self.writes[slot] = (self.last, expected, self.copier.copies[-1])
        self.sizes[slot, -1] = blob.size_bytes

    @rule(slot=SLOT, ranks=RANKS)
    def begin(self, slot: int, ranks: dict[int, int]) -> None:
        self.try_to_begin(slot, ranks)

    @rule(sizes=st.lists(RANKS, min_size=4, max_size=SLOTS), pending=st.booleans())
    def fragment(self, sizes: list[dict[int, int]], pending: bool) -> None:
        """Fill free slots one after the other, then discard every second of them."""
        free = [slot for slot in range(SLOTS) if not self.is_used(slot)]
        for slot, ranks in zip(free, sizes, strict=False):
            self.try_to_begin(slot, ranks)
        begun = [slot for slot in free if slot in self.writes]
        for slot in begun[::2]:
            self.arena.discard_write(slot)
            del self.writes[slot], self.sizes[slot, -1]
        for slot in begun[1::2]:
            if not pending:
                self.finish_one(slot)

    @rule(slot=SLOT, ranks=RANKS, start_fails=st.booleans())
    def begin_with_a_failing_copy(
        self, slot: int, ranks: dict[int, int], start_fails: bool
    ) -> None:
        self.copier.start_fails, self.copier.copy_fails = start_fails, not start_fails
        self.try_to_begin(slot, ranks)
        self.copier.start_fails = self.copier.copy_fails = False

    @precondition(lambda self: self.writes)
    @rule(data=st.data(), completes=st.booleans())
    def finish(self, data: st.DataObject, completes: bool) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writes)))
        copy = self.writes[slot][2]
        assert self.arena.is_copied(slot) == copy.done
        if completes and not copy.fails:
            copy.wait()
            assert self.arena.is_copied(slot)
            if data.draw(st.booleans()):
                return
        self.finish_one(slot)

    def finish_one(self, slot: int) -> None:
        generation, expected, copy = self.writes.pop(slot)
        if copy.fails:
            with pytest.raises(CopyFailedError):
                self.arena.finish_write(slot)
            del self.sizes[slot, -1]
            return
        self.arena.finish_write(slot)
        self.published[slot], self.generations[slot] = expected, generation

    @precondition(lambda self: self.writes)
    @rule(data=st.data())
    def discard(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.writes)))
        self.arena.discard_write(slot)
        assert self.writes[slot][2].done, "a copy may still write into freed bytes"
        del self.writes[slot], self.sizes[slot, -1]

    @precondition(lambda self: self.generations)
    @rule(data=st.data())
    def reset(self, data: st.DataObject) -> None:
        slot = data.draw(st.sampled_from(sorted(self.generations)))
        before = self.arena.data.view(torch.uint8).clone()
        self.arena.reset(slot, self.generations[slot])
        assert torch.equal(before, self.arena.data.view(torch.uint8)), "a reset wrote bytes"
        self.sizes = {key: size for key, size in self.sizes.items() if key[0] != slot}
        del self.generations[slot], self.published[slot]

    @precondition(lambda self: self.last % 5 == 0)
    @rule(slot=SLOT)
    def misuse(self, slot: int) -> None:
        for stale in {0, self.last + 1, self.generations.get(slot, 0) - 1}:
            with pytest.raises(NotResident):
                self.arena.reset(slot, stale)
        if slot not in self.writes:
            for wrong in (self.arena.finish_write, self.arena.discard_write, self.arena.is_copied):
                with pytest.raises(Conflict):
                    wrong(slot)

    @rule(slot=SLOT, index=COLUMN, rank=st.integers(1, 12))
    def write_slice(self, slot: int, index: int, rank: int) -> None:
        _, expected = make_blob({index: rank}, self.last, self.dtype)
        size_bytes = slice_elements(rank, MODULES[index], self.dtype) * self.dtype.itemsize
        wanted = Conflict if slot in self.writes else None
        if wanted is None and size_bytes > self.free_bytes:
            wanted = DeviceOutOfMemory
        if wanted:
            with pytest.raises(wanted):
                self.arena.write_slice(slot, index, *expected[index])
            return
        self.arena.write_slice(slot, index, *expected[index])
        self.drop_slice(slot, index)
        self.published.setdefault(slot, {})[index] = expected[index]
        self.sizes[slot, index] = size_bytes

    @precondition(lambda self: self.last % 3 == 0)
    @rule(slot=SLOT, index=COLUMN)
    def reset_slice(self, slot: int, index: int) -> None:
        if slot in self.writes:
            with pytest.raises(Conflict):
                self.arena.reset_slice(slot, index)
            return
        self.arena.reset_slice(slot, index)
        self.drop_slice(slot, index)

    def drop_slice(self, slot: int, index: int) -> None:
        self.published.get(slot, {}).pop(index, None)
        self.sizes.pop((slot, index), None)
        own = {column for owner, column in self.sizes if owner == slot and column >= 0}
        if not self.published.get(slot, {}).keys() - own:
            self.sizes.pop((slot, -1), None)

    @invariant()
    def holds(self) -> None:
        if not hasattr(self, "arena"):
            return
        self.arena.check()
        assert self.arena.free_bytes == self.free_bytes
        for slot in range(SLOTS):
            assert_same(matrices_in(self.arena, slot), self.published.get(slot, {}))
            if slot in self.generations:
                self.arena.check_generation(slot, self.generations[slot])


ArenaMachine.TestCase.settings = settings(max_examples=60, stateful_step_count=40)
test_arena_against_a_dictionary = ArenaMachine.TestCase


@pytest.mark.parametrize("device", DEVICES)
def test_a_slot_is_written_and_rewritten_on_every_kind_of_device(device: str) -> None:
    arena = make_arena(torch.bfloat16, device=device)
    for generation in (1, 2):
        blobs = [make_blob({0: slot, 3: 2}, 10 * generation + slot, arena.dtype) for slot in (1, 4)]
        for slot, (blob, _) in enumerate(blobs):
            arena.begin_write(slot, generation, blob)
            assert not matrices_in(arena, slot), "visible before it is complete"
        for slot, (_, expected) in enumerate(blobs):
            arena.finish_write(slot)
            assert_same(matrices_in(arena, slot), expected)
        arena.check()
        for slot in range(len(blobs)):
            arena.reset(slot, generation)
            with pytest.raises(NotResident):
                arena.check_generation(slot, generation)
            with pytest.raises(Conflict, match="later"):
                arena.begin_write(slot, generation, blobs[slot][0])
    assert arena.free_bytes == arena.capacity_bytes
    arena.close()


def fill_every_second_extent(arena: Arena) -> dict[int, Matrices]:
    """Fill the arena and reset every second slot; return what the other slots hold."""
    blobs = [make_blob({0: 4, 3: 5}, seed, arena.dtype) for seed in range(SLOTS)]
    written = blobs[: arena.capacity_bytes // blobs[0][0].size_bytes]
    for slot, (blob, _) in enumerate(written):
        arena.begin_write(slot, 1, blob)
        arena.finish_write(slot)
    for slot in range(0, len(written), 2):
        arena.reset(slot, 1)
    return {slot: written[slot][1] for slot in range(1, len(written), 2)}


@pytest.mark.parametrize("device", DEVICES)
def test_compaction_moves_whole_adapters_on_every_kind_of_device(device: str) -> None:
    with patch("loradock.engine.residency.extents._BOUNCE_BYTES_MAX", 256):
        arena = make_arena(torch.float32, device=device)
    written = fill_every_second_extent(arena)
    large, expected = make_blob({0: 4, 1: 5, 3: 7}, 99, arena.dtype)
    arena.begin_write(0, 2, large)
    arena.finish_write(0)
    assert_same(matrices_in(arena, 0), expected)
    for slot, matrices in written.items():
        assert_same(matrices_in(arena, slot), matrices)
    arena.check()
    arena.close()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_a_copy_waits_for_work_that_reads_the_bytes_which_it_overwrites() -> None:
    arena = make_arena(torch.float32, device="cuda")
    pinned = PinnedMemory(0)
    old, new = (make_blob({0: 4, 3: 5}, seed, arena.dtype)[0].to_pinned(pinned) for seed in (1, 2))
    arena.begin_write(0, 1, old)
    arena.finish_write(0)
    before = arena.data.clone()
    # About 50 ms of work that was launched before the slot is reset.
    torch.cuda._sleep(100_000_000)
    read = arena.data.clone()
    arena.reset(0, 1)
    arena.begin_write(0, 2, new)
    del new
    arena.finish_write(0)
    assert torch.equal(read.nan_to_num(), before.nan_to_num())
    assert not torch.equal(arena.data.nan_to_num(), before.nan_to_num())
    arena.check()
    arena.close()


def test_the_tensors_stay_where_they_are_and_every_matrix_is_aligned() -> None:
    arena = make_arena(torch.float16)
    tensors = (
        arena.data,
        arena.directory.offsets,
        arena.directory.ranks,
        arena.directory.host_offsets,
        arena.directory.host_ranks,
    )
    addresses = [tensor.data_ptr() for tensor in tensors]
    assert arena.directory.offsets.data_ptr() == arena.directory.host_offsets.data_ptr(), (
        "one table on a CPU"
    )
    blob, expected = make_blob({1: 3, 2: 5, 4: 1}, 0, arena.dtype)
    arena.begin_write(2, 1, blob)
    arena.finish_write(2)
    for index in expected:
        assert all(m.data_ptr() % ALIGNMENT_BYTES == 0 for m in arena.weights(2, index) or ())
    assert arena.directory.offsets[2].tolist()[0] == ABSENT
    assert arena.directory.ranks[2].tolist() == [0, 3, 5, 0, 1]
    arena.reset(2, 1)
    assert addresses == [tensor.data_ptr() for tensor in tensors]
    arena.close()


def test_a_failing_move_is_raised_by_the_write_that_compacts() -> None:
    """The error ends the engine, so there is no state to recover."""
    copier = ManualCopier()
    arena = make_arena(torch.float32, copier)
    fill_every_second_extent(arena)
    copier.moves, copier.failing_moves = 0, range(1)
    large = make_blob({0: 4, 1: 5, 3: 7}, 99, arena.dtype)[0]
    with pytest.raises(CopyFailedError):
        arena.begin_write(0, 2, large)


def test_offsets_reach_beyond_32_bits() -> None:
    rank, width = 1, 1 << 16
    modules = [ModuleShape("wide", width, 64, 0)]
    arena = Arena(2, modules, (5 << 30) + (1 << 20), torch.bfloat16, "cpu", ManualCopier())
    arena._extents.allocate(arena._reserve(128) + 1000, 5 << 30)
    arena.write_slice(1, 0, torch.ones(rank, width), torch.full((64, rank), 2.0))
    a, b = arena.weights(1, 0) or pytest.fail("nothing was written")
    assert int(arena.directory.offsets[1, 0]) > 2**31
    assert a.sum() == width
    assert b.sum() == 128


def test_a_device_without_memory_for_the_arena_is_an_error() -> None:
    with pytest.raises(DeviceOutOfMemory, match="device_bytes_max"):
        Arena(1, MODULES, 1 << 60, torch.float32, "cpu")


@pytest.mark.parametrize("indices", [(0, 0), (1, 2), (0, 2)])
def test_columns_count_from_0_without_gaps(indices: tuple[int, int]) -> None:
    modules = [ModuleShape(f"m{i}", 8, 8, index) for i, index in enumerate(indices)]
    with pytest.raises(ValueError, match="indices"):
        Arena(1, modules, 1024, torch.float32, "cpu")


def test_a_blob_staged_for_another_arena_is_refused() -> None:
    arena = make_arena(torch.float32)
    with pytest.raises(ValueError, match="bfloat16"):
        arena.begin_write(0, 1, make_blob({0: 1}, 0, torch.bfloat16)[0])
    with pytest.raises(NotResident, match="0 to 7"):
        arena.begin_write(SLOTS, 1, make_blob({0: 1}, 0, torch.float32)[0])
    a, b = torch.ones(2, 16), torch.ones(16, 3)
    with pytest.raises(ValueError, match=r"\[16, 3\]"):
        arena.write_slice(0, 0, a, b)
    assert arena.free_bytes == arena.capacity_bytes
    arena.close()


def test_heads_are_known_while_any_slot_has_one() -> None:
    modules = [*MODULES[:2], replace(MODULES[2], kind=ModuleKind.HEAD), *MODULES[3:]]
    arena = Arena(SLOTS, modules, CAPACITY_BYTES, torch.float32, "cpu")
    expected = set[int]()
    for slot, column, is_write in [
        *((0, 1, True), (1, 2, True), (0, 2, True), (1, 2, False)),
        *((1, 3, True), (0, 2, False), (3, 2, True), (3, 2, False)),
    ]:
        if is_write:
            shape = modules[column]
            arena.write_slice(slot, column, *map(torch.ones, (shape.a_shape(1), shape.b_shape(1))))
        else:
            arena.reset_slice(slot, column)
        if column == 2:
            expected ^= {slot}
        assert arena.has_heads == bool(expected)
