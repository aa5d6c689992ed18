"""The part of an image-text model that reads images: how images reach it, and their adapters.

The encoder and the modules between it and the language part are found by the model's own methods. A
unit is an entry of the first axis of the encoder's input, so that each call shows the number of
units.

Three formats of images are supported, distinguished only by their tensors. `pixel_values` is

- [patches, values], with a grid for each image (`image_grid_thw`): the patches of all images,
concatenated; a unit is a patch;
- [images, channels, height, width]: a unit is an image; all have the same size; or
- [entries, tiles, channels, height, width]: a unit is a tile; tiles of zeros are padding.

A mapping has one entry per unit, while layers can have another number of rows per unit. The probe
of image layers has verified at start that the wrapped layers keep to that. Entries stand for units
only in a forward whose encoder received that number of units; any other number of rows is an error.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from loradock.engine.kernels.operands import Groups, LoRASlices, RowOrder
from loradock.engine.models.image_inputs import ImageInputs
from loradock.engine.models.library.names import PreTrainedModel
from loradock.engine.punica.mapping import LoRAMapping, MappingType
from loradock.engine.punica.wrapper import PunicaWrapper

ImageTensors = Mapping[str, Tensor]
"""Image arguments of a model's forward, by name."""

GRID: Final = "image_grid_thw"
"""The argument with every image's patches in time, height and width."""

PIXELS: Final = "pixel_values"

SIZES: Final = "image_sizes"
"""The argument with every image's height and width before it was cut or padded."""

_IMAGES_AXES: Final = 4
_TILES_AXES: Final = 5


class ImagePart:
    """A model's encoder of images, and the modules between it and the language part.

    `encoder`: the tower. `features(**images)`: the model's own method from images to the states
    that its language part receives.
    """

    def __init__(self, model: PreTrainedModel, encoder: nn.Module) -> None:
        self.encoder: Final = encoder
        self.features: Final[Callable[..., Any]] = model.get_image_features
        # Weak references, because packed layers must be freed with their weights.
        self._tower = WeakSet(encoder.modules())
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        language = (model.get_decoder(), *(end for end in ends if end is not None))
        self._language = WeakSet(module for part in language for module in part.modules())

    def __contains__(self, layer: nn.Module) -> bool:
        """Return whether a layer is outside the language part."""
        return layer not in self._language

    def is_in_tower(self, layer: nn.Module) -> bool:
        """Return whether a layer belongs to the encoder."""
        return layer in self._tower

    @contextmanager
    def counting_units(self, on_units: Callable[[int], None]) -> Iterator[None]:
        """Call `on_units` with the units of every call of the encoder, before it runs."""
        hook = self.count_units(on_units)
        try:
            yield
        finally:
            hook.remove()

    def count_units(self, on_units: Callable[[int], None]) -> Any:
        """As `counting_units`, until the returned handle is removed."""

        def before(_encoder: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            on_units(_units_in((*arguments, *named.values())))

        return self.encoder.register_forward_pre_hook(before, with_kwargs=True)


def find_image_part(model: PreTrainedModel) -> ImagePart | None:
    """Return the part of a model that reads images; None if it reads none."""
    encoder = model.get_encoder(modality="image")
    if encoder is model or not hasattr(model, "get_image_features"):
        return None
    return ImagePart(model, encoder)


def units_of(tensors: ImageTensors) -> Tensor:
    """Return the units of each image, [images] int64 on the host, in the order of the tensors.

    If images are stored as entries of tiles, an entry counts as one image: all its tiles belong
    to one request. Raises `ValueError` for tensors of no supported format.
    """
    if GRID in tensors:
        return tensors[GRID].cpu().prod(-1)
    pixels = tensors.get(PIXELS)
    axes = None if pixels is None else pixels.dim()
    if pixels is not None and axes == _IMAGES_AXES and SIZES not in tensors:
        return torch.ones(len(pixels), dtype=torch.int64)
    if pixels is not None and axes == _TILES_AXES:
        return (pixels != 0).flatten(2).any(-1).sum(1).cpu()
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    raise ValueError(
        f"images of the shapes {shapes}; supported are {PIXELS} of 4 axes, all of one size, "
        f"{PIXELS} of 5 axes, or {GRID}"
    )


def _units_in(arguments: Sequence[Any]) -> int:
    first = next((value for value in arguments if isinstance(value, Tensor)), None)
    return 0 if first is None else len(first)


IMAGE_PARTS: Final = (MappingType.TOWER, MappingType.CONNECTOR)
"""The parts of a model that read images."""


class ImagePunicaWrapper(PunicaWrapper):
    """The LoRA metadata of a tower or of a connector.

    `units`: the number that the encoder received in the current forward, assigned by a hook on the
    encoder. A layer can have one row per entry of `index_mapping` or of `prompt_mapping`. If
    `index_mapping` has one entry per unit, it can also have k rows per unit, or one row per k units
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
