"""The LoRA metadata of the part of a model that reads images: the adapter of each image's rows.

A mapping has one entry per unit of the encoder's input (an image, a tile of one, or a patch), while
layers may have another number of rows per unit. The image layer probe has verified at start that
the wrapped layers keep to that. Entries stand for units only in a forward whose encoder received
that number of units; any other number of rows than its own is an error.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from loradock.engine.kernels.operands import Groups, LoRASlices, RowOrder
from loradock.engine.models.vision.encoder import ImagePart, ImageTensors, units_of
from loradock.engine.models.vision.image_inputs import ImageInputs
from loradock.engine.punica.mapping import LoRAMapping, MappingType
from loradock.engine.punica.wrapper import PunicaWrapper

IMAGE_PARTS: Final = (MappingType.TOWER, MappingType.CONNECTOR)
"""The parts of a model that read images."""


class ImagePunicaWrapper(PunicaWrapper):
    """The LoRA metadata of a tower or of a connector.

    `units`: the number that the encoder received in the current forward, assigned by a hook on the
    encoder. A layer may have one row per entry of `index_mapping` or of `prompt_mapping`. If
    `index_mapping` has one entry per unit, it may also have k rows per unit, or one row per k units
    of one adapter. Order is kept.
    """

    units: int = 0
    _max_loras: int = 0
    _is_base: bool = True
    _latest: Groups | None = None

    def groups_of(
        self,
        shape: int | Sequence[int],
        slices: LoRASlices | None = None,  # noqa: ARG002 - the base class's
        row_order: RowOrder | None = None,  # noqa: ARG002 - the base class's
    ) -> Groups | None:
        """Return the groups of a layer's input by its leading shape; None without an adapter.

        The device tables are rewritten for each number of rows, so only the latest groups are
        valid. Raises `ValueError` if the mapping is another batch's.
        """
        if self._is_base:
            return None
        rows = shape if isinstance(shape, int) else math.prod(shape)
        if self._latest is None or self._latest.tokens != rows:
            nothing = torch.empty(0, dtype=torch.int64)
            slots = self._slots_of_rows(rows)
            self._latest = self.grouper.group(slots, nothing, self._max_loras).tokens
            # On a device the tables of the groups before were overwritten.
            self.batch = object()
        return self._latest if self._latest.spans else None

    def _group(self, token_slots: Tensor, prompt_slots: Tensor, max_loras: int) -> None:
        """Defer grouping to the first layer, whose input shows the number of rows."""
        self._latest, self._max_loras = None, max_loras
        self._is_base = not bool((torch.cat([token_slots, prompt_slots]) >= 0).any())

    def _slots_of_rows(self, rows: int) -> Tensor:
        """Return the slot of each of a layer's rows, [rows]."""
        for slots in (self.token_slots, self.prompt_slots):
            if slots is not None and len(slots) == rows:
                return slots
        slots = self.token_slots
        if slots is not None and rows and len(slots) == self.units:
            if rows % self.units == 0:
                return slots.repeat_interleave(rows // self.units)
            if self.units % rows == 0:
                together = slots.view(rows, -1)
                if torch.equal(together, together[:, :1].expand_as(together)):
                    return together[:, 0]
        entries = 0 if slots is None else len(slots)
        raise ValueError(
            f"{rows} rows of {self.units} units of images, and a mapping of {entries} entries; "
            "update the mapping of tower and connector before every forward with images"
        )


ImagePunicas = Mapping[MappingType, ImagePunicaWrapper]
"""The wrapper of each part that reads images; empty if these layers are not wrapped."""

NO_PUNICAS: Final[ImagePunicas] = MappingProxyType({})


class ImageMapper:
    """Sets the mappings of tower and connector, so that images use their adapters.

    `punicas`: each part's wrapper; empty if there is nothing to map.
    """

    def __init__(self, part: ImagePart | None, punicas: ImagePunicas = NO_PUNICAS) -> None:
        """Observe the encoder's units from now on."""
        self.punicas = punicas
        if part is not None and punicas:
            part.count_units(self._set_units)

    def mappings(self, adapter_ids: Sequence[int], tensors: ImageTensors) -> list[LoRAMapping]:
        """Return the mapping of each part for a forward with these images.

        `adapter_ids`: one per image (as counted by `units_of`), in the order of `tensors`, which
        are arguments of the model's forward. Raises `ValueError` if the numbers differ.
        """
        units = units_of(tensors)
        if len(units) != len(adapter_ids):
            raise ValueError(
                f"{len(adapter_ids)} adapter ids for {len(units)} images; pass one per image"
            )
        return self._mappings(adapter_ids, units)

    @contextmanager
    def mapped(
        self,
        adapter_ids: Sequence[int],
        images: Sequence[ImageInputs | None],
        lora_index_to_id: Sequence[int | None],
    ) -> Iterator[None]:
        """Map each row's images to its adapter within the context, and to the base model after it.

        `adapter_ids`: one per row. `images`: one entry per row, as in `CausalModel.forward`.
        `lora_index_to_id`: as in `update_metadata`. Raises `NotResident`.
        """
        with_images = [(row, one) for row, one in enumerate(images) if one is not None]
        if not with_images or not self.punicas:
            yield
            return
        ids = [adapter_ids[row] for row, _ in with_images]
        units = torch.stack([units_of(one.tensors).sum() for _, one in with_images])
        try:
            for mapping in self._mappings(ids, units):
                self.punicas[mapping.type].update_metadata(mapping, lora_index_to_id)
            yield
        finally:
            for part, punica in self.punicas.items():
                punica.update_metadata(LoRAMapping([], [], type=part), lora_index_to_id)

    def _mappings(self, adapter_ids: Sequence[int], units: Tensor) -> list[LoRAMapping]:
        """Return mappings with an entry for each of `units[i]` units of `adapter_ids[i]`."""
        ids = torch.tensor(adapter_ids, dtype=torch.int64).repeat_interleave(units)
        return [LoRAMapping(ids, [], is_prefill=True, type=part) for part in self.punicas]

    def _set_units(self, units: int) -> None:
        for punica in self.punicas.values():
            punica.units = units
