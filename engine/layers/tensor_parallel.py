"""Base layers of which every rank of a tensor-parallel group holds a part.

What it is: linear layers with their outputs or their inputs split, the token embedding and the head
with their vocabulary split. What it is not: LoRA; the families that wrap these have files of their
own. One rule: seen from the model they compute what the whole layer computes, or that layer's own
columns where the model's plan says that the next layer takes them so.

A forward has three steps, because adapters add between the last two: `enter` takes the part of the
input that this rank works on, `partial` multiplies, `complete` brings the ranks together.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding, linear, pad

from engine.parallel import ParallelGroup


class ParallelLinear(nn.Linear):
    """One rank's part of a linear layer; its three steps do nothing but multiply."""

    def __init__(self, layer: nn.Linear, weight: Tensor, bias: Tensor | None) -> None:
        """`weight` and `bias` are this rank's part of what `layer` holds whole; taken, not copied.

        `in_features` and `out_features` are what the model sees of the layer.
        """
        super().__init__(layer.in_features, layer.out_features, bias is not None, device="meta")
        self.weight = nn.Parameter(weight.detach(), requires_grad=False)
        if bias is not None:
            self.bias = nn.Parameter(bias.detach(), requires_grad=False)

    def enter(self, x: Tensor) -> Tensor:
        """The part of the input that this rank works on."""
        return x

    def partial(self, x: Tensor) -> Tensor:
        """This rank's product; x: what `enter` gave."""
        return linear(x, self.weight, self.bias)

    def complete(self, y: Tensor) -> Tensor:
        """The layer's output, from this rank's product with its adapters' deltas."""
        return y

    def forward(self, x: Tensor) -> Tensor:
        """All three steps."""
        return self.complete(self.partial(self.enter(x)))


class ColumnParallelLinear(ParallelLinear):
    """Outputs split: this rank has `rows` of the weight, of `whole_out_features`.

    With `gathers` the output is every rank's, rank 0's first; then the rows must be equal shares in
    the order of ranks.
    """

    def __init__(
        self,
        layer: nn.Linear,
        group: ParallelGroup,
        rows: Sequence[range] | None = None,
        gathers: bool = False,
    ) -> None:
        """`rows` None: an equal share; raises ValueError where there is none."""
        if rows is None:
            rows = (group.part_of(layer.out_features, "out_features"),)
        weight = torch.cat([layer.weight[part.start : part.stop] for part in rows])
        bias = None
        if layer.bias is not None:
            bias = torch.cat([layer.bias[part.start : part.stop] for part in rows])
        super().__init__(layer, weight, bias)
        self.whole_out_features = layer.out_features
        self.out_features = layer.out_features if gathers else len(weight)
        self.group = group
        self.rows = tuple(rows)
        self.gathers = gathers

    def complete(self, y: Tensor) -> Tensor:
        """This rank's columns, or all ranks' where the layer gathers."""
        return self.group.gather_columns(y) if self.gathers else y


class RowParallelLinear(ParallelLinear):
    """Inputs split: this rank has `columns` of the weight, and the output is the sum of all ranks'.

    The bias is added by rank 0 alone. With `splits_input` the input comes whole.
    """

    def __init__(self, layer: nn.Linear, group: ParallelGroup, splits_input: bool = False) -> None:
        """Raises ValueError where the inputs can't be shared evenly."""
        columns = group.part_of(layer.in_features, "in_features")
        weight = layer.weight[:, columns.start : columns.stop].clone()
        super().__init__(layer, weight, layer.bias if group.leads else None)
        self.whole_in_features = layer.in_features
        self.in_features = layer.in_features if splits_input else len(columns)
        self.group = group
        self.columns = columns
        self.splits_input = splits_input

    def enter(self, x: Tensor) -> Tensor:
        """This rank's columns of a whole input; what came split already is taken as it is."""
        return x[..., self.columns.start : self.columns.stop] if self.splits_input else x

    def complete(self, y: Tensor) -> Tensor:
        """The sum of every rank's product."""
        return self.group.all_reduce(y)


def vocabulary_share(vocabulary: int, group: ParallelGroup) -> range:
    """The tokens of this rank: as many on each, but for the last ones, who may lack some."""
    share = -(-vocabulary // group.world_size)
    start = min(group.rank * share, vocabulary)
    return range(start, min(start + share, vocabulary))


class ParallelHead(ParallelLinear):
    """The language-model head with its vocabulary split; the logits are whole.

    Where the vocabulary is no multiple of the ranks, the last rank's logits are padded to be
    gathered, and the padding, which then is the last of all columns, is cut off.
    """

    def __init__(self, layer: nn.Linear, group: ParallelGroup) -> None:
        tokens = vocabulary_share(layer.out_features, group)
        mine = slice(tokens.start, tokens.stop)
        bias = None if layer.bias is None else layer.bias[mine].clone()
        super().__init__(layer, layer.weight[mine].clone(), bias)
        self.group = group
        self.tokens = tokens

    def complete(self, y: Tensor) -> Tensor:
        """The logits of the whole vocabulary."""
        share = -(-self.out_features // self.group.world_size)
        padded = pad(y, (0, share - y.shape[-1]))
        return self.group.gather_columns(padded)[..., : self.out_features].contiguous()


class VocabParallelEmbedding(nn.Embedding):
    """The token embedding with its vocabulary split; a token that is elsewhere counts as zeros."""

    def __init__(self, layer: nn.Embedding, group: ParallelGroup) -> None:
        super().__init__(
            layer.num_embeddings, layer.embedding_dim, layer.padding_idx, device="meta"
        )
        self.group = group
        self.tokens = vocabulary_share(layer.num_embeddings, group)
        mine = layer.weight[self.tokens.start : self.tokens.stop].clone()
        self.weight = nn.Parameter(mine.detach(), requires_grad=False)

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the base class's name
        """The embeddings of token ids of any shape, [..., embedding_dim]."""
        place = input - self.tokens.start
        is_mine = (place >= 0) & (place < len(self.tokens))
        found = embedding(place.where(is_mine, 0), self.weight)
        return self.group.all_reduce(found.masked_fill(~is_mine[..., None], 0))
