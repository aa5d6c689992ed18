"""The table that says where in the arena each slot's module-slices lie.

What it is: two small tensors on the device and the same two on the host. What it is not: a keeper
of memory; an entry may point anywhere. One rule: host and device are written together, so whoever
reads either reads the same.
"""

import torch

from engine.layout import ABSENT


class Edition:
    """Which edition of a directory this is: `number` grows whenever an entry is written.

    Whoever remembers what a directory said remembers the number beside it.
    """

    def __init__(self) -> None:
        self.number = 0


class SlotDirectory:
    """Offsets and ranks of every slot, in the columns that each module-slice has.

    `offsets` `[slots, columns]` int64 on `device`, in elements of the arena, -1 for nothing.
    `ranks` `[slots, columns]` int32, 0 for nothing. `host_offsets`, `host_ranks`: the same on the
    host; on a CPU the very same tensors. `edition`: grows with every write.
    """

    def __init__(self, slots: int, slices: int, device: torch.device) -> None:
        self.edition = Edition()
        self.host_offsets = torch.full((slots, slices), ABSENT, dtype=torch.int64)
        self.host_ranks = torch.zeros((slots, slices), dtype=torch.int32)
        self.offsets = self.host_offsets.to(device)
        self.ranks = self.host_ranks.to(device)

    def write(
        self, slot: int, columns: torch.Tensor, offsets: torch.Tensor, ranks: torch.Tensor
    ) -> None:
        """Enter offsets and ranks in these columns of a slot's row."""
        self.host_offsets[slot, columns] = offsets
        self.host_ranks[slot, columns] = ranks
        self._send(slot)

    def clear(self, slot: int, columns: torch.Tensor) -> None:
        """Enter "nothing" in these columns of a slot's row."""
        self.host_offsets[slot, columns] = ABSENT
        self.host_ranks[slot, columns] = 0
        self._send(slot)

    def _send(self, slot: int) -> None:
        """Begin a new edition, and bring the row to the device in the order of the forward passes.

        The host's tables are pageable on purpose: CUDA takes such a row into a buffer of its own
        before the call returns, so the next write can't change a row that is still on its way.
        """
        self.edition.number += 1
        if self.offsets is not self.host_offsets:
            self.offsets[slot].copy_(self.host_offsets[slot], non_blocking=True)
            self.ranks[slot].copy_(self.host_ranks[slot], non_blocking=True)
