"""The adapter of each row of a batch."""

from collections.abc import Sequence
from enum import Enum

import torch
from torch import Tensor

from loradock.engine.errors import NotResident

BASE = 0
"""The adapter id of rows without an adapter."""


class MappingType(Enum):
    """The part of a model that a mapping is for."""

    LANGUAGE = "language"
    TOWER = "tower"
    CONNECTOR = "connector"


LoRAMappingType = MappingType
"""vLLM's name of it."""


class LoRAMapping:
    """The adapter of each row of a batch; 0 is the base model.

    index_mapping: [tokens], an adapter id per token, in the order of the flattened batch.
    prompt_mapping: [rows], an adapter id per sampled row.

    Both are copied, so a caller may refill the buffer that it passed. A mapping that shared the
    buffer would change with it and compare equal to the new mapping, and rows would keep the old
    adapters.
    """

    def __init__(
        self,
        index_mapping: Sequence[int] | Tensor,
        prompt_mapping: Sequence[int] | Tensor,
        is_prefill: bool = False,
        type: MappingType = MappingType.LANGUAGE,  # noqa: A002 - the field's known name
    ) -> None:
        self.index_mapping = _copy_of(index_mapping)
        self.prompt_mapping = _copy_of(prompt_mapping)
        self.is_prefill = is_prefill
        self.type = type

    __hash__ = None  # type: ignore[assignment]

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LoRAMapping):
            return NotImplemented
        return (
            self.is_prefill == other.is_prefill
            and self.type == other.type
            and torch.equal(self.index_mapping, other.index_mapping)
            and torch.equal(self.prompt_mapping, other.prompt_mapping)
        )


def _copy_of(ids: Sequence[int] | Tensor) -> Tensor:
    """Return the ids as an int64 tensor on the host that shares no memory with its source.

    Raises `ValueError` for numbers that are no integers, and for more axes than one.
    """
    found = torch.as_tensor(ids, device="cpu")
    if found.ndim != 1 or (found.is_floating_point() and len(found)):
        raise ValueError(
            f"a mapping is {found.dtype} of shape {[*found.shape]}; one integer per row is needed"
        )
    return found.to(torch.int64, copy=True)


def slots_of(ids: Tensor, slot_of_id: dict[int, int]) -> Tensor:
    """Return the slot of every id; the Python loop runs over distinct ids only."""
    distinct, indices = torch.unique(ids, return_inverse=True)
    adapter_ids = distinct.tolist()
    unknown = [id_ for id_ in adapter_ids if id_ not in slot_of_id]
    if unknown:
        raise NotResident(
            f"the mapping names adapters {unknown}, which are not in a slot; "
            f"slots hold {sorted(slot_of_id.keys() - {BASE})}; activate them first"
        )
    return torch.tensor([slot_of_id[id_] for id_ in adapter_ids], dtype=torch.int64)[indices]
