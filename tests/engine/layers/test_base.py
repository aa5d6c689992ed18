"""The choice of wrappers, and one layer's weights by themselves."""

import sys
from collections.abc import Callable
from types import FrameType

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import (
    BaseLayerWithLoRA,
    ClassificationHeadWithLoRA,
    LogitsProcessorWithLoRA,
    MergedColumnParallelLinear,
    MergedColumnParallelLinearVariableSliceWithLoRA,
    MergedColumnParallelLinearWithLoRA,
    MergedQKVParallelLinearWithLoRA,
    QKVParallelLinear,
    QKVParallelLinearWithLoRA,
    ReplicatedLinearWithLoRA,
    Role,
    SliceShape,
    VocabParallelEmbeddingWithLoRA,
    wrapper_of,
)
from loradock.engine.layers.packed import PackedLinear
from loradock.engine.layout import ModuleShape
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena

SLOTS = 3


class LinearSubclass(nn.Linear):
    """A linear layer with its own forward, as quantised base layers are."""


class PackedPair(ReplicatedLinearWithLoRA):
    """Two slices, for what the base class does for packed layers."""

    @property
    def slice_shapes(self) -> tuple[SliceShape, ...]:
        return (SliceShape(4, 2), SliceShape(4, 5))


def packed(kind: type[PackedLinear], *widths: int, named: bool = True) -> PackedLinear:
    names = [f"c{index}" for index in range(len(widths))] if named else ()
    return kind(torch.ones(sum(widths), 4), None, widths, names)


class ScaledEmbedding(nn.Embedding):
    """An embedding that scales its result, as Gemma's does."""

    embed_scale = 3.0

    def forward(self, token_ids: Tensor) -> Tensor:
        return super().forward(token_ids) * self.embed_scale


class OtherEmbedding(nn.Embedding):
    """An embedding that looks up something other than its input."""

    def forward(self, mask: Tensor) -> Tensor:
        return super().forward(mask.cumsum(-1))


Linear = nn.Linear
HUGE = nn.Linear(1, 1 << 20, device="meta")


@pytest.mark.parametrize(
    ("layer", "role", "wrapper"),
    [
        (Linear(2, 3), Role.BODY, ReplicatedLinearWithLoRA),
        (LinearSubclass(2, 3), Role.BODY, ReplicatedLinearWithLoRA),
        (Conv1D(3, 2), Role.BODY, ReplicatedLinearWithLoRA),
        (NonDynamicallyQuantizableLinear(2, 3), Role.BODY, None),
        (nn.Embedding(2, 3), Role.BODY, VocabParallelEmbeddingWithLoRA),
        (ScaledEmbedding(2, 3), Role.BODY, VocabParallelEmbeddingWithLoRA),
        (OtherEmbedding(2, 3), Role.BODY, None),
        (nn.Embedding(2, 3, max_norm=1.0), Role.BODY, None),
        (nn.Conv1d(2, 3, 1), Role.BODY, None),
        (nn.LayerNorm(2), Role.BODY, None),
        (ReplicatedLinearWithLoRA(Linear(2, 3)), Role.BODY, None),
        (packed(QKVParallelLinear, 4, 2, 2), Role.BODY, MergedQKVParallelLinearWithLoRA),
        (
            packed(QKVParallelLinear, 4, 2, 2, named=False),
            Role.BODY,
            QKVParallelLinearWithLoRA,
        ),
        (packed(MergedColumnParallelLinear, 4, 4), Role.BODY, MergedColumnParallelLinearWithLoRA),
        (
            packed(MergedColumnParallelLinear, 4, 1, 2),
            Role.BODY,
            MergedColumnParallelLinearVariableSliceWithLoRA,
        ),
        (Linear(2, 3), Role.HEAD, LogitsProcessorWithLoRA),
        (HUGE, Role.HEAD, LogitsProcessorWithLoRA),
        (HUGE, Role.BODY, ReplicatedLinearWithLoRA),
        (nn.Identity(), Role.HEAD, None),
        (Linear(2, 3), Role.CLASSIFIER, ClassificationHeadWithLoRA),
        (nn.Sequential(Linear(2, 3)), Role.CLASSIFIER, None),
    ],
)
def test_the_table_chooses_the_wrapper(layer: nn.Module, role: Role, wrapper: type | None) -> None:
    assert wrapper_of(layer, role) is wrapper


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.can_replace_layer(nn.Linear(1, 1)),
        lambda layer: layer.slice_shapes,
        lambda layer: layer.slice_lora_a([None]),
        lambda layer: layer.slice_lora_b([None]),
        lambda layer: layer.create_lora_weights(None, [0]),
        lambda layer: layer(torch.ones(1)),
    ],
)
def test_a_missing_override_raises(use: Callable[[BaseLayerWithLoRA], object]) -> None:
    with pytest.raises(NotImplementedError):
        use(BaseLayerWithLoRA(nn.Linear(1, 1)))


@pytest.mark.parametrize(
    "use",
    [
        lambda layer: layer.set_lora(0, torch.ones(1, 1), torch.ones(1, 1)),
        lambda layer: layer.reset_lora(0),
    ],
)
def test_weights_before_create_lora_weights_raise(
    use: Callable[[BaseLayerWithLoRA], object],
) -> None:
    with pytest.raises(RuntimeError, match="create_lora_weights"):
        use(ReplicatedLinearWithLoRA(nn.Linear(1, 1)))


def arena_for(*shapes: tuple[int, int]) -> Arena:
    modules = [ModuleShape(f"m{at}", *shape, at) for at, shape in enumerate(shapes)]
    arena = Arena(SLOTS, modules, 1 << 16, torch.float32, "cpu")
    arena.data.fill_(torch.nan)
    return arena


@pytest.fixture
def punica() -> PunicaWrapper:
    return PunicaWrapper(torch.device("cpu"), 8, choose_kernels("cpu"))


def bound(layer: BaseLayerWithLoRA, arena: Arena, columns: list[int], punica: PunicaWrapper):
    layer.create_lora_weights(arena, columns)
    layer.set_mapping(punica)
    return layer


@torch.no_grad()
def test_set_and_reset_change_one_layer_and_one_slot(punica: PunicaWrapper) -> None:
    torch.manual_seed(1)
    arena = arena_for((4, 3), (4, 3))
    layers = [
        bound(ReplicatedLinearWithLoRA(nn.Linear(4, 3)), arena, [column], punica)
        for column in range(2)
    ]
    x = torch.randn(2, 2, 4)
    base = [layer.base_layer(x) for layer in layers]
    assert torch.equal(layers[0](x), base[0])
    a, b = torch.randn(5, 4), torch.randn(3, 5)
    layers[0].set_lora(SLOTS - 1, a, b)
    # The last slot for two tokens of each row, an empty slot and the base for the others.
    punica.update_metadata(LoRAMapping([9, 0, 7, 9], [9, 9]), [7, None, 9])
    found, delta = layers[0](x).view(4, 3), x.view(4, 4) @ a.T @ b.T
    expected = base[0].view(4, 3).clone()
    expected[[0, 3]] += delta[[0, 3]]
    assert torch.allclose(found, expected, atol=1e-5)
    assert torch.equal(found[[1, 2]], base[0].view(4, 3)[[1, 2]])
    assert torch.equal(layers[1](x), base[1])
    layers[0].reset_lora(SLOTS - 1)
    assert torch.equal(layers[0](x), base[0])
    arena.check()


@torch.no_grad()
def test_a_plan_is_kept_until_something_that_it_depends_on_changes(punica: PunicaWrapper) -> None:
    layer = bound(ReplicatedLinearWithLoRA(nn.Linear(4, 3)), arena_for((4, 3)), [0], punica)
    arena = layer._bound()
    layer.set_lora(0, torch.randn(2, 4), torch.randn(3, 2))
    punica.update_metadata(LoRAMapping([5, 0], [5, 0]), [5])

    def plan(rows: int = 2, dtype: torch.dtype = torch.float32) -> object:
        x = torch.randn(rows, 4, dtype=dtype)
        return layer.plan(torch.zeros(rows, 3, dtype=dtype), x, punica, arena)

    first, half = plan(), plan(dtype=torch.bfloat16)
    assert first is not half
    assert (plan(), plan(dtype=torch.bfloat16)) == (first, half)
    with punica.only_row(0):
        assert plan() is not first
    assert plan() is first
    punica.update_metadata(LoRAMapping([5, 0], [5, 0]), [5])
    assert plan() is first
    punica.update_metadata(LoRAMapping([0, 5], [0, 5]), [5])
    second = plan()
    assert second is not first
    layer.reset_lora(0)
    assert plan() is not second


@torch.no_grad()
def test_a_planned_step_makes_few_python_calls(punica: PunicaWrapper) -> None:
    layer = bound(ReplicatedLinearWithLoRA(nn.Linear(4, 3)), arena_for((4, 3)), [0], punica)
    layer.set_lora(0, torch.randn(2, 4), torch.randn(3, 2))
    punica.update_metadata(LoRAMapping([5], [5]), [5])
    x, calls = torch.randn(1, 4), list[str]()
    layer(x)

    def count(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call":
            calls.append(frame.f_code.co_name)

    sys.setprofile(count)
    try:
        layer.forward(x)
    finally:
        sys.setprofile(None)
    assert len(calls) <= 12, calls


@torch.no_grad()
def test_a_second_set_replaces_the_first(punica: PunicaWrapper) -> None:
    torch.manual_seed(2)
    arena = arena_for((4, 3))
    layer = bound(ReplicatedLinearWithLoRA(nn.Linear(4, 3)), arena, [0], punica)
    free = arena.free_bytes
    layer.set_lora(0, torch.randn(8, 4), torch.randn(3, 8))
    a, b = torch.randn(1, 4), torch.randn(3, 1)
    layer.set_lora(0, a, b)
    punica.update_metadata(LoRAMapping([5], [5]), [5])
    x = torch.randn(1, 4)
    assert torch.allclose(layer(x), layer.base_layer(x) + x @ a.T @ b.T, atol=1e-5)
    layer.reset_lora(0)
    assert arena.free_bytes == free


@torch.no_grad()
def test_a_packed_layer_may_lack_a_slice(punica: PunicaWrapper) -> None:
    torch.manual_seed(3)
    layer = bound(PackedPair(nn.Linear(4, 7)), arena_for((4, 2), (4, 5)), [0, 1], punica)
    a, b = torch.randn(2, 4), torch.randn(5, 2)
    layer.set_lora(1, [None, a], [None, b])
    punica.update_metadata(LoRAMapping([6], [6]), [None, 6])
    x = torch.randn(1, 4)
    expected = layer.base_layer(x)
    expected[:, 2:] += x @ a.T @ b.T
    assert torch.allclose(layer(x), expected, atol=1e-5)
    # A slice that the next adapter lacks must not keep this adapter's weights.
    layer.set_lora(1, [a[:1], None], [b[:2, :1], None])
    expected = layer.base_layer(x)
    expected[:, :2] += x @ a[:1].T @ b[:2, :1].T
    assert torch.allclose(layer(x), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("lora_a", "lora_b"),
    [
        ([torch.ones(1, 4), None], [None, None]),
        ([None, torch.ones(1, 4)], [torch.ones(2, 1), None]),
        ([torch.ones(1, 4)], [torch.ones(2, 1)]),
        (torch.ones(1, 4), torch.ones(2, 1)),
        # Smaller or larger than the slice, in A, in B, in rank; never padded.
        ([torch.ones(1, 4)] * 2, [torch.ones(2, 1), torch.ones(4, 1)]),
        ([torch.ones(1, 4), torch.ones(1, 3)], [torch.ones(2, 1), torch.ones(5, 1)]),
        ([torch.ones(1, 4), torch.ones(2, 4)], [torch.ones(2, 1), torch.ones(5, 1)]),
        ([torch.ones(1, 4), torch.ones(0, 4)], [torch.ones(2, 1), torch.ones(5, 0)]),
    ],
)
def test_unpaired_or_unfitting_tensors_are_refused_before_any_change(
    lora_a: object, lora_b: object, punica: PunicaWrapper
) -> None:
    arena = arena_for((4, 2), (4, 5))
    layer = bound(PackedPair(nn.Linear(4, 7)), arena, [0, 1], punica)
    layer.set_lora(0, [torch.full((3, 4), 7.0), None], [torch.full((2, 3), 7.0), None])
    with pytest.raises(ValueError):
        layer.set_lora(0, lora_a, lora_b)
    kept = arena.weights(0, 0)
    assert kept is not None
    assert [matrix.shape for matrix in kept] == [(3, 4), (2, 3)]
    assert all((matrix == 7).all() for matrix in kept)
    assert arena.weights(0, 1) is None


def test_every_slice_needs_one_column() -> None:
    """Or one more for the whole layer and one for its scale and shift."""
    with pytest.raises(ValueError, match="2 columns for a layer of 1"):
        ReplicatedLinearWithLoRA(nn.Linear(4, 3)).create_lora_weights(arena_for((4, 3)), [0, 1])


WIDE = [(4, 3), (4, 1), (4, 2)]


@torch.no_grad()
def test_one_pair_may_cover_several_slices(punica: PunicaWrapper) -> None:
    torch.manual_seed(4)
    base = packed(MergedColumnParallelLinear, 3, 1, 2)
    layer = MergedColumnParallelLinearVariableSliceWithLoRA(base)
    bound(layer, arena_for(*WIDE), [0, 1, 2], punica)
    punica.update_metadata(LoRAMapping([6, 0], [6, 0]), [6])
    x = torch.randn(2, 4)
    pairs = [(torch.randn(2, 4), torch.randn(rows, 2)) for rows in (3, 1, 2)]
    joined = (pairs[0][0], torch.cat([b for _, b in pairs]))
    for given in (pairs, [joined], [(pairs[0][0], joined[1][:4]), pairs[2]]):
        layer.set_lora(0, [a for a, _ in given], [b for _, b in given])
        expected = base(x)
        expected[0] += torch.cat([b @ (a @ x[0]) for a, b in given])
        assert torch.allclose(layer(x), expected, atol=1e-5)
    layer.set_lora(0, *joined)
    before = layer(x)
    for wrong in ([2, 4], [5], [3, 1, 1, 1], [3, 1]):
        with pytest.raises(ValueError):
            layer.set_lora(0, [torch.ones(1, 4)] * len(wrong), [torch.ones(w, 1) for w in wrong])
    with pytest.raises(ValueError, match="pass both"):
        layer.set_lora(0, [None], [torch.ones(6, 1)])
    assert torch.equal(layer(x), before)


@torch.no_grad()
def test_three_projections_under_one_name_are_one_slice(punica: PunicaWrapper) -> None:
    torch.manual_seed(5)
    base = packed(QKVParallelLinear, 4, 2, 2, named=False)
    layer = bound(QKVParallelLinearWithLoRA(base), arena_for((4, 8)), [0], punica)
    assert layer.slice_shapes == (SliceShape(4, 8),)
    a, b, x = torch.randn(3, 4), torch.randn(8, 3), torch.randn(2, 4)
    layer.set_lora(2, a, b)
    punica.update_metadata(LoRAMapping([9, 0], [9, 0]), [None, None, 9])
    expected = base(x)
    expected[0] += b @ (a @ x[0])
    assert torch.allclose(layer(x), expected, atol=1e-5)


def arena_of(layer: BaseLayerWithLoRA, dtype: torch.dtype = torch.float32) -> Arena:
    arena = Arena(SLOTS, layer.module_shapes("a.head", 0), 1 << 16, dtype, "cpu")
    arena.data.fill_(torch.nan)
    return arena


@pytest.mark.parametrize("kind", [nn.Embedding, ScaledEmbedding])
@torch.no_grad()
def test_an_embedding_looks_up_its_a(kind: type[nn.Embedding], punica: PunicaWrapper) -> None:
    torch.manual_seed(6)
    base = kind(11, 6)
    layer = VocabParallelEmbeddingWithLoRA(base)
    bound(layer, arena_of(layer), [0], punica)
    # As in PEFT: A [rank, vocabulary], B [hidden, rank].
    a, b = torch.randn(5, 11), torch.randn(6, 5)
    layer.set_lora(1, a, b)
    tokens = torch.tensor([[3, 10, 0], [3, 3, 7]])
    punica.update_metadata(LoRAMapping([0, 9, 9, 8, 9, 0], [9, 9]), [8, 9])
    expected = base(tokens)
    scale = 3.0 if kind is ScaledEmbedding else 1.0
    for row, column in [(0, 1), (0, 2), (1, 1)]:
        expected[row, column] += scale * (b @ a[:, tokens[row, column]])
    assert torch.allclose(layer(tokens), expected, atol=1e-5)
    assert layer.weight is base.weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@torch.no_grad()
def test_a_saved_head_replaces_the_base_head(
    bias: bool, dtype: torch.dtype, punica: PunicaWrapper
) -> None:
    """Results are equal bit by bit, for the rows of its adapter and any number of labels."""
    torch.manual_seed(7)
    base, saved = (nn.Linear(16, 37, bias=bias, dtype=dtype) for _ in range(2))
    layer = ClassificationHeadWithLoRA(base)
    arena = arena_of(layer, dtype)
    bound(layer, arena, [0], punica)
    saved_bias = saved.bias if bias else torch.zeros(37, dtype=dtype)
    layer.set_lora(1, saved.weight, saved_bias[:, None])
    # Slot 0 holds an adapter without a head; the sampled rows are the second, then the tokens.
    punica.update_metadata(LoRAMapping([8, 8, 9, 9], [8, 9]), [8, 9, None])
    for shape, own in [((2, 16), [1]), ((2, 2, 16), [2, 3])]:
        x = torch.randn(shape, dtype=dtype)
        rows, found = x.view(-1, 16), layer(x).view(-1, 37)
        others = [row for row in range(len(rows)) if row not in own]
        assert torch.equal(found[own], saved(rows[own]))
        assert torch.equal(found[others], base(x).view(-1, 37)[others])
    layer.reset_lora(1)
    assert torch.equal(layer(x), base(x))
    arena.check()


@torch.no_grad()
def test_a_head_serves_sampled_rows_and_all_tokens(punica: PunicaWrapper) -> None:
    torch.manual_seed(8)
    base = nn.Linear(8, 13)
    layer = LogitsProcessorWithLoRA(base)
    bound(layer, arena_of(layer), [0], punica)
    a, b = torch.randn(2, 8), torch.randn(13, 2)
    layer.set_lora(0, a, b)
    punica.update_metadata(LoRAMapping([0, 7, 7, 0, 0, 0], [7, 0]), [7])
    for x, own in [(torch.randn(2, 1, 8), [0]), (torch.randn(2, 3, 8), [1, 2])]:
        expected = base(x).view(-1, 13)
        expected[own] += x.view(-1, 8)[own] @ a.T @ b.T
        assert torch.allclose(layer(x).view(-1, 13), expected, atol=1e-5)
