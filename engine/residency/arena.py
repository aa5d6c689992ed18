"""The device side of residency: one arena of bytes, and what lies in it by slot and generation.

What it is: slots, their extents, their generations, and the publication of a row. What it is not:
a policy; it never empties a slot to make room for another. One rule: a row of the directory points
at complete weights or at nothing, at every moment that a forward pass can see.

All methods are called by the thread that launches the forward passes, between two of them. The
tensors are allocated once and only their contents change, so captured graphs stay valid. Where the
free bytes are enough but no hole is, a write slides extents down and rewrites their rows.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count
from typing import Final

import torch

from engine.errors import Conflict, DeviceOutOfMemory, NotResident
from engine.kernels.directory import SlotDirectory
from engine.layout import (
    ABSENT,
    ALIGNMENT_BYTES,
    ModuleShape,
    aligned_elements,
    directory_columns,
    entries,
    in_order_of_columns,
    slice_elements,
)
from engine.residency.compaction import SlideLost, Slider
from engine.residency.copier import Copier, Copy, copier_for
from engine.residency.extents import Extents, Move
from engine.residency.staging import Blob

_BOUNCE_BYTES_MAX: Final = 16 << 20
"""What sliding an extent by less than its own size takes beside the arena."""


@dataclass
class _Piece:
    """What one extent holds: some columns of one slot's row, at offsets relative to its start."""

    slot: int
    columns: torch.Tensor
    offsets: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True)
class _Write:
    """A copy that is not published yet."""

    owner: int
    generation: int
    copy: Copy


class Arena:
    """Slots of adapters in one device tensor.

    `data`: 1-D, of `dtype`, on `device`, `device_bytes_max` rounded down to 128 bytes, not
    initialised. `offsets` `[slots_max, columns]` int64 on `device`: where a slice's A starts,
    in elements of `data`, a multiple of 128 bytes, or -1 for nothing; its B starts behind A's
    padding (`layout`). `ranks` `[slots_max, columns]` int32, 0 for nothing.
    `host_offsets`, `host_ranks`: the same on the host; on a CPU the very same tensors. `edition`:
    its number grows with every change of these tables.
    `generations[slot]`: the highest that was ever published there. `copier` None: the device's own.
    Beside the arena the device gives a buffer of at most 16 MiB, for sliding.
    Raises `DeviceOutOfMemory` where the device can't give the memory.
    """

    def __init__(
        self,
        slots_max: int,
        modules: Sequence[ModuleShape],
        device_bytes_max: int,
        dtype: torch.dtype,
        device: torch.device | str,
        copier: Copier | None = None,
    ) -> None:
        self.slots_max = slots_max
        self.modules = in_order_of_columns(modules)
        self._shape_at = {shape.index: shape for shape in self.modules}
        self.dtype = dtype
        self.device = torch.device(device)
        self.generations = [0] * slots_max
        self._extents = Extents(device_bytes_max // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self._bytes = _aligned_bytes(self.capacity_bytes, self.device)
        self.data = self._bytes.view(dtype)
        directory = SlotDirectory(slots_max, directory_columns(self.modules), self.device)
        self.offsets, self.ranks = directory.offsets, directory.ranks
        self.host_offsets, self.host_ranks = directory.host_offsets, directory.host_ranks
        self.edition = directory.edition
        self._directory = directory
        self._copier = copier or copier_for(self.device)
        bounce = _aligned_bytes(min(self.capacity_bytes, _BOUNCE_BYTES_MAX), self.device)
        self._slider = Slider(self._bytes, bounce, self._copier)
        self._owners = count()
        self._pieces: dict[int, _Piece] = {}
        self._writes: dict[int, _Write] = {}
        self._residents: dict[int, int] = {}

    @property
    def capacity_bytes(self) -> int:
        """What all extents together may take."""
        return self._extents.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """What no extent has; a blob of up to this size finds room."""
        return self._extents.free_bytes

    def close(self) -> None:
        """Wait for running copies; the arena is not written any more after that."""
        self._copier.close()

    def begin_write(self, slot: int, generation: int, blob: Blob) -> None:
        """Give `slot` an extent and begin to copy `blob` into it; publishes nothing.

        Raises `DeviceOutOfMemory`, `Conflict` where the slot is in use or `generation` is not above
        the slot's last, and `ValueError` for a blob that was staged for another arena.
        """
        self._check_slot(slot)
        self._check_blob(blob)
        if self._is_used(slot):
            raise Conflict(f"slot {slot} {self._told(slot)}; reset it before writing it")
        if generation <= self.generations[slot]:
            raise Conflict(
                f"slot {slot} had generation {self.generations[slot]} already; "
                f"a write needs a later one, not {generation}"
            )
        owner = self._reserve(blob.size_bytes)
        try:
            copy = self._copier.start(self._view(owner), blob.data.view(torch.uint8))
        except BaseException:
            self._extents.drop(owner)
            raise
        columns = (blob.offsets != ABSENT).nonzero().flatten()
        self._pieces[owner] = _Piece(slot, columns, blob.offsets[columns], blob.ranks[columns])
        self._writes[slot] = _Write(owner, generation, copy)

    def is_copied(self, slot: int) -> bool:
        """Whether the slot's unfinished write has ended its copy, well or not; never blocks."""
        return self._write(slot).copy.is_done()

    def finish_write(self, slot: int) -> None:
        """Publish the slot's row, after waiting for its copy where that still runs.

        Raises what the copy raised; the write is discarded then.
        """
        write = self._write(slot)
        try:
            write.copy.wait()
        except BaseException:
            self.discard_write(slot)
            raise
        del self._writes[slot]
        self._publish(write.owner)
        self.generations[slot] = self._residents[slot] = write.generation

    def discard_write(self, slot: int) -> None:
        """Forget the slot's unfinished write, after waiting for its copy, and free its extent."""
        write = self._write(slot)
        _settle(write.copy)
        del self._writes[slot], self._pieces[write.owner]
        self._extents.drop(write.owner)

    def reset(self, slot: int, generation: int) -> None:
        """Clear the slot's row and free its extent; nothing is zero-filled.

        Raises `NotResident` unless exactly this generation is published there.
        """
        self.check_generation(slot, generation)
        for owner in [owner for owner, piece in self._pieces.items() if piece.slot == slot]:
            self._drop(owner)
        del self._residents[slot]

    def check_generation(self, slot: int, generation: int) -> None:
        """Raise `NotResident` unless exactly this generation is published in the slot."""
        self._check_slot(slot)
        if self._residents.get(slot) != generation:
            raise NotResident(
                f"generation {generation} of slot {slot} was named, but it {self._told(slot)}; "
                "activate the adapter again"
            )

    def shape_at(self, index: int) -> ModuleShape:
        """The module-slice whose first column of the directory this is."""
        return self._shape_at[index]

    def weights(self, slot: int, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """A and B of a module-slice, in the shapes of its kind, as views of `data`; scaling in B.

        None where the slot has nothing there.
        """
        self._check_slot(slot)
        start = int(self.host_offsets[slot, index])
        if start == ABSENT:
            return None
        shape = self.shape_at(index)
        # B's rank, which is the adapter's own, stands in the module-slice's last column.
        rank = int(self.host_ranks[slot, index + shape.columns - 1])
        return self._matrices(start, rank, shape)

    def write_slice(self, slot: int, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Put one module-slice's A and B, in the shapes of its kind, into an extent of its own.

        This is `set_lora` of a single layer: copied at once, the scaling already in B, in place of
        whatever the slot had there. Raises `DeviceOutOfMemory`, `Conflict` while the slot is being
        written, and `ValueError` for shapes that are not the module's.
        """
        self._check_unwritten(slot)
        shape, rank = self.shape_at(index), int(b.shape[-1])
        shape.check_fit(a, b)
        owner = self._reserve(slice_elements(rank, shape, self.dtype) * self.dtype.itemsize)
        try:
            for matrix, tensor in zip(
                self._matrices(self._start(owner), rank, shape), (a, b), strict=True
            ):
                matrix.copy_(tensor)
        except BaseException:
            self._extents.drop(owner)
            raise
        self.reset_slice(slot, index)
        columns, offsets, ranks = torch.tensor(entries(shape, 0, rank, self.dtype)).T
        self._pieces[owner] = _Piece(slot, columns, offsets, ranks.int())
        self._publish(owner)

    def reset_slice(self, slot: int, index: int) -> None:
        """Clear one module-slice of a slot; an extent that no column needs any more is freed.

        Raises `Conflict` while the slot is being written.
        """
        self._check_unwritten(slot)
        behind = index + self.shape_at(index).columns
        for owner, piece in list(self._pieces.items()):
            if piece.slot == slot and index in piece.columns:
                kept = (piece.columns < index) | (piece.columns >= behind)
                self._directory.clear(slot, piece.columns[~kept])
                piece.columns, piece.offsets = piece.columns[kept], piece.offsets[kept]
                piece.ranks = piece.ranks[kept]
                if not len(piece.columns):
                    self._drop(owner)

    def check(self) -> None:
        """Raise `AssertionError` unless extents, pieces and rows agree; for tests and debugging."""
        self._extents.check()
        offsets = torch.full_like(self.host_offsets, ABSENT)
        ranks = torch.zeros_like(self.host_ranks)
        hidden = {write.owner for write in self._writes.values()}
        for owner, piece in self._pieces.items():
            if owner not in hidden:
                offsets[piece.slot, piece.columns] = piece.offsets + self._start(owner)
                ranks[piece.slot, piece.columns] = piece.ranks
        taken = sum(self._extents[owner].size_bytes for owner in self._pieces)
        for name, claim in {
            "an extent has no piece": taken + self.free_bytes == self.capacity_bytes,
            "offsets don't follow the extents": torch.equal(offsets, self.host_offsets),
            "ranks don't follow the pieces": torch.equal(ranks, self.host_ranks),
            "the device's offsets are others": torch.equal(offsets, self.offsets.cpu()),
            "the device's ranks are others": torch.equal(ranks, self.ranks.cpu()),
            "a slot is resident and written": not self._residents.keys() & self._writes.keys(),
        }.items():
            if not claim:
                raise AssertionError(name)

    def _reserve(self, size_bytes: int) -> int:
        """The owner of a new extent; succeeds if and only if that many bytes are free."""
        if size_bytes > self.free_bytes:
            raise DeviceOutOfMemory(
                f"{size_bytes} bytes are needed, {self.free_bytes} of the arena's "
                f"{self.capacity_bytes} are free; reset a slot or raise device_bytes_max"
            )
        owner = next(self._owners)
        if self._extents.place(owner, size_bytes) is None:
            self._make_hole(size_bytes)
            self._extents.place(owner, size_bytes)
        return owner

    def _make_hole(self, size_bytes: int) -> None:
        """Slide extents together; those being copied into only where nothing else helps."""
        moves = self._extents.plan(size_bytes, {write.owner for write in self._writes.values()})
        if moves is None:
            for write in self._writes.values():
                _settle(write.copy)
            moves = self._extents.plan(size_bytes, ())
        for move in moves or ():
            self._slide(move)

    def _slide(self, move: Move) -> None:
        extent = self._extents[move.owner]
        try:
            self._slider.slide(extent.start_bytes, move.start_bytes, extent.size_bytes)
        except SlideLost:
            self._lose(move.owner)
            raise
        self._extents.move(move)
        if not any(write.owner == move.owner for write in self._writes.values()):
            self._publish(move.owner)

    def _lose(self, owner: int) -> None:
        """Empty a slot whose bytes are gone, so that no batch can meet them."""
        slot = self._pieces[owner].slot
        self._drop(owner)
        self._residents.pop(slot, None)
        self._writes.pop(slot, None)

    def _publish(self, owner: int) -> None:
        piece = self._pieces[owner]
        offsets = piece.offsets + self._start(owner)
        self._directory.write(piece.slot, piece.columns, offsets, piece.ranks)

    def _drop(self, owner: int) -> None:
        piece = self._pieces.pop(owner)
        self._directory.clear(piece.slot, piece.columns)
        self._extents.drop(owner)

    def _start(self, owner: int) -> int:
        """Where an owner's extent starts, in elements."""
        return self._extents[owner].start_bytes // self.dtype.itemsize

    def _view(self, owner: int) -> torch.Tensor:
        extent = self._extents[owner]
        return self._bytes[extent.start_bytes : extent.end_bytes]

    def _matrices(
        self, start: int, rank: int, shape: ModuleShape
    ) -> tuple[torch.Tensor, torch.Tensor]:
        a_shape, b_shape = shape.a_shape(rank), shape.b_shape(rank)
        behind_a = start + aligned_elements(math.prod(a_shape), self.dtype)
        a = self.data[start : start + math.prod(a_shape)]
        b = self.data[behind_a : behind_a + math.prod(b_shape)]
        return a.view(a_shape), b.view(b_shape)

    def _write(self, slot: int) -> _Write:
        self._check_slot(slot)
        if slot not in self._writes:
            raise Conflict(f"slot {slot} has no unfinished write; it {self._told(slot)}")
        return self._writes[slot]

    def _told(self, slot: int) -> str:
        if slot in self._writes:
            return f"is being written as generation {self._writes[slot].generation}"
        if slot in self._residents:
            return f"holds generation {self._residents[slot]}"
        return "holds single layers" if self._is_used(slot) else "is empty"

    def _is_used(self, slot: int) -> bool:
        if slot in self._writes or slot in self._residents:
            return True
        return any(piece.slot == slot for piece in self._pieces.values())

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.slots_max:
            raise NotResident(f"slot {slot} was named; this engine has 0 to {self.slots_max - 1}")

    def _check_unwritten(self, slot: int) -> None:
        self._check_slot(slot)
        if slot in self._writes:
            raise Conflict(f"slot {slot} {self._told(slot)}; finish or discard that first")

    def _check_blob(self, blob: Blob) -> None:
        columns = self.offsets.shape[1]
        if blob.data.dtype != self.dtype or len(blob.offsets) != columns:
            raise ValueError(
                f"a blob of {blob.data.dtype} and {len(blob.offsets)} columns; "
                f"this arena has {self.dtype} and {columns}"
            )
        if not blob.size_bytes:
            raise ValueError("an empty blob; an adapter touches at least one module")


def _aligned_bytes(size_bytes: int, device: torch.device) -> torch.Tensor:
    """Uninitialised uint8 memory that starts on a multiple of 128 bytes."""
    try:
        spare = torch.empty(size_bytes + ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise DeviceOutOfMemory(
            f"{device} can't give {size_bytes} bytes ({error}); lower device_bytes_max"
        ) from error
    start = -spare.data_ptr() % ALIGNMENT_BYTES
    return spare[start : start + size_bytes]


def _settle(copy: Copy) -> None:
    """Wait until a copy has ended, whether well or not; its own writer learns how."""
    try:
        copy.wait()
    except Exception:
        return
