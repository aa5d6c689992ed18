"""The LoRA arithmetic of a part that reads images: which adapter each image's rows use.

What it is: a Punica wrapper whose mapping has one entry a unit of what the encoder is given (an
image, a tile of one, or a patch), whatever number of rows each layer makes of a unit; and who sets
such mappings for a forward. What it is not: a judge of which layers keep to that; they were tried
when the engine started (`engine.image_probe`). One rule: entries stand for units only in a forward
whose encoder was given that many; to any other number of rows than its own such a mapping is an
error.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from engine.kernels.operands import Groups
from engine.models.vision.encoder import ImagePart, ImageTensors, units_of
from engine.models.vision.media import Media
from engine.punica.mapping import LoRAMapping, MappingType
from engine.punica.wrapper import PunicaWrapper

IMAGE_PARTS: Final = (MappingType.TOWER, MappingType.CONNECTOR)
"""The parts of a model that read images."""


class ImagePunicaWrapper(PunicaWrapper):
    """The metadata of a tower or of a connector.

    `units`: how many the encoder was given in the forward that runs; whoever sees the encoder
    called sets it. A layer's rows may be those of `index_mapping` or of `prompt_mapping`, one by
    one, or, where `index_mapping` has an entry a unit, as many for each unit, or one for as many
    units, in their order.
    """

    units: int = 0
    _slots_max: int = 0
    _is_base: bool = True
    _latest: Groups | None = None

    def groups_of(self, rows: int) -> Groups | None:
        """The groups of a layer's input; None where no row has an adapter.

        The tables on the device are written again for each number of rows, so only the last one's
        groups hold. Raises ValueError where the mapping is another batch's.
        """
        if self._is_base:
            return None
        if self._latest is None or self._latest.tokens != rows:
            nothing = torch.empty(0, dtype=torch.int64)
            slots = self._slots_of_rows(rows)
            self._latest = self.grouper.group(slots, nothing, self._slots_max).tokens
        return self._latest if self._latest.spans else None

    def _group(self, token_slots: Tensor, prompt_slots: Tensor, slots_max: int) -> None:
        """Grouping waits for the first layer, which tells how many rows there are."""
        self._latest, self._slots_max = None, slots_max
        self._is_base = not bool((torch.cat([token_slots, prompt_slots]) >= 0).any())

    def _slots_of_rows(self, rows: int) -> Tensor:
        """The slot of each of a layer's rows, [rows]."""
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
            f"{rows} rows of {self.units} units of images meet a mapping of {entries}; update the "
            "mapping of tower and connector before every forward with images"
        )


ImagePunicas = Mapping[MappingType, ImagePunicaWrapper]
"""The wrapper of each part that reads images; empty where their layers are not wrapped."""

NO_PUNICAS: Final[ImagePunicas] = MappingProxyType({})


class ImageMapper:
    """Has images run under their adapters, in the tower and in the connector.

    `punicas`: each part's wrapper; without any there is nothing to map.
    """

    def __init__(self, part: ImagePart | None, punicas: ImagePunicas = NO_PUNICAS) -> None:
        """Count units from now on."""
        self.punicas = punicas
        if part is not None and punicas:
            part.count(self._tell_units)

    def mappings(self, adapter_ids: Sequence[int], tensors: ImageTensors) -> list[LoRAMapping]:
        """The mapping of each part for a forward with these images.

        `adapter_ids`: one an image, in the order of `tensors`, which are what the model's forward
        takes (`image_part.units_of` says what an image is there). Raises ValueError where the two
        don't agree.
        """
        units = units_of(tensors)
        if len(units) != len(adapter_ids):
            raise ValueError(
                f"{len(adapter_ids)} adapter ids for {len(units)} images; give each one"
            )
        return self._mappings(adapter_ids, units)

    @contextmanager
    def mapped(
        self,
        adapter_ids: Sequence[int],
        media: Sequence[Media | None],
        lora_index_to_id: Sequence[int | None],
    ) -> Iterator[None]:
        """Have each row's images use its adapter in the forward within, and the base behind it.

        `adapter_ids`: one a row. `media`: what each row has, as `PreparedModel.forward` takes it.
        `lora_index_to_id`: as in `update_metadata`. Raises `NotResident`.
        """
        illustrated = [(row, one) for row, one in enumerate(media) if one is not None]
        if not illustrated or not self.punicas:
            yield
            return
        ids = [adapter_ids[row] for row, _ in illustrated]
        units = torch.stack([units_of(one.tensors).sum() for _, one in illustrated])
        try:
            for mapping in self._mappings(ids, units):
                self.punicas[mapping.type].update_metadata(mapping, lora_index_to_id)
            yield
        finally:
            for part, punica in self.punicas.items():
                punica.update_metadata(LoRAMapping([], [], type=part), lora_index_to_id)

    def _mappings(self, adapter_ids: Sequence[int], units: Tensor) -> list[LoRAMapping]:
        """An entry for each of so many units of each id."""
        ids = torch.tensor(adapter_ids, dtype=torch.int64).repeat_interleave(units)
        return [LoRAMapping(ids, [], is_prefill=True, type=part) for part in self.punicas]

    def _tell_units(self, units: int) -> None:
        for punica in self.punicas.values():
            punica.units = units
