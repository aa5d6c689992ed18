"""The wrapper of the token embedding: A is looked up by token and multiplied by B.

Every rank holds A and B of the whole vocabulary, even if the base layer holds a part of it. Only
embeddings that return the looked-up row, at most times a constant, are wrapped, so that the delta
is looked up and scaled in the same way.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from loradock.engine.kernels.operands import LoRASlices
from loradock.engine.layers.base import BaseLayerWithLoRA, SliceShape
from loradock.engine.layers.saved import LookupStep, SavedRows, Step, TokenLookupStep, TokenVectors
from loradock.engine.layers.tensor_parallel import VocabParallelEmbedding
from loradock.engine.layout import ModuleKind
from loradock.engine.punica.wrapper import PunicaWrapper


class _EmbeddingStep(NamedTuple):
    """Adds the batch's deltas; x: ids [rows, 1] of an input of shape `shape`."""

    punica: PunicaWrapper
    slices: LoRASlices
    shape: Sequence[int]
    scale: float

    def run(self, y: Tensor, x: Tensor) -> None:
        """Add each row's delta to y [rows, hidden]."""
        self.punica.add_lora_embedding(y, x.view(self.shape), self.slices, self.scale)


class VocabParallelEmbeddingWithLoRA(BaseLayerWithLoRA):
    """`nn.Embedding` with one slice: A [rank, vocabulary], B [hidden, rank], both whole.

    Files call A `lora_embedding_A`; the arena stores it transposed, one row per token.
    `is_shared_by_rows`: the layer may look up one row of ids for all sequences of a batch, as
    models look up positions.
    """

    is_shared_by_rows = False

    base_layer: nn.Embedding

    def __init__(self, base_layer: nn.Embedding) -> None:
        super().__init__(base_layer)
        self._scale = _scale_of(base_layer)

    @classmethod
    def can_replace_layer(cls, layer: nn.Module) -> bool:
        """Plain lookups, and those that scale their result (Gemma), unless they change weights."""
        return (
            isinstance(layer, nn.Embedding)
            and layer.max_norm is None
            and (_is_plain(layer) or hasattr(layer, "embed_scale"))
        )

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        """One slice of `num_embeddings` rows."""
        base = self.base_layer
        return (SliceShape(base.num_embeddings, base.embedding_dim, kind=ModuleKind.EMBEDDING),)

    def _shard_of_a(self, a: Tensor, shape: SliceShape) -> Tensor:  # noqa: ARG002 - A is whole
        """Return A whole and transposed, one row per token."""
        return a.T

    @property
    def weight(self) -> Tensor:
        """The base layer's weight, which a tied head shares."""
        return self.base_layer.weight

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Return the tokens' rows with deltas, [..., hidden]; input: token ids, [...] int64.

        With `is_shared_by_rows`, one row of ids is repeated for every sequence of the mapping,
        because their adapters may differ.
        """
        token_ids = self._for_every_sequence(input) if self.is_shared_by_rows else input
        y: Tensor = self.base_layer(token_ids)
        return self.add_lora(y, token_ids.long()[..., None])

    @property
    def token_shapes(self) -> tuple[SliceShape, ...]:
        """The embedding; every rank holds an adapter's rows."""
        return (SliceShape(self.base_layer.embedding_dim, self.base_layer.num_embeddings),)

    @property
    def saved_shapes(self) -> tuple[SliceShape, ...]:
        """The whole layer, if this rank has all of it."""
        base = self.base_layer
        if isinstance(base, VocabParallelEmbedding):
            return ()
        return (SliceShape(base.embedding_dim, base.num_embeddings),)

    def _saved_step(self, columns: slice, rows: SavedRows) -> Step:  # noqa: ARG002 - all of them
        return LookupStep(rows, self._scale)

    def _token_step(self, own: TokenVectors) -> Step:
        return TokenLookupStep(own, self._scale)

    def _delta_steps(self, y: Tensor, x: Tensor) -> Iterator[Step]:  # noqa: ARG002 - the base's
        if self._punica is not None and self._slices is not None:
            yield _EmbeddingStep(self._punica, self._slices, x.shape[:-1], self._scale)

    def _for_every_sequence(self, ids: Tensor) -> Tensor:
        tokens = None if self._punica is None else self._punica.adapted_tokens
        if tokens is None or ids.ndim != 2 or len(ids) > 1 or tokens % ids.shape[1]:
            return ids
        return ids.expand(tokens // ids.shape[1], -1)


def _is_plain(layer: nn.Embedding) -> bool:
    """Return whether the layer returns the looked-up row, from this rank or another."""
    is_split = isinstance(layer, VocabParallelEmbedding)
    return is_split or type(layer).forward is nn.Embedding.forward


def _scale_of(layer: nn.Embedding) -> float:
    """Return the factor by which the layer multiplies its rows, in the layer's precision."""
    scale = getattr(layer, "embed_scale", 1.0)
    return float(scale.to(layer.weight.dtype) if isinstance(scale, Tensor) else scale)
