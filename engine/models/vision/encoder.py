"""The part of an image-text model that reads images, and the units in which images reach it.

The encoder and the modules between it and the language part are found by the model's own methods. A
unit is an entry of the first axis of the encoder's input, so that each call shows the number of
units.

Three formats of images are supported, distinguished only by their tensors. `pixel_values` is one of

- [patches, values], with a grid for each image (`image_grid_thw`): the patches of all images,
concatenated; a unit is a patch;
- [images, channels, height, width]: a unit is an image; all have the same size;
- [entries, tiles, channels, height, width]: a unit is a tile; tiles of zeros are padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn

from loradock.engine.models.library.names import PreTrainedModel

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
