"""Base layers of which every rank of a tensor-parallel group holds a shard.

Seen from the model they compute the whole layer's output, or this rank's columns of it if the
model's plan specifies that the next layer expects them.

A forward has three steps, because adapters add between the last two: `shard_input` selects the part
of the input for this rank, `multiply_shard` multiplies, `combine_ranks` gathers or sums over the
ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from loradock.engine.parallel import WHOLE_PARAMETER, ParallelGroup, ParameterShard


class ParallelLinear(nn.Linear):
    """One rank's shard of a linear layer; by default its input and output are not exchanged.

    `shards`: the parts of the layer's parameters that this rank holds, by name.
    """

    def __init__(
        self, layer: nn.Linear, weight: ParameterShard, bias: ParameterShard | None
    ) -> None:
        """`weight` and `bias` are the parts of the layer's; `bias` None: another rank adds it.

        `in_features` and `out_features` are those that the model sees.
        """
        has_bias = layer.bias is not None and bias is not None
        super().__init__(layer.in_features, layer.out_features, has_bias, device="meta")
        self.shards: Mapping[str, ParameterShard] = {"weight": weight}
        self.weight = nn.Parameter(weight.take(layer.weight.detach()), requires_grad=False)
        if layer.bias is not None and bias is not None:
            self.shards = {"weight": weight, "bias": bias}
            self.bias = nn.Parameter(bias.take(layer.bias.detach()), requires_grad=False)

    def shard_input(self, x: Tensor) -> Tensor:
        """Return the part of the input for this rank."""
        return x

    def multiply_shard(self, x: Tensor) -> Tensor:
        """Return this rank's product; x: the result of `shard_input`."""
        return linear(x, self.weight, self.bias)

    def combine_ranks(self, y: Tensor) -> Tensor:
        """Return the layer's output, from this rank's product including its adapters' deltas."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        """Run all three steps."""
        return self.combine_ranks(self.multiply_shard(self.shard_input(x)))


class ColumnParallelLinear(ParallelLinear):
    """Outputs split: this rank has `rows` of the weight, of `whole_out_features`.

    With `gathers` the output contains every rank's columns, rank 0's first; then the rows must be
    equal shares in the order of ranks.
    """

    def __init__(
        self,
        layer: nn.Linear,
        group: ParallelGroup,
        rows: Sequence[range] | None = None,
        gathers: bool = False,
    ) -> None:
        """`rows` None: an equal share; raises ValueError if the rows can't be shared equally."""
        if rows is None:
            rows = (group.shard_range(layer.out_features, "out_features"),)
        shard = ParameterShard(0, tuple(rows))
        super().__init__(layer, shard, shard)
        self.whole_out_features = layer.out_features
        self.out_features = layer.out_features if gathers else len(self.weight)
        self.group = group
        self.rows = tuple(rows)
        self.gathers = gathers

    def combine_ranks(self, y: Tensor) -> Tensor:
        """Return this rank's columns, or all ranks' if the layer gathers."""
        return self.group.gather_columns(y) if self.gathers else y


class RowParallelLinear(ParallelLinear):
    """Inputs split: this rank has `columns` of the weight, and outputs are summed over the ranks.

    Only rank 0 adds the bias. With `splits_input` the input is whole and split here.
    """

    def __init__(self, layer: nn.Linear, group: ParallelGroup, splits_input: bool = False) -> None:
        """Raises ValueError if the inputs can't be shared equally."""
        columns = group.shard_range(layer.in_features, "in_features")
        super().__init__(
            layer, ParameterShard(1, (columns,)), WHOLE_PARAMETER if group.is_leader else None
        )
        self.whole_in_features = layer.in_features
        self.in_features = layer.in_features if splits_input else len(columns)
        self.group = group
        self.columns = columns
        self.splits_input = splits_input

    def shard_input(self, x: Tensor) -> Tensor:
        """Return this rank's columns of a whole input, or an input that is already split."""
        return x[..., self.columns.start : self.columns.stop] if self.splits_input else x

    def combine_ranks(self, y: Tensor) -> Tensor:
        """Return the sum of every rank's product."""
        return self.group.all_reduce(y)


def vocabulary_share(vocabulary: int, group: ParallelGroup) -> range:
    """Return this rank's tokens: equal shares rounded up, so the last ranks may have fewer."""
    share = -(-vocabulary // group.world_size)
    start = min(group.rank * share, vocabulary)
    return range(start, min(start + share, vocabulary))


class ParallelHead(ParallelLinear):
    """The language-model head with its vocabulary split; the logits are whole.

    If the vocabulary is not a multiple of the ranks, the last rank's logits are padded before they
    are gathered. The padding then is in the last columns and is removed.
    """

    def __init__(self, layer: nn.Linear, group: ParallelGroup) -> None:
        tokens = vocabulary_share(layer.out_features, group)
        shard = ParameterShard(0, (tokens,))
        super().__init__(layer, shard, shard)
        self.group = group
        self.tokens = tokens

    def combine_ranks(self, y: Tensor) -> Tensor:
        """Return the logits of the whole vocabulary."""
        share = -(-self.out_features // self.group.world_size)
        padded = pad(y, (0, share - y.shape[-1]))
        return self.group.gather_columns(padded)[..., : self.out_features].contiguous()


class VocabParallelEmbedding(nn.Embedding):
    """The token embedding with its vocabulary split; tokens of other ranks count as zeros."""

    def __init__(self, layer: nn.Embedding, group: ParallelGroup) -> None:
        super().__init__(
            layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta"
        )
        self.group = group
        self.tokens = vocabulary_share(layer.num_embeddings, group)
        shard = ParameterShard(0, (self.tokens,))
        self.shards: Mapping[str, ParameterShard] = {"weight": shard}
        self.weight = nn.Parameter(shard.take(layer.weight.detach()), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """Return the embeddings of token ids of any shape, [..., embedding_dim]."""
        index = input - self.tokens.start
        is_local = (index >= 0) & (index < len(self.tokens))
        rows = embedding(index.where(is_local, 0), self.weight)
        return self.group.all_reduce(rows.masked_fill(~is_local[..., None], 0))


class PPMissingLayer(nn.Module):
    """A layer of another pipeline stage: it returns its first argument, and is never wrapped.

    Adapters' tensors for it and the modules below it are skipped: that stage's rank reads them.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Return the first argument."""
        return args[0] if args else next(iter(kwargs.values()))


def missing_layers(model: nn.Module) -> Iterator[str]:
    """Yield the paths of a model's missing layers."""
    for path, module in model.named_modules():
        if isinstance(module, PPMissingLayer):
            yield path
