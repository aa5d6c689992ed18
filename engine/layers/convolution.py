"""The wrapper of convolutions: B times A is a convolution of the same kernel.

As PEFT trains them, A is a convolution to `rank` channels with the base layer's kernel, stride and
padding, and B one of width 1. Both together are one linear product per output position, whose input
is the patch of values under the kernel.
"""

import math
from typing import Final

from torch import Tensor, nn
from torch.nn.functional import pad

from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape, SliceTensors, slice_tensors

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d

CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


class ConvolutionWithLoRA(BaseLayerWithLoRA):
    """A convolution with one slice, whose inputs are the values of a patch: channels x kernel."""

    base_layer: Convolution

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Convolutions that `refusal_of` has no reason against."""
        return isinstance(layer, CONVOLUTIONS) and not refusal_of(layer)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over the whole layer."""
        base = self.base_layer
        inputs = base.in_channels * math.prod(base.kernel_size)
        return (SliceShape(inputs, base.out_channels, kernel=tuple(base.kernel_size)),)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for models that read its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The base layer's bias."""
        return self.base_layer.bias

    def set_lora(
        self, index: int, lora_a: Tensor | SliceTensors, lora_b: Tensor | SliceTensors
    ) -> None:
        """Write A [rank, in, *kernel] and B [out, rank, 1, ...], or both flattened to matrices."""
        a, b = (
            [None if one is None else one.flatten(1) for one in slice_tensors(given)]
            for given in (lora_a, lora_b)
        )
        super().set_lora(index, a, b)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Return the convolution plus the delta of each output position.

        input: [samples, in, *sizes], whose output positions, row-major within each sample, are the
        rows of the mapping; without samples it is one sample.
        """
        x = input
        y: Tensor = self.base_layer(x)
        # Patches cost memory, so a batch without weights for this layer makes none.
        if self._punica is None or self._slices is None or not self._punica.touches(self._slices):
            return y
        is_single = x.ndim == len(self.base_layer.kernel_size) + 1
        patches = self._patches(x[None] if is_single else x)
        shape = (*patches.shape[:-1], self.base_layer.out_channels)
        delta = self.add_lora(y.new_zeros(shape), patches).movedim(-1, 1)
        return y + (delta[0] if is_single else delta)

    def _patches(self, x: Tensor) -> Tensor:
        """Return the values under the kernel at each output position.

        Shape [samples, *positions, in * kernel values]. A reads zeros around the input in every
        padding mode of the base layer, because PEFT passes none on.
        """
        base = self.base_layer
        x = pad(x, [width for widths in reversed(_padding(base)) for width in widths])
        for axis, (kernel, stride) in enumerate(zip(base.kernel_size, base.stride, strict=True)):
            x = x.unfold(2 + axis, kernel, stride)
        axes = len(base.kernel_size)
        return x.movedim(1, 1 + axes).flatten(1 + axes).contiguous()


def refusal_of(layer: nn.Module) -> str:
    """Return why a layer is not wrapped although it is a convolution; empty for all others."""
    if not isinstance(layer, CONVOLUTIONS):
        return ""
    if layer.groups > 1:
        return f"it is a convolution of {layer.groups} groups, and A and B are stored whole"
    if any(one > 1 for one in layer.dilation):
        return "it is a dilated convolution, and PEFT's A is not dilated"
    plain = next(kind for kind in CONVOLUTIONS if isinstance(layer, kind))
    if type(layer).forward is not plain.forward or type(layer)._conv_forward is not (
        plain._conv_forward
    ):
        return "it is a convolution with a forward of its own"
    return ""


def _padding(base: Convolution) -> list[tuple[int, int]]:
    """Return the zeros before and after each axis."""
    if base.padding == "same":
        return [((kernel - 1) // 2, kernel // 2) for kernel in base.kernel_size]
    if isinstance(base.padding, str):
        return [(0, 0)] * len(base.kernel_size)
    return [(width, width) for width in base.padding]
