"""What the engine remembers of adapters and of operations.

What it is: one record an adapter, and the set of operations seen. What it is not: a state machine;
the controller has that, and this only says what is there. One rule: `state` is read off from what
the record holds, never stored beside it.
"""

from dataclasses import dataclass

from engine.adapters.lora_model import LoRAModel
from engine.adapters.reader import LoadedAdapter
from engine.residency.staging import Blob
from messages.commands import LoadWeights
from messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, AdapterState
from messages.reports import InventoryAdapter


@dataclass
class HeldAdapter:
    """One adapter on the host, and its slot, if any.

    `weights`: as they were read; a blob once they were staged, also after they were unstaged. They
    are held nowhere else, so that what was packed is given back.
    """

    source: LoadWeights
    rank: int
    host_bytes: int
    blob_bytes: int
    weights: LoRAModel | Blob
    is_staged: bool = False
    slot: int = NO_SLOT
    generation: int = 0

    @classmethod
    def of(cls, source: LoadWeights, loaded: LoadedAdapter) -> "HeldAdapter":
        """The record of an adapter that was just read."""
        return cls(source, loaded.rank, loaded.host_bytes, loaded.blob_bytes, loaded.model)

    @property
    def state(self) -> AdapterState:
        """The life-cycle state that this record is the fact of."""
        if self.slot != NO_SLOT:
            return GPU_SLOT
        return PINNED if self.is_staged else CPU_CACHED

    def inventory(self) -> InventoryAdapter:
        """The record as a report tells it."""
        return InventoryAdapter(
            adapter_id=self.source.adapter_id,
            adapter=self.source.adapter,
            path=self.source.path,
            fingerprint=self.source.fingerprint,
            rank=self.rank,
            state=self.state,
            slot=self.slot,
            generation=self.generation,
            host_bytes=self.host_bytes,
            blob_bytes=self.blob_bytes,
        )
