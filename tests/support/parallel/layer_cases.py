"""Cases for two ranks about single layers: together they compute what one rank would.

Every case builds the whole layer on each rank from one seed, splits it, puts adapters of several
ranks into every slot, and compares with a product over whole tensors.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import (
    BaseLayerWithLoRA,
    ColumnParallelLinear,
    ColumnParallelLinearWithLoRA,
    ColumnParallelLinearWithShardedLoRA,
    MergedColumnParallelLinear,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedColumnParallelLinearWithShardedLoRA,
    MergedQKVParallelLinearWithLoRA,
    MergedQKVParallelLinearWithShardedLoRA,
    ParallelHead,
    QKVParallelLinear,
    QKVParallelLinearWithLoRA,
    QKVParallelLinearWithShardedLoRA,
    ReplicatedLinearWithLoRA,
    RowParallelLinear,
    RowParallelLinearWithLoRA,
    RowParallelLinearWithShardedLoRA,
    VocabParallelEmbedding,
)
from loradock.engine.parallel import SINGLE, ParallelGroup
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from tests.support.engine.engine_examples import relative_error

IN, RANK_MAX = 24, 8
RANKS = (2, 8, 4)
"""One adapter per slot: of less than the maximal rank, of the maximal rank, and without a slice."""

SLOT_OF_ROW = (1, -1, 0, 2, 2, -1, 1, 0, 0)
IDS = (11, 12, 13)


def whole(out_features: int, seed: int, bias: bool = True, in_features: int = IN) -> nn.Linear:
    torch.manual_seed(seed)
    return nn.Linear(in_features, out_features, bias)


def shard_rows(group: ParallelGroup, *widths: int) -> list[range]:
    """Return this rank's rows of several parts that are stored in one weight."""
    rows, first = [], 0
    for width in widths:
        share = group.shard_range(width, "width")
        rows.append(range(first + share.start, first + share.stop))
        first += width
    return rows


def replicated_rows(group: ParallelGroup, width: int, copies: int) -> list[range]:
    """Return the rows of a part that `copies` ranks hold alike."""
    share = width * copies // group.world_size
    first = group.rank // copies * share
    return [range(first, first + share)]


class AdaptedLayer:
    """A wrapped layer with an adapter in every slot, and the whole layer's expected outputs."""

    def __init__(
        self, wrapper: BaseLayerWithLoRA, wholes: list[nn.Linear], is_joined: bool
    ) -> None:
        """`is_joined`: the adapters have one A and one B over all of `wholes`."""
        self.wrapper, self.wholes = wrapper, wholes
        widths = [layer.out_features for layer in wholes]
        self.slices = [sum(widths)] if is_joined else widths
        shapes = wrapper.module_shapes("layer", 0)
        self.arena = Arena(len(RANKS), shapes, 1 << 18, torch.float32, "cpu")
        wrapper.create_lora_weights(self.arena, [shape.index for shape in shapes])
        kernels = choose_kernels("cpu", "reference")
        self.punica = PunicaWrapper(torch.device("cpu"), RANK_MAX, kernels)
        wrapper.set_mapping(self.punica)
        self.pairs = [self._adapter(slot) for slot in range(len(RANKS))]
        for slot, pairs in enumerate(self.pairs):
            wrapper.set_lora(slot, *map(list, zip(*pairs, strict=True)))
        ids = torch.tensor([0 if slot < 0 else IDS[slot] for slot in SLOT_OF_ROW])
        self.punica.update_metadata(LoRAMapping(ids, ids), IDS)

    def _adapter(self, slot: int) -> list[tuple[Tensor | None, Tensor | None]]:
        rank = RANKS[slot]
        in_features = self.wholes[0].in_features
        torch.manual_seed(100 + slot)
        pairs: list[tuple[Tensor | None, Tensor | None]] = [
            (torch.randn(rank, in_features), torch.randn(width, rank)) for width in self.slices
        ]
        if slot == 2 and len(pairs) > 1:
            pairs[1] = (None, None)
        return pairs

    def expected(self, x: Tensor) -> list[Tensor]:
        """Return every whole layer's output, with the deltas added."""
        outputs = [layer(x) for layer in self.wholes]
        output = torch.cat(outputs, -1)
        for row, slot in enumerate(SLOT_OF_ROW):
            first = 0
            for width, (a, b) in zip(self.slices, self.pairs[max(slot, 0)], strict=True):
                if slot >= 0 and a is not None and b is not None:
                    output[row, first : first + width] += x[row] @ a.T @ b.T
                first += width
        return list(output.split([layer.out_features for layer in self.wholes], -1))


def inputs(in_features: int = IN) -> Tensor:
    torch.manual_seed(42)
    return torch.randn(len(SLOT_OF_ROW), in_features)


@torch.inference_mode()
def column(group: ParallelGroup, sharded: bool, gathers: bool) -> float:
    layer = whole(20, 1)
    kind = ColumnParallelLinearWithShardedLoRA if sharded else ColumnParallelLinearWithLoRA
    adapted = AdaptedLayer(
        kind(ColumnParallelLinear(layer, group, gathers=gathers)), [layer], False
    )
    found, (expected,) = adapted.wrapper(inputs()), adapted.expected(inputs())
    return relative_error(found if gathers else group.gather_columns(found), expected)


@torch.inference_mode()
def column_pair(group: ParallelGroup, sharded: bool) -> float:
    """Two projections that a checkpoint stores as one, with one adapter tensor over both."""
    layer = whole(20, 1)
    rows = shard_rows(group, 12, 8)
    kind = ColumnParallelLinearWithShardedLoRA if sharded else ColumnParallelLinearWithLoRA
    adapted = AdaptedLayer(kind(ColumnParallelLinear(layer, group, rows)), [layer], False)
    (expected,) = adapted.expected(inputs())
    own = torch.cat([expected[:, part.start : part.stop] for part in rows], -1)
    return relative_error(adapted.wrapper(inputs()), own)


@torch.inference_mode()
def merged(group: ParallelGroup, sharded: bool) -> float:
    """Gate and up of unequal widths, one without a bias."""
    wholes = [whole(20, 1), whole(12, 2, bias=False)]
    rows = [shard_rows(group, layer.out_features) for layer in wholes]
    kind = MergedColumnParallelLinearWithLoRA
    return _packed(
        group,
        (wholes, rows),
        MergedColumnParallelLinear,
        MergedColumnParallelLinearWithShardedLoRA if sharded else kind,
    )


@torch.inference_mode()
def merged_variable(group: ParallelGroup, covers: int) -> float:
    """Three outputs: one adapter tensor each, or one over the first two."""
    wholes = [whole(20, 1), whole(12, 2), whole(4, 3)]
    rows = [shard_rows(group, layer.out_features) for layer in wholes]
    kind = MergedColumnParallelLinearVariableSliceWithLoRA
    if covers == 1:
        return _packed(group, (wholes, rows), MergedColumnParallelLinear, kind)
    adapted, x = _adapted((wholes, rows), group, MergedColumnParallelLinear, kind), inputs()
    torch.manual_seed(7)
    a, b = torch.randn(4, IN), torch.randn(32, 4)
    other_a, other_b = torch.randn(2, IN), torch.randn(4, 2)
    adapted.wrapper.set_lora(0, [a, other_a], [b, other_b])
    adapted.pairs[0] = [(a, b[:20]), (a, b[20:]), (other_a, other_b)]
    return _error(adapted, x, rows)


@torch.inference_mode()
def qkv(group: ParallelGroup, sharded: bool, is_joined: bool, copies: int) -> float:
    """q split by rank; k and v split by rank, or held alike by `copies` ranks."""
    wholes = [whole(16, 1), whole(8, 2), whole(8, 3)]
    rows = [
        shard_rows(group, 16),
        replicated_rows(group, 8, copies),
        replicated_rows(group, 8, copies),
    ]
    kinds: Mapping[tuple[bool, bool], type[BaseLayerWithLoRA]] = {
        (False, False): MergedQKVParallelLinearWithLoRA,
        (False, True): MergedQKVParallelLinearWithShardedLoRA,
        (True, False): QKVParallelLinearWithLoRA,
        (True, True): QKVParallelLinearWithShardedLoRA,
    }
    kind = kinds[is_joined, sharded]
    return _packed(group, (wholes, rows), QKVParallelLinear, kind, is_joined)


def _packed(
    group: ParallelGroup,
    parts: tuple[list[nn.Linear], list[list[range]]],
    packed: type[Any],
    kind: type[BaseLayerWithLoRA],
    is_joined: bool = False,
) -> float:
    return _error(_adapted(parts, group, packed, kind, is_joined), inputs(), parts[1])


def _adapted(
    parts: tuple[list[nn.Linear], list[list[range]]],
    group: ParallelGroup,
    packed: type[Any],
    kind: type[BaseLayerWithLoRA],
    is_joined: bool = False,
) -> AdaptedLayer:
    wholes, rows = parts
    split = [ColumnParallelLinear(layer, group, r) for layer, r in zip(wholes, rows, strict=True)]
    names = () if is_joined else [f"p{index}" for index in range(len(wholes))]
    base = packed.of_layers(split, names)
    assert kind.can_replace_layer(base)
    return AdaptedLayer(kind(base), wholes, is_joined)


def _error(adapted: AdaptedLayer, x: Tensor, rows: list[list[range]]) -> float:
    expected = [
        output[:, part.start : part.stop]
        for output, parts in zip(adapted.expected(x), rows, strict=True)
        for part in parts
    ]
    return relative_error(adapted.wrapper(x), torch.cat(expected, -1))


@torch.inference_mode()
def row(group: ParallelGroup, sharded: bool, splits_input: bool) -> float:
    layer = whole(20, 1)
    base = RowParallelLinear(layer, group, splits_input)
    kind = RowParallelLinearWithShardedLoRA if sharded else RowParallelLinearWithLoRA
    adapted = AdaptedLayer(kind(base), [layer], False)
    x, (expected,) = inputs(), adapted.expected(inputs())
    input_ = x if splits_input else x[:, base.columns.start : base.columns.stop]
    return relative_error(adapted.wrapper(input_), expected)


@torch.inference_mode()
def replicated(group: ParallelGroup) -> float:
    layer = whole(20, 1)
    adapted = AdaptedLayer(ReplicatedLinearWithLoRA(layer), [layer], False)
    (expected,) = adapted.expected(inputs())
    return relative_error(adapted.wrapper(inputs()), expected)


@torch.inference_mode()
def vocabulary(group: ParallelGroup, tokens: int) -> float:
    """Embedding and head, also with an odd vocabulary, which is padded."""
    torch.manual_seed(1)
    embedding, head = nn.Embedding(tokens, IN), nn.Linear(IN, tokens)
    ids = torch.arange(tokens).view(1, -1)
    split = VocabParallelEmbedding(embedding, group)
    errors = [relative_error(split(ids), embedding(ids))]
    logits = ParallelHead(head, group)(inputs())
    assert logits.shape == (len(SLOT_OF_ROW), tokens)
    return max(*errors, relative_error(logits, head(inputs())))


@torch.inference_mode()
def group_of_one(group: ParallelGroup, sharded: bool) -> float:
    """A group of one: the same classes, no collective, one column per slice."""
    return max(column(SINGLE, sharded, True), row(SINGLE, sharded, False), merged(SINGLE, sharded))


def uneven_rank(group: ParallelGroup) -> str:
    layer = whole(20, 1)
    wrapper = ColumnParallelLinearWithShardedLoRA(ColumnParallelLinear(layer, group))
    adapted = AdaptedLayer(wrapper, [layer], False)
    before = adapted.arena.directory.host_offsets.clone()
    try:
        wrapper.set_lora(0, torch.ones(3, IN), torch.ones(20, 3))
    except ValueError as error:
        assert torch.equal(before, adapted.arena.directory.host_offsets)
        return str(error)
    return "no error"


def uneven_layers(group: ParallelGroup) -> list[str]:
    """Return the errors of layers that two ranks can't share evenly."""
    odd_row = RowParallelLinear(whole(21, 1), group)
    return [
        _error_of(lambda: ColumnParallelLinear(whole(21, 1), group)),
        _error_of(lambda: RowParallelLinear(whole(20, 1, in_features=21), group)),
        _error_of(lambda: RowParallelLinearWithShardedLoRA(odd_row).slice_shapes),
    ]


def _error_of(build: Callable[[], object]) -> str:
    try:
        build()
    except ValueError as error:
        return str(error)
    return "no error"


def exchange(group: ParallelGroup) -> list[Any]:
    """Return what the group transfers: bytes of unequal length, numbers, tensors of two dtypes."""
    parts = group.gather_bytes(b"x" * 3 * group.rank)
    empty_parts = group.gather_bytes(b"")
    data = group.broadcast_bytes(b"from 0" if group.is_leader else b"ignored")
    empty = group.broadcast_bytes(b"")
    numbers = group.broadcast_numbers([group.rank + 5, -1])
    total = group.all_reduce(torch.full((2,), group.rank + 1.0, dtype=torch.bfloat16))
    columns = group.gather_columns(torch.tensor([[group.rank], [group.rank + 10]]))
    return [
        *([len(part) for part in parts], [len(part) for part in empty_parts]),
        *(data.decode(), empty.decode(), numbers, total.tolist(), columns.tolist()),
    ]
