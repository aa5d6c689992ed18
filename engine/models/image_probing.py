"""A probe of which layers keep images apart: three runs of a model's image part at start.

It runs two different images together and each alone. A layer is mapped only if its input for both
images is its input for each, concatenated, with the same number of rows per unit of both. The order
of rows within an image does not matter.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fractions import Fraction
from functools import partial
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor, nn

from loradock.engine.errors import MODEL_CODE_ERRORS, ModelRefused
from loradock.engine.models.image_part import (
    GRID,
    PIXELS,
    SIZES,
    ImagePart,
    ImageTensors,
    units_of,
)
from loradock.engine.models.observation import RecordedInput, error_max, input_hooks, share_inputs

_DIGEST_WIDTH: Final = 8
_SIDES: Final = ((2, 2), (2, 5))
"""Height and width of the two images, in merged patches."""
_TILES_MAX: Final = 16
_SEED: Final = 5


class ObservedImageInputs:
    """The inputs of each layer for two images: together, and for each alone."""

    def __init__(
        self, together: "_ImageRun", alone: Sequence["_ImageRun"], dtype: torch.dtype
    ) -> None:
        self._together = together
        self._alone = alone
        self._error_max = error_max(dtype)

    def rows_per_unit(self, name: str) -> Fraction | None:
        """Return a layer's input rows per unit, or None if its rows do not stay apart."""
        runs = (self._together, *self._alone)
        inputs = [run.inputs[name] for run in runs]
        if not inputs[0] or len({len(calls) for calls in inputs}) != 1:
            return None
        ratios = {
            Fraction(len(_digest(recorded)), run.units)
            for run, calls in zip(runs, inputs, strict=True)
            for recorded in calls
        }
        by_call = zip(*inputs, strict=True)
        if len(ratios) != 1 or not all(self._is_joined(*map(_digest, call)) for call in by_call):
            return None
        return ratios.pop()

    def share_inputs(self, names: Sequence[str]) -> bool:
        """As `ObservedInputs.share_inputs`."""
        return share_inputs([self._together.inputs[name] for name in names])

    def _is_joined(self, together: Tensor, *alone: Tensor) -> bool:
        """Return whether two images' rows are the rows of each, concatenated."""
        expected = torch.cat(alone)
        difference = (together - expected).norm()
        return bool(difference <= self._error_max * expected.norm())


class _ImageRun:
    """One run: the number of units that the encoder received, and the layers' inputs."""

    def __init__(self, names: Collection[str]) -> None:
        self.units = 0
        self.inputs: dict[str, list[RecordedInput]] = {name: [] for name in names}


def record_image_inputs(
    part: ImagePart,
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    retained: Collection[str] = (),
) -> ObservedImageInputs:
    """Run the image part with two images, together and alone, and record its layers' inputs.

    The tensors of `retained` layers are kept, for `share_inputs`. Raises `ModelRefused` if the
    model accepts images in no supported format.
    """
    failures: list[str] = []
    for make_images in _input_formats(part):
        try:
            return _record_format(part, layers, dtype, frozenset(retained), make_images)
        except MODEL_CODE_ERRORS as error:
            failures.append(f"{type(error).__name__}: {error}")
    raise ModelRefused(
        "the model accepts images in no format that is supported, so no adapter can be applied to "
        f"its tower or connector; leave enable_tower_connector_lora off ({'; '.join(failures)})"
    )


def _record_format(
    part: ImagePart,
    layers: Mapping[str, nn.Module],
    dtype: torch.dtype,
    retained: frozenset[str],
    make_images: Callable[[Sequence[int]], ImageTensors],
) -> ObservedImageInputs:
    together = _run(part, layers, retained, make_images((0, 1)))
    alone = [_run(part, layers, frozenset(), make_images((image,))) for image in (0, 1)]
    return ObservedImageInputs(together, alone, dtype)


@torch.inference_mode()
def _run(
    part: ImagePart,
    layers: Mapping[str, nn.Module],
    retained: frozenset[str],
    images: ImageTensors,
) -> _ImageRun:
    """Run the image part once."""
    run = _ImageRun(layers.keys())
    counted: list[int] = []

    def collect(name: str, layer: nn.Module, x: Tensor) -> None:
        values = _digest_of(x, isinstance(layer, nn.Embedding))
        tensor = x if name in retained else None
        run.inputs[name].append(RecordedInput(tuple(x.shape), tensor, values))

    with part.counting_units(counted.append), input_hooks(layers, collect):
        part.features(**images)
    expected = int(units_of(images).sum())
    if counted != [expected]:
        raise ValueError(
            f"the encoder received {counted} units by call; expected one call with {expected}"
        )
    run.units = expected
    return run


def _digest_of(x: Tensor, is_looked_up: bool) -> Tensor:
    """Return a few numbers per row, [rows, few] float32 on the host.

    Whole inputs of all layers would fill a GPU.
    """
    rows = x.reshape(-1, 1 if is_looked_up else x.shape[-1]).float()
    generator = torch.Generator().manual_seed(_SEED)
    mixture = torch.randn(rows.shape[1], _DIGEST_WIDTH, generator=generator)
    return (rows @ mixture.to(rows.device)).cpu()


def _input_formats(part: ImagePart) -> Iterator[Callable[[Sequence[int]], ImageTensors]]:
    """Yield a function per format that the model can accept, from image numbers to tensors."""
    parameters = signature(part.features).parameters
    if GRID in parameters:
        yield partial(_patches, part)
    elif PIXELS in parameters:
        # An encoder that is passed sizes makes a number of rows per image that depends on its size.
        if SIZES not in signature(part.encoder.forward).parameters:
            yield partial(_images, part)
        yield partial(_tiles, part)
        if SIZES in parameters:
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
    """Return two images of one and two tiles, so that the first is padded."""
    return {PIXELS: _padded(part, images, [image + 1 for image in images])}


def _sized_tiles(part: ImagePart, images: Sequence[int]) -> ImageTensors:
    """Return images of these sizes, each with the number of tiles that the model uses for it."""
    height, width = _whole_image(part)[1:]
    sizes = [torch.tensor([[height, width * (image + 1)]]) for image in images]
    counts = [_tiles_used(part, size) for size in sizes]
    return {PIXELS: _padded(part, images, counts), SIZES: torch.cat(sizes)}


def _tiles_used(part: ImagePart, size: Tensor) -> int:
    """Return the number of an image's tiles that reach the encoder when more are offered."""
    tiles = _noise(part, 0, (1, _TILES_MAX, *_whole_image(part)))
    counted: list[int] = []
    with torch.inference_mode(), part.counting_units(counted.append):
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
    """Return the first layer's weight: [states, channels, ...], or [states, values]."""
    kinds = (nn.Conv2d, nn.Conv3d, nn.Linear)
    return next(layer.weight for layer in part.encoder.modules() if isinstance(layer, kinds))


def _config_of(part: ImagePart) -> Any:
    return part.encoder.config


def _digest(recorded: RecordedInput) -> Tensor:
    if recorded.values is None:
        raise TypeError("a recorded input without a digest")
    return recorded.values
