"""Which layers can tell images apart: asked of the model itself, by showing it two.

What it is: three runs of a model's image part when the engine starts, of two unlike images together
and of each alone. What it is not: a list of model names, or a choice of wrappers. One rule: a layer
is mapped only if of two images it sees what it sees of each alone, one behind the other, and as
many rows for each unit of both. The order of rows within an image does not matter.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from engine.errors import FOREIGN_FAILURES, ModelRefused
from engine.models.probe import ERROR_MAX_HALF, ERRORS_MAX, Call, share_inputs, telling_inputs
from engine.models.vision.encoder import GRID, PIXELS, SIZES, ImagePart, ImageTensors, units_of

_DIGEST_WIDTH: Final = 8
_SIDES: Final = ((2, 2), (2, 5))
"""Height and width of the two images, in patches that are merged into one."""
_TILES_MAX: Final = 16
_SEED: Final = 5

Run = dict[str, list[Call]]


class ImageSightings:
    """What each layer was given of two images: together, and of each alone."""

    def __init__(self, together: "_Shown", alone: Sequence["_Shown"], dtype: torch.dtype) -> None:
        self._together = together
        self._alone = alone
        self._error_max = ERRORS_MAX.get(dtype, ERROR_MAX_HALF)

    def rows_per_unit(self, name: str) -> Fraction | None:
        """How many rows a layer sees of each unit; None where its rows can't be told apart."""
        runs = (self._together, *self._alone)
        calls = [run.calls[name] for run in runs]
        if not calls[0] or len({len(own) for own in calls}) != 1:
            return None
        ratios = {
            Fraction(len(_digest(call)), run.units)
            for run, own in zip(runs, calls, strict=True)
            for call in own
        }
        both = zip(*calls, strict=True)
        if len(ratios) != 1 or not all(self._is_joined(*map(_digest, call)) for call in both):
            return None
        return ratios.pop()

    def share_inputs(self, names: Sequence[str]) -> bool:
        """As `Sightings.share_inputs`."""
        return share_inputs([self._together.calls[name] for name in names])

    def _is_joined(self, together: Tensor, *alone: Tensor) -> bool:
        """Whether two images' rows are those of each, one behind the other."""
        expected = torch.cat(alone)
        difference = (together - expected).norm()
        return bool(difference <= self._error_max * expected.norm())


class _Shown:
    """One run: how many units the encoder was given, and what layers were given then."""

    def __init__(self, names: Collection[str]) -> None:
        self.units = 0
        self.calls: Run = {name: [] for name in names}


def watch_images(
    part: ImagePart,
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    remembered: Collection[str] = (),
) -> ImageSightings:
    """Show the model two images, together and alone, and tell what its layers were given.

    The inputs of `remembered` layers are held meanwhile, for `share_inputs`. Raises `ModelRefused`
    for a model that takes images in no way that is known.
    """
    failures: list[str] = []
    for way in _ways(part):
        try:
            return _watch_way(part, layers, dtype, frozenset(remembered), way)
        except FOREIGN_FAILURES as error:
            failures.append(f"{type(error).__name__}: {error}")
    raise ModelRefused(
        "the model takes images in no way that is known, so no adapter can be applied to its tower "
        f"or connector; leave enable_tower_connector_lora off ({'; '.join(failures)})"
    )


def _watch_way(
    part: ImagePart,
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    remembered: frozenset[str],
    way: Callable[[Sequence[int]], ImageTensors],
) -> ImageSightings:
    together = _show(part, layers, remembered, way((0, 1)))
    alone = [_show(part, layers, frozenset(), way((image,))) for image in (0, 1)]
    return ImageSightings(together, alone, dtype)


@torch.inference_mode()
def _show(
    part: ImagePart,
    layers: Mapping[str, nn.Module],
    remembered: frozenset[str],
    media: ImageTensors,
) -> _Shown:
    """Run the image part once."""
    shown = _Shown(layers.keys())
    counted: list[int] = []

    def collect(name: str, layer: nn.Module, x: Tensor) -> None:
        values = _digest_of(x, isinstance(layer, nn.Embedding))
        kept = x if name in remembered else None
        shown.calls[name].append(Call(tuple(x.shape), kept, values))

    with part.counting(counted.append), telling_inputs(layers, collect):
        part.features(**media)
    expected = int(units_of(media).sum())
    if counted != [expected]:
        raise ValueError(f"the encoder was given {counted} units of {expected}, all in one call")
    shown.units = expected
    return shown


def _digest_of(x: Tensor, is_looked_up: bool) -> Tensor:
    """A few numbers of each row, [rows, few] float32 on the host: whole inputs would fill a GPU."""
    rows = x.reshape(-1, 1 if is_looked_up else x.shape[-1]).float()
    generator = torch.Generator().manual_seed(_SEED)
    mixture = torch.randn(rows.shape[1], _DIGEST_WIDTH, generator=generator)
    return (rows @ mixture.to(rows.device)).cpu()


def _ways(part: ImagePart) -> Iterator[Callable[[Sequence[int]], ImageTensors]]:
    """How images may be given to this model: for each way, from some of the two to tensors."""
    taken = signature(part.features).parameters
    if GRID in taken:
        yield partial(_patches, part)
    elif PIXELS in taken:
        # An encoder that is told sizes makes of each image as many rows as its own size says.
        if SIZES not in signature(part.encoder.forward).parameters:
            yield partial(_images, part)
        yield partial(_tiles, part)
        if SIZES in taken:
            yield partial(_sized_tiles, part)


def _patches(part: ImagePart, images: Sequence[int]) -> ImageTensors:
    merged = getattr(_config_of(part), "spatial_merge_size", 1)
    grids = torch.tensor([[1, *(side * merged for side in _SIDES[image])] for image in images])
    width = _first_weight(part)[0].numel()
    pixels = [
        _noise(part, image, (int(count), width))
        for image, count in zip(images, grids.prod(-1), strict=True)
    ]
    return {PIXELS: torch.cat(pixels), GRID: grids.to(pixels[0].device)}


def _images(part: ImagePart, images: Sequence[int]) -> ImageTensors:
    return {PIXELS: torch.stack([_noise(part, image, _whole_image(part)) for image in images])}


def _tiles(part: ImagePart, images: Sequence[int]) -> ImageTensors:
    """The first image has one tile and the second two, so that the first is padded beside it."""
    return {PIXELS: _padded(part, images, [image + 1 for image in images])}


def _sized_tiles(part: ImagePart, images: Sequence[int]) -> ImageTensors:
    """As many tiles as the model makes of images with these sizes."""
    height, width = _whole_image(part)[1:]
    sizes = [torch.tensor([[height, width * (image + 1)]]) for image in images]
    counts = [_tiles_taken(part, size) for size in sizes]
    return {PIXELS: _padded(part, images, counts), SIZES: torch.cat(sizes)}


def _tiles_taken(part: ImagePart, size: Tensor) -> int:
    """How many tiles of one image the model gives its encoder, of more than it needs."""
    tiles = _noise(part, 0, (1, _TILES_MAX, *_whole_image(part)))
    counted: list[int] = []
    with torch.inference_mode(), part.counting(counted.append):
        part.features(**{PIXELS: tiles, SIZES: size})
    return sum(counted)


def _padded(part: ImagePart, images: Sequence[int], counts: Sequence[int]) -> Tensor:
    tiles = [
        torch.cat([noise, noise.new_zeros((max(counts) - count, *noise.shape[1:]))])
        for image, count in zip(images, counts, strict=True)
        for noise in [_noise(part, image, (count, *_whole_image(part)))]
    ]
    return torch.stack(tiles)


def _whole_image(part: ImagePart) -> tuple[int, ...]:
    side = _config_of(part).image_size
    sides = (side, side) if isinstance(side, int) else tuple(side)
    return (_first_weight(part).shape[1], *sides)


def _noise(part: ImagePart, image: int, shape: tuple[int, ...]) -> Tensor:
    weight = _first_weight(part)
    noise = torch.randn(shape, generator=torch.Generator().manual_seed(image))
    return noise.to(weight)


def _first_weight(part: ImagePart) -> Tensor:
    """The weight that makes states of pixels: [states, channels, ...], or [states, values]."""
    kinds = (nn.Conv2d, nn.Conv3d, nn.Linear)
    return next(layer.weight for layer in part.encoder.modules() if isinstance(layer, kinds))


def _config_of(part: ImagePart) -> Any:
    return part.encoder.config


def _digest(call: Call) -> Tensor:
    if call.values is None:
        raise TypeError("a call without a digest; the watch makes one of each")
    return call.values
