"""Wrappers of linear layers that every rank holds whole, and of heads.

The base layer's own forward computes the base output unless the layer is only a product with its
weight, so it may be of any kind, for example quantised; only the delta is computed here.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import linear
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from loradock.engine.errors import MODEL_CODE_ERRORS
from loradock.engine.kernels.packed_linear import (
    PackedWeight,
    can_pack,
    onednn_linear,
    pack_weight,
)
from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape
from loradock.engine.layers.saved import SavedWeights, Step, TokenLogitsStep, TokenVectors
from loradock.engine.layers.tensor_parallel import ParallelHead
from loradock.engine.layout import ModuleKind
from loradock.engine.models.library.names import Conv1D
from loradock.engine.residency.arena import Arena


class BaseProduct:
    """The output of a base layer that is only a product with its weight, `x @ W.T + bias`.

    Hooks may compute the weight (`weight_norm`), and offloading replaces the forward; then the
    layer itself is called.
    """

    def __init__(self, layer: nn.Linear) -> None:
        self._layer = layer
        # Reading a parameter of a module takes two Python calls.
        self._parameters: dict[str, Any] = layer._parameters
        self._uses_onednn = False

    def pack(self, is_shared: Callable[[Tensor], bool]) -> None:
        """Replace the layer's weight by a packed one, or if it `is_shared`, multiply it by oneDNN.

        Does nothing for weights and processors that `can_pack` excludes.
        """
        weight = self._parameters.get("weight")
        if weight is None or self._is_changed() or not can_pack(weight):
            return
        if not is_shared(weight):
            self._layer.weight = nn.Parameter(pack_weight(weight), requires_grad=False)
        self._uses_onednn = True

    def _is_changed(self) -> bool:
        layer = self._layer
        hooks = layer._forward_pre_hooks or layer._forward_hooks
        return bool(hooks) or "forward" in vars(layer)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [..., out]; x: [..., in]."""
        layer = self._layer
        if layer._forward_pre_hooks or layer._forward_hooks or "forward" in vars(layer):
            hooked: Tensor = layer(x)
            return hooked
        weight, bias = self._parameters["weight"], self._parameters["bias"]
        if self._uses_onednn and x.dtype == weight.dtype and x.numel() and not x.requires_grad:
            return onednn_linear(x, weight, bias)
        return linear(x, weight, bias)


class ReplicatedLinearWithLoRA(BaseLayerWithLoRA):
    """A linear layer with one slice; A and B are whole."""

    base_layer: nn.Linear | Conv1D

    def __init__(self, base_layer: nn.Module) -> None:
        super().__init__(base_layer)
        self._product = BaseProduct(base_layer) if type(base_layer) is nn.Linear else None

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear layers whose forward is called; attention reads the excluded kind's weight."""
        return not isinstance(layer, NonDynamicallyQuantizableLinear) and _is_product(layer)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice over the whole layer; `Conv1D` stores its weight as [in, out]."""
        if isinstance(self.base_layer, Conv1D):
            return (SliceShape(self.base_layer.nx, self.base_layer.nf, transposed=True),)
        return (SliceShape(self.base_layer.in_features, self.base_layer.out_features),)

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, for models that read its dtype or device."""
        return self.base_layer.weight

    @property
    def bias(self) -> Tensor | None:
        """The base layer's bias."""
        return self.base_layer.bias

    @property
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """The whole layer, if it is a plain one: others compute more than a product."""
        if type(self.base_layer) is not nn.Linear:
            return ()
        return (SliceShape(self.base_layer.in_features, self.base_layer.out_features),)

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """The layer, if its weight can be read and it is only a product with it."""
        if isinstance(self.base_layer, Conv1D):
            return (SliceShape(self.base_layer.nx, self.base_layer.nf),)
        is_readable = type(self.base_layer.weight.data) in (Tensor, PackedWeight)
        return self.saved_shapes if is_readable else ()

    def base_weights(self, index: int) -> tuple[Tensor, Tensor | None] | None:  # noqa: ARG002
        """Return the base layer's."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        return (weight.T if isinstance(self.base_layer, Conv1D) else weight), bias

    def pack_weights(self, is_shared: Callable[[Tensor], bool]) -> None:
        """Pack the weight of a plain layer."""
        if self._product is not None:
            self._product.pack(is_shared)

    def forward(self, *inputs: Any, **named: Any) -> Tensor:
        """Return `x @ W.T + bias + delta`; the arguments are those of the base layer.

        The first, x: [..., in_features], has one row per mapped token.
        """
        if len(inputs) == 1 and not named:
            return self.with_lora(self._product or self.base_layer, inputs[0])
        x, base = split_call(self.base_layer, inputs, named)
        return self.with_lora(self._product or base, x)


class LogitsProcessorWithLoRA(ReplicatedLinearWithLoRA):
    """The language-model head, with one slice; a head tied to the embedding stays tied.

    A row uses the adapter of its prompt if the model computes the logits of last tokens only, and
    of its token if it computes all. The vocabulary may have any size.
    """

    base_layer: nn.Linear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear heads."""
        return isinstance(layer, nn.Linear)

    @property
    def token_shapes(self) -> tuple[SliceShape, ...]:
        """The head, if it is a plain product; every rank holds an adapter's rows.

        A rank of several has only a part of a bias.
        """
        base = self.base_layer
        is_split = isinstance(base, ParallelHead) and base.bias is None
        if type(base) is not nn.Linear and not is_split:
            return ()
        return (SliceShape(base.in_features, base.out_features),)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits with deltas; x: [..., hidden], one row per prompt or per token."""
        # Each prompt's last token is a strided view; with frozen weights PyTorch would multiply it
        # prompt by prompt, in bfloat16 on a CPU a hundred times slower than in one product.
        x = x.contiguous()
        y: Tensor = (self._product or self.base_layer)(x)
        return self.add_lora(y.contiguous(), x)

    def _token_step(self, own: TokenVectors) -> Step:
        return TokenLogitsStep(own, self.base_layer.bias)


class ClassificationHeadWithLoRA(ReplicatedLinearWithLoRA):
    """A linear head with one slice of kind HEAD: a weight [labels, hidden], a bias [labels, 1].

    An adapter replaces it whole (`modules_to_save`). A saved head is multiplied exactly as the base
    head is, so its scores equal those of a model that was fine-tuned in place, bit by bit. It has
    no rank; the directory stores rank 1 for it. If the layer has no bias, the saved one is zeros.
    """

    base_layer: nn.Linear

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Linear heads."""
        return isinstance(layer, nn.Linear)

    @property
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """None: the layer's only slice is the whole head."""
        return ()

    @property
    def affine_shapes(self) -> tuple[SliceShape, ...]:
        """None: a head is replaced whole."""
        return ()

    @property
    def _saved_widths(self) -> tuple[int, ...]:
        return (self.base_layer.out_features,)

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice, a whole head."""
        base = self.base_layer
        return (SliceShape(base.in_features, base.out_features, kind=ModuleKind.HEAD),)

    def base_head(self) -> tuple[Tensor, Tensor]:
        """Return the base head's weight and bias, in the shapes of a saved head's."""
        weight, bias = self.base_layer.weight, self.base_layer.bias
        column = weight.new_zeros(len(weight), 1) if bias is None else bias[:, None]
        return weight.detach(), column.detach()

    def pack_weights(self, is_shared: Callable[[Tensor], bool]) -> None:
        """Do nothing: a saved head is multiplied as the base head is."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the scores; x: [..., hidden], one row per sequence or per token of the mapping."""
        y: Tensor = self.base_layer(x)
        return self.add_lora(y.contiguous(), x)

    def _bind(self, arena: Arena) -> None:
        self._saved = (SavedWeights(arena, self._columns[0]),)


def split_call(
    layer: nn.Module, inputs: Sequence[Any], named: Mapping[str, Any]
) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """Return the first argument of a call, and the layer as a function of it alone.

    Models may call a layer with names, or pass more to a kind of their own.
    """
    rest = dict(named)
    if inputs:
        return inputs[0], lambda x: layer(x, *inputs[1:], **rest)
    first = next(iter(inspect.signature(layer.forward).parameters))
    return rest.pop(first), lambda x: layer(x, **rest)


def _is_product(layer: nn.Module) -> bool:
    """Return whether a layer returns a product with its weight: a model's own can return more."""
    if type(layer) is nn.Linear or not isinstance(layer, nn.Linear):
        return True
    if type(layer).forward is nn.Linear.forward or not layer.weight.is_floating_point():
        return True
    try:
        with torch.inference_mode():
            y = layer(layer.weight.new_zeros(2, layer.in_features))
    except MODEL_CODE_ERRORS:
        # A kind that is split over ranks or quantised may not run here.
        return True
    return isinstance(y, Tensor) and y.shape == (2, layer.out_features)
