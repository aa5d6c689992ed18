"""The slot directory: the place of each slot's module-slices in the arena.

The host's and the device's tables are written together, so both always have the same entries.
"""

import torch

from loradock.engine.layout import ABSENT


class SlotDirectory:
    """Offsets and ranks of every slot, one column per module-slice.

    `data`: [elements], the arena. `offsets`: [slots, columns] int64 on its device, in elements, -1
    for an absent slice. `ranks`: [slots, columns] int32 on its device, 0 for an absent slice.
    `host_offsets`, `host_ranks`: the same on the host; on a CPU the same tensors.
    `version`: incremented by every write. Store it with anything that is derived from the
    directory, and drop both when it changes.
    """

    def __init__(self, data: torch.Tensor, slots: int, columns: int) -> None:
        self.data = data
        self.version = 0
        self.host_offsets = torch.full((slots, columns), ABSENT, dtype=torch.int64)
        self.host_ranks = torch.zeros((slots, columns), dtype=torch.int32)
        self.offsets = self.host_offsets.to(data.device)
        self.ranks = self.host_ranks.to(data.device)

    def write(
        self, slot: int, columns: torch.Tensor, offsets: torch.Tensor, ranks: torch.Tensor
    ) -> None:
        """Set the offsets and ranks of these columns of a slot's row."""
        self.host_offsets[slot, columns] = offsets
        self.host_ranks[slot, columns] = ranks
        self._send(slot)

    def clear(self, slot: int, columns: torch.Tensor) -> None:
        """Mark these columns of a slot's row as absent."""
        self.host_offsets[slot, columns] = ABSENT
        self.host_ranks[slot, columns] = 0
        self._send(slot)

    def _send(self, slot: int) -> None:
        """Increment the version and copy the row to the device, in stream order.

        The host's tables are deliberately pageable: CUDA stages such a row in its own buffer before
        the call returns, so a later write can't change a row whose copy is still in flight.
        """
        self.version += 1
        if self.offsets is not self.host_offsets:
            self.offsets[slot].copy_(self.host_offsets[slot], non_blocking=True)
            self.ranks[slot].copy_(self.host_ranks[slot], non_blocking=True)
