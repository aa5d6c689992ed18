"""Wrappers of experts, against the module itself with the adapters merged into its weights."""

import pytest
import torch
from torch import Tensor, nn

from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import FusedMoE3DWithLoRA, FusedMoEWithLoRA, wrapper_of
from loradock.engine.layers.expert_layout import layout_of
from loradock.engine.layers.experts import ExpertsWithLoRA
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from tests.support.kernels.kernel_cases import NAMES, error_of
from tests.support.models.expert_examples import (
    EXPERTS,
    IDENTITIES,
    IDENTITY_MODULES,
    MODULES,
    TOP_K,
    Delta,
    add_to_weights,
    make_experts,
    projections_of,
)

SLOTS = 3
IDS = (11, 12, 13)
ALL = MODULES | IDENTITY_MODULES
GATED = [name for name in ALL if name != "nemotron_h"]
WRAPPED = [(name, FusedMoEWithLoRA) for name in ALL] + [
    (name, FusedMoE3DWithLoRA) for name in GATED
]


class Bench:
    """One wrapped module in an arena of NaN, and each slot's deltas."""

    def __init__(self, name: str, wrapper: type[ExpertsWithLoRA], kernels: str = "auto") -> None:
        torch.manual_seed(3)
        self.module = make_experts(name)
        self.layer = wrapper(self.module)
        self.shapes = self.layer.module_shapes("mlp.experts", 0)
        arena = Arena(SLOTS, self.shapes, 1 << 20, torch.float32, "cpu")
        arena.data.fill_(torch.nan)
        self.kernels = CountedKernels(kernels)
        self.punica = PunicaWrapper(torch.device("cpu"), 8, self.kernels.counted)
        self.layer.create_lora_weights(arena, [shape.index for shape in self.shapes])
        self.layer.set_mapping(self.punica)
        self.deltas: dict[int, dict[str, Delta]] = {slot: {} for slot in range(SLOTS)}

    def write(self, slot: int, rank: int, *only: str, is_fused: bool = True) -> None:
        """Write random weights for all projections, or for those in `only`."""
        shapes = {shape.name.rpartition(".")[2]: shape for shape in self.shapes}
        parts: list[Delta | None] = []
        for name in projections_of(shapes, is_fused):
            shape = shapes[name]
            a = torch.randn(shape.a_shape(rank)) / shape.in_features**0.5
            b = torch.randn(shape.b_shape(rank)) / rank**0.5
            parts.append(Delta(a, b) if not only or name in only else None)
            if parts[-1] is not None:
                self.deltas[slot][name] = parts[-1]
        self.layer.set_lora(
            slot, [part and part.a for part in parts], [part and part.b for part in parts]
        )

    def check(self, slots: list[int], top_k_index: Tensor) -> None:
        x = torch.randn(len(slots), self.layer.layout.in_features)
        weights = torch.rand(len(slots), TOP_K)
        ids = [0 if slot < 0 else IDS[slot] for slot in slots]
        self.punica.update_metadata(LoRAMapping(ids, ids), IDS)
        found = self.layer(x, top_k_index, weights)
        wanted = torch.zeros_like(found)
        for slot in set(slots):
            rows = [row for row, own in enumerate(slots) if own == slot]
            module = add_to_weights(self.module, self.deltas.get(slot, {}))
            wanted[rows] = module(x[rows], top_k_index[rows], weights[rows])
        assert error_of(found, wanted.double()) < 1e-5


class CountedKernels:
    """Kernels that count the calls of `experts`."""

    def __init__(self, name: str) -> None:
        self.calls = 0
        kernels = choose_kernels("cpu", name)

        def experts(*arguments: object) -> None:
            self.calls += 1
            kernels.experts(*arguments)

        self.counted = kernels._replace(experts=experts)


def routes(tokens: int) -> Tensor:
    return torch.stack([torch.randperm(EXPERTS)[:TOP_K] for _ in range(tokens)])


@pytest.mark.parametrize("kernels", NAMES)
@pytest.mark.parametrize(("name", "wrapper"), WRAPPED)
def test_slots_and_base_rows_mix_in_one_batch(
    name: str, wrapper: type[ExpertsWithLoRA], kernels: str
) -> None:
    bench = Bench(name, wrapper, kernels)
    for slot, rank in enumerate((8, 1, 3)):
        bench.write(slot, rank, is_fused=slot != 1)
    slots = [-1, 0, 2, 1, 0, -1, 2, 2, 1, 0, 1]
    bench.check(slots, routes(len(slots)))
    bench.check([2], routes(1))


@pytest.mark.parametrize(("name", "wrapper"), WRAPPED)
def test_an_adapter_may_adapt_one_side_only(name: str, wrapper: type[ExpertsWithLoRA]) -> None:
    bench = Bench(name, wrapper)
    names = [shape.name.rpartition(".")[2] for shape in bench.shapes]
    bench.write(0, 4, names[0])
    bench.write(1, 4, "down_proj")
    bench.check([0, 1, -1, 0, 1, 2], routes(6))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("expert", [0, EXPERTS - 1])
def test_an_expert_may_be_chosen_by_no_row_or_every_row(name: str, expert: int) -> None:
    bench = Bench(name, FusedMoEWithLoRA)
    bench.write(0, 4)
    bench.write(1, 2)
    slots = [0, 1, -1, 0, 1]
    others = [e for e in range(EXPERTS) if e != expert]
    bench.check(slots, torch.tensor([[expert, others[0]]] * len(slots)))
    bench.check(slots, torch.tensor([others[:TOP_K]] * len(slots)))


@pytest.mark.parametrize("wrapper", [FusedMoEWithLoRA, FusedMoE3DWithLoRA])
@pytest.mark.parametrize("kernels", NAMES)
def test_experts_that_return_their_input_have_no_delta(
    wrapper: type[ExpertsWithLoRA], kernels: str
) -> None:
    bench = Bench("longcat_flash", wrapper, kernels)
    for slot in range(SLOTS):
        bench.write(slot, slot + 1, is_fused=slot != 1)
    slots = [-1, 0, 1, 2, 2, 1, 0]
    identities = torch.arange(EXPERTS, EXPERTS + IDENTITIES)
    bench.check(slots, torch.stack([identities[torch.randperm(IDENTITIES)[:2]] for _ in slots]))
    mixed = torch.stack([torch.randperm(EXPERTS + IDENTITIES)[:TOP_K] for _ in slots])
    bench.check(slots, mixed)
    # The directory has no matrix for them.
    assert all(shape.kept_experts == range(EXPERTS) for shape in bench.shapes)


def test_a_batch_without_expert_weights_calls_no_kernel() -> None:
    bench = Bench("mixtral", FusedMoE3DWithLoRA)
    bench.write(0, 4)
    # Slot 1 holds an adapter without weights for these experts.
    bench.check([-1, 1, 1], routes(3))
    assert bench.kernels.calls == 0
    bench.check([-1, 0, 1], routes(3))
    assert bench.kernels.calls == 2
    bench.layer.reset_lora(0)
    bench.deltas[0].clear()
    bench.check([-1, 0, 1], routes(3))
    assert bench.kernels.calls == 2


def test_a_batch_with_other_rows_than_the_mapping_raises() -> None:
    bench = Bench("mixtral", FusedMoE3DWithLoRA)
    bench.write(0, 4)
    bench.punica.update_metadata(LoRAMapping([11, 11], [11]), IDS)
    with pytest.raises(ValueError, match="3 rows, but the mapping has 2"):
        bench.layer(torch.randn(3, 32), routes(3), torch.rand(3, TOP_K))


@pytest.mark.parametrize(
    ("name", "wrapper", "columns"),
    [
        ("mixtral", FusedMoE3DWithLoRA, ["gate_up_proj", "gate_proj", "up_proj", "down_proj"]),
        ("mixtral", FusedMoEWithLoRA, ["gate_proj", "up_proj", "down_proj"]),
        ("nemotron_h", FusedMoEWithLoRA, ["up_proj", "down_proj"]),
    ],
)
def test_columns_are_named_as_the_projections(
    name: str, wrapper: type[ExpertsWithLoRA], columns: list[str]
) -> None:
    shapes = Bench(name, wrapper).shapes
    assert [shape.name for shape in shapes] == [f"mlp.experts.{column}" for column in columns]
    assert [shape.index for shape in shapes] == list(range(len(columns)))
    assert all(shape.experts == EXPERTS for shape in shapes)


def test_experts_without_a_gate_have_one_format() -> None:
    assert wrapper_of(make_experts("mixtral")) is FusedMoE3DWithLoRA
    assert wrapper_of(make_experts("nemotron_h")) is FusedMoEWithLoRA


class Scaled(nn.Module):
    """Resembles an experts module, and has an unknown parameter."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.scales = nn.Parameter(torch.ones(EXPERTS))
        self.has_gate, self.has_bias = True, False
        self.is_transposed, self.is_concatenated = False, True
        self._apply_gate = experts._apply_gate

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states


class Other(nn.Module):
    """Has the parameters of experts, and computes something else."""

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.gate_up_proj, self.down_proj = experts.gate_up_proj, experts.down_proj
        self.act_fn = experts.act_fn

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return hidden_states * top_k_weights.sum(1, keepdim=True)


def test_unsupported_modules_are_not_wrapped() -> None:
    unmarked = make_experts("longcat_flash")
    assert layout_of(unmarked) is not None
    assert layout_of(Other(unmarked)) is None
    unmarked.act_fn = nn.Tanh()
    assert layout_of(unmarked) is not None
    unmarked.down_proj = nn.Parameter(unmarked.down_proj[:, :-1])
    assert layout_of(unmarked) is None
    experts = make_experts("mixtral")
    assert layout_of(Scaled(experts)) is None
    assert layout_of(nn.Linear(2, 2)) is None
    odd = make_experts("mixtral")
    odd.down_proj = nn.Parameter(odd.down_proj[:-1])
    assert layout_of(odd) is None
    del odd.has_gate
    assert wrapper_of(odd) is None
    with pytest.raises(TypeError, match="not a supported experts module"):
        FusedMoEWithLoRA(odd)
