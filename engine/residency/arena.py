"""The arena: device memory of all adapters, with slots, generations and the directory's rows.

Every forward pass sees each row of the directory point at complete weights or at nothing. A slot
is never emptied to make space for another.

All methods are called by the thread that launches the forward passes, between two of them. The
tensors are allocated once and only their contents change, so captured graphs stay valid. If the
free bytes are enough but no hole is, a write compacts the arena and rewrites the rows that moved.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import torch

from loradock.engine.errors import Conflict, DeviceOutOfMemory, NotResident, is_out_of_memory
from loradock.engine.kernels.directory import SlotDirectory
from loradock.engine.layout import (
    ABSENT,
    ALIGNMENT_BYTES,
    ModuleKind,
    ModuleShape,
    directory_columns,
    directory_entries,
    matrices_of,
    slice_elements,
    sorted_by_column,
)
from loradock.engine.memory import allocate_device
from loradock.engine.parallel import RankLost
from loradock.engine.residency.copier import Copier, Copy, copier_for
from loradock.engine.residency.extents import Compactor, Extents
from loradock.engine.residency.staging import Blob


@dataclass
class _SlotExtent:
    """The contents of one extent: columns of one slot's row, with offsets from its start."""

    slot: int
    columns: torch.Tensor
    offsets: torch.Tensor
    ranks: torch.Tensor


@dataclass(frozen=True)
class _Write:
    """A slot's copy that is not published yet."""

    owner: int
    generation: int
    copy: Copy
    # The generation that is in the slot until this write is finished; 0 if none is.
    replaces: int


class Arena:
    """Slots of adapters in one device tensor.

    `data`: 1-D, of `dtype`, on `device`, `device_bytes_max` rounded down to 128 bytes, not
    initialised. `directory`: the offset and rank of each module-slice in each slot; an offset is
    the start of its A in elements of `data`, a multiple of 128 bytes, and its B starts after A's
    padding (`loradock.engine.layout`).
    `generations[slot]`: the highest that was ever published there. `copier`: None for the default
    of the device. Compaction allocates another 16 MiB at most. Raises `DeviceOutOfMemory`.
    """

    def __init__(
        self,
        max_loras: int,
        modules: Sequence[ModuleShape],
        device_bytes_max: int,
        dtype: torch.dtype,
        device: torch.device | str,
        copier: Copier | None = None,
    ) -> None:
        self.max_loras = max_loras
        self.modules = sorted_by_column(modules)
        self._optional_columns = [one.index for one in self.modules if one.is_optional]
        replacing = (ModuleKind.HEAD, ModuleKind.TOKENS)
        self._head_columns = [one.index for one in self.modules if one.kind in replacing]
        self._shape_at = {shape.index: shape for shape in self.modules}
        self.dtype = dtype
        self.device = torch.device(device)
        self.generations = [0] * max_loras
        self._extents = Extents(device_bytes_max // ALIGNMENT_BYTES * ALIGNMENT_BYTES)
        self._bytes = allocate_device(self.capacity_bytes, self.device)
        self.data = self._bytes.view(dtype)
        self.directory = SlotDirectory(self.data, max_loras, directory_columns(self.modules))
        self._copier = copier or copier_for(self.device)
        self._compactor = Compactor(self._bytes, self._extents, self._copier)
        self._has_heads, self._heads_version = False, -1
        self._owners = count()
        self._slot_extents: dict[int, _SlotExtent] = {}
        self._writes: dict[int, _Write] = {}
        self._residents: dict[int, int] = {}
        # Complete writes and resets since the start.
        self.writes = self.resets = 0

    @property
    def capacity_bytes(self) -> int:
        """The bytes that all extents together may have."""
        return self._extents.capacity_bytes

    @property
    def free_bytes(self) -> int:
        """The bytes that no extent has; a blob of at most this size can be written."""
        return self._extents.free_bytes

    def has_hole(self, size_bytes: int) -> bool:
        """Return whether a blob of this size can be written without moving others."""
        return self._extents.has_hole(size_bytes)

    def close(self) -> None:
        """Wait for running copies; the arena is not written after that."""
        self._copier.close()

    def begin_write(self, slot: int, generation: int, blob: Blob, replaces: int = 0) -> None:
        """Allocate an extent for `slot` and begin to copy `blob` into it; publishes nothing.

        replaces: the generation in the slot that will be reset before `finish_write`.

        Raises `DeviceOutOfMemory`, `Conflict` if the slot is in use or `generation` is not above
        the slot's last, and `ValueError` for a blob that was staged for another arena.
        """
        self._check_slot(slot)
        self._check_blob(blob)
        is_replaced = slot not in self._writes and self._residents.get(slot) == replaces
        if self._is_used(slot) and not is_replaced:
            raise Conflict(f"slot {slot} {self._describe(slot)}; reset it before writing it")
        if generation <= self.generations[slot]:
            raise Conflict(
                f"slot {slot} had generation {self.generations[slot]} already; "
                f"a write needs a later one, not {generation}"
            )
        columns = (blob.offsets != ABSENT).nonzero().flatten()
        published = _SlotExtent(slot, columns, blob.offsets[columns], blob.ranks[columns])
        owner = self._reserve(blob.size_bytes)
        try:
            copy = self._copier.start(self._view(owner), blob.data.view(torch.uint8))
        except BaseException:
            self._extents.free(owner)
            raise
        self._slot_extents[owner] = published
        self._writes[slot] = _Write(owner, generation, copy, replaces)

    def is_copied(self, slot: int) -> bool:
        """Return whether the slot's unfinished write was copied, or failed; never blocks."""
        return self._write(slot).copy.is_done()

    def is_copied_well(self, slot: int) -> bool:
        """Return whether the slot's unfinished write was copied, and did not fail; never blocks."""
        copy = self._write(slot).copy
        if not copy.is_done():
            return False
        try:
            copy.wait()
        except Exception:
            # `finish_write` raises it again.
            return False
        return True

    def finish_write(self, slot: int) -> None:
        """Wait for the copy of the slot's unfinished write, and publish the slot's row.

        Raises what the copy raised; then the write is discarded.
        """
        write = self._write(slot)
        try:
            write.copy.wait()
            self._publish(write.owner)
        except RankLost:
            # The engine ends, and to discard would be to wait for the lost rank again.
            raise
        except BaseException:
            self.discard_write(slot)
            raise
        del self._writes[slot]
        self.generations[slot] = self._residents[slot] = write.generation
        self.writes += 1

    def discard_write(self, slot: int) -> None:
        """Wait for the copy of the slot's unfinished write, and free its extent."""
        write = self._write(slot)
        _wait_until_ended(write.copy)
        del self._writes[slot]
        self._free(write.owner)

    def reset(self, slot: int, generation: int) -> None:
        """Clear the slot's row and free its extent; nothing is zero-filled.

        Raises `NotResident` unless exactly this generation is published there.
        """
        self.check_generation(slot, generation)
        being_written = self._owners_being_written()
        for owner, slot_extent in list(self._slot_extents.items()):
            if slot_extent.slot == slot and owner not in being_written:
                self._free(owner)
        del self._residents[slot]
        self.resets += 1

    def check_generation(self, slot: int, generation: int) -> None:
        """Raise `NotResident` unless exactly this generation is published in the slot."""
        self._check_slot(slot)
        if self._residents.get(slot) != generation:
            raise NotResident(
                f"generation {generation} of slot {slot} was named, but it {self._describe(slot)}; "
                "activate the adapter again"
            )

    def shape_at(self, index: int) -> ModuleShape:
        """Return the module-slice whose first column of the directory is `index`."""
        return self._shape_at[index]

    def weights(self, slot: int, index: int) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return A and B of the module-slice at column `index`, as views of `data`.

        In the shapes of its kind, with the scaling folded into B. None if the slot has nothing
        there.
        """
        self._check_slot(slot)
        start = int(self.directory.host_offsets[slot, index])
        if start == ABSENT:
            return None
        shape = self.shape_at(index)
        # The last column has B's rank, which is the adapter's own.
        rank = int(self.directory.host_ranks[slot, index + shape.columns - 1])
        return matrices_of(self.data, start, rank, shape)

    def has_saved_layers(self, slot: int) -> bool:
        """Return whether the slot has whole layers, scales and shifts, or token rows."""
        return bool((self.directory.host_offsets[slot, self._optional_columns] != ABSENT).any())

    @property
    def has_heads(self) -> bool:
        """True if any slot has a slice of kind HEAD or TOKENS; computed once per version."""
        if self._heads_version != self.directory.version:
            found = self.directory.host_offsets[:, self._head_columns] != ABSENT
            self._has_heads = bool(found.any())
            self._heads_version = self.directory.version
        return self._has_heads

    def write_slice(self, slot: int, index: int, a: torch.Tensor, b: torch.Tensor) -> None:
        """Copy A and B of the module-slice at column `index` into a separate extent.

        This is `set_lora` of a single layer: it returns after the copy, and replaces what the slot
        had there. `a` and `b` have the shapes of the module-slice's kind, with the scaling folded
        into `b`. Raises `DeviceOutOfMemory`, `Conflict` while the slot is being written, and
        `ValueError` for other shapes.
        """
        self._check_unwritten(slot)
        shape, rank = self.shape_at(index), int(b.shape[-1])
        shape.check_fit(a, b)
        owner = self._reserve(slice_elements(rank, shape, self.dtype) * self.dtype.itemsize)
        try:
            matrices = matrices_of(self.data, self._start(owner), rank, shape)
            for matrix, tensor in zip(matrices, (a, b), strict=True):
                matrix.copy_(tensor)
        except BaseException:
            self._extents.free(owner)
            raise
        self.reset_slice(slot, index)
        columns, offsets, ranks = torch.tensor(directory_entries(shape, 0, rank, self.dtype)).T
        self._slot_extents[owner] = _SlotExtent(slot, columns, offsets, ranks.int())
        self._publish(owner)

    def reset_slice(self, slot: int, index: int) -> None:
        """Clear the module-slice at column `index`; an extent without columns left is freed.

        Raises `Conflict` while the slot is being written.
        """
        self._check_unwritten(slot)
        end = index + self.shape_at(index).columns
        for owner, found in list(self._slot_extents.items()):
            if found.slot == slot and index in found.columns:
                kept = (found.columns < index) | (found.columns >= end)
                self.directory.clear(slot, found.columns[~kept])
                found.columns, found.offsets = found.columns[kept], found.offsets[kept]
                found.ranks = found.ranks[kept]
                if not len(found.columns):
                    self._free(owner)

    def check(self) -> None:
        """Raise `AssertionError` unless extents and rows agree; for tests and debugging."""
        self._extents.check()
        offsets = torch.full_like(self.directory.host_offsets, ABSENT)
        ranks = torch.zeros_like(self.directory.host_ranks)
        for owner in self._slot_extents.keys() - self._owners_being_written():
            published = self._slot_extents[owner]
            row, columns = published.slot, published.columns
            offsets[row, columns] = published.offsets + self._start(owner)
            ranks[row, columns] = published.ranks
        taken = sum(self._extents[owner].size_bytes for owner in self._slot_extents)
        for name, claim in {
            "an extent has no slot": taken + self.free_bytes == self.capacity_bytes,
            "offsets don't follow the extents": torch.equal(offsets, self.directory.host_offsets),
            "ranks don't follow the extents": torch.equal(ranks, self.directory.host_ranks),
            "the device's offsets differ from the host's": torch.equal(
                offsets, self.directory.offsets.cpu()
            ),
            "the device's ranks differ from the host's": torch.equal(
                ranks, self.directory.ranks.cpu()
            ),
            "a slot is resident and written": all(
                self._residents[slot] == self._writes[slot].replaces
                for slot in self._residents.keys() & self._writes.keys()
            ),
        }.items():
            if not claim:
                raise AssertionError(name)

    def _reserve(self, size_bytes: int) -> int:
        """Return the owner of a new extent; succeeds if and only if `size_bytes` are free."""
        if size_bytes > self.free_bytes:
            raise DeviceOutOfMemory(
                f"{size_bytes} bytes are needed, {self.free_bytes} of the arena's "
                f"{self.capacity_bytes} are free; reset a slot or raise device_bytes_max"
            )
        owner = next(self._owners)
        if self._extents.allocate(owner, size_bytes) is None:
            try:
                self._compact(size_bytes)
            except (MemoryError, RuntimeError) as error:
                if not is_out_of_memory(error):
                    raise
                # No lack of memory for this write alone: other adapters may be half moved.
                raise RuntimeError(f"compacting the arena failed: {error!r}") from error
            self._extents.allocate(owner, size_bytes)
        return owner

    def _compact(self, size_bytes: int) -> None:
        """Make a hole of `size_bytes`; extents that are being written move only if they must."""
        being_written = self._owners_being_written()
        moved = self._compactor.make_hole(size_bytes, being_written)
        if moved is None:
            for write in self._writes.values():
                _wait_until_ended(write.copy)
            moved = self._compactor.make_hole(size_bytes, ())
        for owner in moved or ():
            if owner not in being_written:
                self._publish(owner)

    def _owners_being_written(self) -> set[int]:
        return {write.owner for write in self._writes.values()}

    def _publish(self, owner: int) -> None:
        """Write an extent's offsets and ranks into its slot's row of the directory."""
        published = self._slot_extents[owner]
        offsets = published.offsets + self._start(owner)
        self.directory.write(published.slot, published.columns, offsets, published.ranks)

    def _free(self, owner: int) -> None:
        """Clear an extent's columns of the directory, and free it."""
        freed = self._slot_extents.pop(owner)
        self.directory.clear(freed.slot, freed.columns)
        self._extents.free(owner)

    def _start(self, owner: int) -> int:
        """Return the start of an owner's extent, in elements of `data`."""
        return self._extents[owner].start_bytes // self.dtype.itemsize

    def _view(self, owner: int) -> torch.Tensor:
        extent = self._extents[owner]
        return self._bytes[extent.start_bytes : extent.end_bytes]

    def _write(self, slot: int) -> _Write:
        self._check_slot(slot)
        if slot not in self._writes:
            raise Conflict(f"slot {slot} has no unfinished write; it {self._describe(slot)}")
        return self._writes[slot]

    def _describe(self, slot: int) -> str:
        """Return what a slot holds, for error texts, as what follows "slot 3"."""
        if slot in self._writes:
            return f"is being written as generation {self._writes[slot].generation}"
        if slot in self._residents:
            return f"holds generation {self._residents[slot]}"
        return "holds single layers" if self._is_used(slot) else "is empty"

    def _is_used(self, slot: int) -> bool:
        if slot in self._writes or slot in self._residents:
            return True
        return any(used.slot == slot for used in self._slot_extents.values())

    def _check_slot(self, slot: int) -> None:
        if not 0 <= slot < self.max_loras:
            raise NotResident(f"slot {slot} was named; this engine has 0 to {self.max_loras - 1}")

    def _check_unwritten(self, slot: int) -> None:
        self._check_slot(slot)
        if slot in self._writes:
            raise Conflict(f"slot {slot} {self._describe(slot)}; finish or discard that first")

    def _check_blob(self, blob: Blob) -> None:
        columns = self.directory.offsets.shape[1]
        if blob.data.dtype != self.dtype or len(blob.offsets) != columns:
            raise ValueError(
                f"the blob has {blob.data.dtype} and {len(blob.offsets)} columns, this arena has "
                f"{self.dtype} and {columns}; stage the adapter for this arena"
            )
        if not blob.size_bytes:
            raise ValueError("the blob is empty; an adapter touches at least one module")


def _wait_until_ended(copy: Copy) -> None:
    """Wait until a copy has ended, with or without an error; `finish_write` raises the error."""
    try:
        copy.wait()
    except Exception:
        return
