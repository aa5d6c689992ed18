"""The part of an image-text model that reads images: where it is, and what it is given.

What it is: the encoder and what stands between it and the language part, as the model itself tells
them, and the units in which images reach the encoder. What it is not: a choice of layers
(`engine.preparation`) or a reader of image files. One rule: a unit is an entry of the first axis of
what the encoder is called with, so how many there are is read off from each call.

Three ways in which images are given are known, by their tensors alone: `pixel_values`
- [patches, values] beside a grid for each image (`image_grid_thw`): all images' patches behind one
  another, so a unit is a patch;
- [images, channels, height, width]: a unit is an image; all have the same size;
- [entries, tiles, channels, height, width]: a unit is a tile; tiles of zeros are padding.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Final
from weakref import WeakSet

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

ImageTensors = Mapping[str, Tensor]
"""What a model's forward takes of images, by argument."""

GRID: Final = "image_grid_thw"
"""The argument that has every image's patches in time, height and width."""

PIXELS: Final = "pixel_values"

SIZES: Final = "image_sizes"
"""The argument that has every image's height and width before it was cut or padded."""

_IMAGES_AXES: Final = 4
_TILES_AXES: Final = 5


class ImagePart:
    """A model's encoder of images, and the layers that are neither language nor encoder.

    `encoder`: the tower. `features(**media)`: the model's own way from images to what its language
    part is given.
    """

    def __init__(self, model: PreTrainedModel, encoder: nn.Module) -> None:
        self.encoder: Final = encoder
        self.features: Final[Callable[..., Any]] = model.get_image_features
        # Weakly, because layers that are packed are to be let go with their weights.
        self._tower = WeakSet(encoder.modules())
        ends = (model.get_input_embeddings(), model.get_output_embeddings())
        language = (model.get_decoder(), *(end for end in ends if end is not None))
        self._language = WeakSet(module for part in language for module in part.modules())

    def __contains__(self, layer: nn.Module) -> bool:
        """Whether a layer of the model is none of its language part."""
        return layer not in self._language

    def is_in_tower(self, layer: nn.Module) -> bool:
        """Whether a layer is the encoder's own."""
        return layer in self._tower

    @contextmanager
    def counting(self, tell: Callable[[int], None]) -> Iterator[None]:
        """Call `tell` with the units of every call of the encoder, before it runs."""
        hook = self.count(tell)
        try:
            yield
        finally:
            hook.remove()

    def count(self, tell: Callable[[int], None]) -> Any:
        """As `counting`, until the handle that is returned is removed."""

        def before(_encoder: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any]) -> None:
            tell(_units_given((*arguments, *named.values())))

        return self.encoder.register_forward_pre_hook(before, with_kwargs=True)


def find_image_part(model: PreTrainedModel) -> ImagePart | None:
    """Where a model reads images; None where it takes none."""
    encoder = model.get_encoder(modality="image")
    if encoder is model or not hasattr(model, "get_image_features"):
        return None
    return ImagePart(model, encoder)


def units_of(tensors: ImageTensors) -> Tensor:
    """How many units each image is, [images] int64 on the host, in the order of the tensors.

    Where images lie in entries of tiles, an entry counts as one image: all its tiles are one
    request's. Raises ValueError for tensors of no known way.
    """
    if GRID in tensors:
        return tensors[GRID].cpu().prod(-1)
    pixels = tensors.get(PIXELS)
    axes = None if pixels is None else pixels.dim()
    if pixels is not None and axes == _IMAGES_AXES and SIZES not in tensors:
        return torch.ones(len(pixels), dtype=torch.int64)
    if pixels is not None and axes == _TILES_AXES:
        return (pixels != 0).flatten(2).any(-1).sum(1).cpu()
    told = {name: list(tensor.shape) for name, tensor in tensors.items()}
    raise ValueError(
        f"images given as {told}; known are {PIXELS} of 4 axes, all of one size, {PIXELS} of 5 "
        f"axes, or {GRID}"
    )


def _units_given(arguments: Sequence[Any]) -> int:
    first = next((given for given in arguments if isinstance(given, Tensor)), None)
    return 0 if first is None else len(first)
