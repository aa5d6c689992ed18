"""Compiled kernels: graph replay, a side stream, and equal bits; skipped without a device.

The cases that all implementations share run compiled too: `make gpu` sets LORADOCK_TEST_COMPILED
and runs their files.
"""

from collections.abc import Callable
from random import Random

import pytest
import torch

from loradock.engine.kernels import choose_kernels
from loradock.engine.layout import ModuleKind
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.punica.side_stream import SideStream
from loradock.engine.punica.wrapper import ShrinkExpand
from loradock.engine.serving.decoding import CudaCapture, GraphKey, GraphRunner
from tests.support.kernels.kernel_cases import (
    ERRORS_MAX,
    Case,
    Shape,
    error_of,
    expected_output,
    layer_on,
    make_case,
)

SLOTS = 12
SHAPE = Shape(256, (192, 64, 64), SLOTS, (1, 8, 13, 64), 0.2)
DTYPE = torch.bfloat16

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]


def wrapper(**options) -> PunicaWrapper:
    kernels = choose_kernels("cuda", "triton")
    return PunicaWrapper(torch.device("cuda"), 64, kernels, **options)


def set_mapping(punica: PunicaWrapper, rows: list[int]) -> None:
    ids = [slot + 1 for slot in rows]
    punica.update_metadata(LoRAMapping(ids, ids), list(range(1, SLOTS + 1)))


class CapturedStep:
    """Runs `step(*inputs)` by graph: inputs are copied to the memory of the first ones."""

    def __init__(self, step: Callable[..., torch.Tensor], punica: PunicaWrapper) -> None:
        self._step = step
        self._steps = GraphRunner(punica, CudaCapture(torch.device("cuda")))
        self._inputs: tuple[torch.Tensor, ...] = ()

    @property
    def keys(self) -> tuple[GraphKey, ...]:
        return self._steps.keys

    def __call__(self, *inputs: torch.Tensor) -> torch.Tensor:
        if not self._inputs:
            self._inputs = tuple(tensor.clone() for tensor in inputs)
        for static, tensor in zip(self._inputs, inputs, strict=True):
            static.copy_(tensor)
        return self._steps.run(lambda: self._step(*self._inputs), None)


def batches(tokens: int, count: int) -> list[list[int]]:
    """Return mappings of equal length: one adapter, several, all, with and without base rows."""
    random = Random(tokens)
    mixed = [[random.randint(-1, SLOTS - 1) for _ in range(tokens)] for _ in range(count)]
    alone = [[SLOTS - 1] * tokens, [0] * (tokens - 1) + [-1]]
    every = [[row % SLOTS for row in range(tokens)]]
    return alone + mixed + every + alone[::-1]


def is_right(found: torch.Tensor, case: Case) -> bool:
    return error_of(found.cpu(), expected_output(case)) <= ERRORS_MAX[DTYPE]


@pytest.mark.parametrize("specialize_active", [False, True])
@pytest.mark.parametrize("tokens", [2, 24, 700])
def test_a_replayed_graph_is_right_for_every_batch(tokens: int, specialize_active: bool) -> None:
    punica = wrapper(specialize_active=specialize_active)
    base = make_case(SHAPE, [0] * tokens, DTYPE, seed=tokens)
    layer = layer_on(base.slices, "cuda")

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        result = y.clone()
        punica.add_lora_linear(result, x, layer)
        return result

    captured = CapturedStep(step, punica)
    for rows in batches(tokens, 8):
        case = base._replace(rows=rows)
        set_mapping(punica, rows)
        found = captured(case.x.cuda(), case.y.cuda())
        assert is_right(found, case), rows
        assert torch.equal(found[case.base_rows].cpu(), case.y[case.base_rows])
    launching = [key for key in captured.keys if key.launches.tokens is not None]
    assert len(launching) == 1 or specialize_active


def test_a_replayed_graph_reads_replaced_weights() -> None:
    punica = wrapper()
    rows = [0, 1, 2, -1, 2, 5, 11, 11]
    old, new = (make_case(SHAPE._replace(absent=0.5), rows, DTYPE, seed=seed) for seed in (1, 2))
    elements = max(len(case.slices.directory.data) for case in (old, new))
    layer = layer_on(old.slices, "cuda")
    directory = layer.directory
    data = torch.full((elements,), torch.nan, dtype=DTYPE, device="cuda")
    directory.data = data
    captured = CapturedStep(lambda x, y: add(punica, layer, x, y), punica)
    for case in (old, new, old):
        held = case.slices.directory
        data[: len(held.data)] = held.data.cuda()
        directory.offsets.copy_(held.offsets)
        directory.ranks.copy_(held.ranks)
        set_mapping(punica, rows)
        assert is_right(captured(case.x.cuda(), case.y.cuda()), case)


def add(punica: PunicaWrapper, layer, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    result = y.clone()
    punica.add_lora_linear(result, x, layer)
    return result


@pytest.mark.parametrize("tokens", [3, 64, 700])
def test_a_batch_has_the_same_bits_on_every_run(tokens: int) -> None:
    punica = wrapper()
    rows = batches(tokens, 1)[2]
    case = make_case(SHAPE, rows, DTYPE, seed=9)
    layer = layer_on(case.slices, "cuda")
    set_mapping(punica, rows)
    first = add(punica, layer, case.x.cuda(), case.y.cuda())
    for _ in range(20):
        assert torch.equal(add(punica, layer, case.x.cuda(), case.y.cuda()), first)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one CUDA device")
def test_kernels_run_on_the_device_of_their_operands() -> None:
    second, rows = "cuda:1", batches(64, 1)[2]
    punica = PunicaWrapper(torch.device(second), 64, choose_kernels("cuda", "triton"))
    case = make_case(SHAPE, rows, DTYPE, seed=11)
    set_mapping(punica, rows)
    layer = layer_on(case.slices, second)
    found = add(punica, layer, case.x.to(second), case.y.to(second))
    assert torch.cuda.current_device() == 0
    assert is_right(found, case)


@pytest.mark.parametrize("is_captured", [False, True])
def test_a_delta_computed_on_a_side_stream_is_added_completely(is_captured: bool) -> None:
    punica = wrapper(concurrent=SideStream(torch.device("cuda")))
    rows = batches(64, 1)[2]
    case = make_case(SHAPE, rows, DTYPE, seed=10)
    layer = layer_on(case.slices, "cuda")
    set_mapping(punica, rows)

    def step(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return punica.with_lora_linear(y.clone, x, layer)

    run = CapturedStep(step, punica) if is_captured else step
    for _ in range(20):
        assert is_right(run(case.x.cuda(), case.y.cuda()), case)


def test_steps_are_captured_again_after_all_graphs_were_dropped() -> None:
    punica = wrapper()
    steps = GraphRunner(punica, CudaCapture(torch.device("cuda")))
    x = torch.ones(1 << 20, device="cuda")
    kept = []
    for number in range(4):
        # The result of the last graph is still referenced, so its memory outlives the graph.
        kept.append(steps.run(lambda number=number: x * 2 + number, number % 2))
        assert kept[-1].unique().tolist() == [2 + number]
        assert not steps.failure
        steps.invalidate()


def test_a_step_that_fails_during_capture_runs_without_a_graph() -> None:
    steps = GraphRunner(wrapper(), CudaCapture(torch.device("cuda")))
    x = torch.ones(8, device="cuda")
    before = torch.cuda.current_stream()

    def reads() -> torch.Tensor:
        return x * x.sum().item()

    assert steps.run(reads, "reads").tolist() == [8.0] * 8
    assert steps.failure
    assert torch.cuda.current_stream() == before


EXPERTS = Shape(256, (192, 64), SLOTS, (1, 8, 13, 64), 0.4, ModuleKind.EXPERTS, 7)
TOP_K = 2


def routed(tokens: int, seed: int) -> torch.Tensor:
    """Two experts per token; 7 is another rank's."""
    random = Random(seed)
    return torch.tensor([random.sample(range(8), TOP_K) for _ in range(tokens)])


def expected_of_experts(case: Case, rows: list[int], top_k_index: torch.Tensor) -> torch.Tensor:
    """Return every pair's delta added to its row, in float64."""
    result = case.y.double()
    for pair, expert in enumerate(top_k_index.flatten().tolist()):
        slot, first = rows[pair // TOP_K], 0
        for index, width in enumerate(case.slices.out_features):
            if expert < EXPERTS.experts and (slot, index) in case.weights:
                a, b = (matrix[expert].double() for matrix in case.weights[slot, index])
                result[pair, first : first + width] += b @ (a @ case.x[pair].double())
            first += width
    return result


@pytest.mark.parametrize("is_exchanged", [False, True])
@pytest.mark.parametrize("tokens", [2, 24, 700])
def test_a_replayed_graph_adds_the_experts_deltas_of_every_batch(
    tokens: int, is_exchanged: bool
) -> None:
    punica = wrapper()
    case = make_case(EXPERTS, [-1] * (TOP_K * tokens), DTYPE, seed=tokens)
    layer = layer_on(case.slices, "cuda")

    def step(x: torch.Tensor, y: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        result = y.clone()
        groups = punica.group_experts(tokens, lambda _: False, top_k_index, EXPERTS.experts)
        assert groups is not None
        views = result.split(EXPERTS.widths, dim=1)
        if is_exchanged:
            pair = ShrinkExpand(layer, layer)
            punica.add_lora_fused_moe_shrink_expand(views, x, pair, groups, lambda shrunk: shrunk)
        else:
            punica.add_lora_fused_moe(views, x, layer, groups)
        return result

    captured = CapturedStep(step, punica)
    for seed, rows in enumerate(batches(tokens, 8)):
        set_mapping(punica, rows)
        top_k_index = routed(tokens, seed)
        found = captured(case.x.cuda(), case.y.cuda(), top_k_index.cuda())
        wanted = expected_of_experts(case, rows, top_k_index)
        assert error_of(found.cpu(), wanted) <= ERRORS_MAX[DTYPE], rows
    assert len(captured.keys) == 1
