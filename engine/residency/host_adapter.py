"""The engine's record of one adapter."""

from dataclasses import dataclass

from loradock.engine.adapters.lora_model import LoadedAdapter, LoRAModel
from loradock.engine.residency.staging import Blob
from loradock.messages.commands import LoadWeights
from loradock.messages.ids import CPU_CACHED, GPU_SLOT, NO_SLOT, PINNED, AdapterState
from loradock.messages.reports import InventoryAdapter


@dataclass
class HostAdapter:
    """One adapter on the host, and its slot, if any.

    `weights`: the model that was read; a blob once it was staged, also after it was unstaged.
    Nothing else may reference them, so that dropping or replacing them frees their memory.
    `warnings`: those of its check.
    """

    source: LoadWeights
    rank: int
    host_bytes: int
    blob_bytes: int
    weights: LoRAModel | Blob
    is_staged: bool = False
    slot: int = NO_SLOT
    generation: int = 0
    warnings: tuple[str, ...] = ()

    @classmethod
    def of(cls, source: LoadWeights, loaded: LoadedAdapter) -> "HostAdapter":
        """Return the record of an adapter that was just read."""
        return cls(
            source,
            loaded.rank,
            loaded.host_bytes,
            loaded.blob_bytes,
            loaded.model,
            warnings=loaded.warnings,
        )

    @property
    def state(self) -> AdapterState:
        """The life-cycle state, derived from the other fields and never stored."""
        if self.slot != NO_SLOT:
            return GPU_SLOT
        return PINNED if self.is_staged else CPU_CACHED

    def inventory(self) -> InventoryAdapter:
        """Return the record as it is reported to the controller."""
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
            warnings=self.warnings,
        )
