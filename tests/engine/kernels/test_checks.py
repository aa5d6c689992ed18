"""Operands that an operation refuses, and its messages."""

from dataclasses import replace

import pytest
import torch

from loradock.engine.kernels import Kernels
from loradock.engine.kernels.checks import check_linear
from loradock.engine.kernels.expert_groups import group_experts
from loradock.engine.layout import ModuleKind
from tests.support.kernels.kernel_cases import NAMES, Shape, groups_of, kernels_of, make_case

LINEAR = make_case(Shape(12, (6, 4), 2, (3,), 0.0), [0, 1, -1], torch.float32, 1)
EMBEDDING = make_case(
    Shape(12, (6,), 2, (3,), 0.0, ModuleKind.EMBEDDING), [0, 1, -1], torch.float32, 1
)
GOOD_Y, GOOD_X = torch.zeros(3, 10), torch.zeros(3, 12)
BUFFER, IDS = torch.zeros(2, 3, 3), torch.zeros(3, dtype=torch.int64)

Attempt = tuple[str, torch.Tensor, torch.Tensor, str]

BAD: list[Attempt] = [
    ("linear", GOOD_Y, torch.zeros(3, 11), r"linear: x is \[3, 11\]; \[3, 12\] is needed"),
    ("linear", GOOD_Y, torch.zeros(4, 12), r"linear: x is \[4, 12\]; \[3, 12\] is needed"),
    ("linear", GOOD_Y, torch.zeros(1, 3, 12), r"linear: x is \[1, 3, 12\]"),
    ("linear", torch.zeros(3, 11), GOOD_X, r"linear: y is \[3, 11\]; \[3, 10\] is needed"),
    ("linear", GOOD_Y.half(), GOOD_X, r"linear: y is torch.float16; torch.float32 is needed"),
    ("linear", GOOD_Y.long(), GOOD_X.long(), r"linear: x is torch.int64; a floating dtype"),
    ("linear", torch.zeros(10, 3).T, GOOD_X, r"linear: y has strides \(1, 3\)"),
    ("linear", GOOD_Y, torch.zeros(3, 12, device="meta"), r"linear: x is on meta; .* are on cpu"),
    ("shrink", torch.zeros(2, 3, 2), GOOD_X, r"shrink: y is \[2, 3, 2\]; \[2, 3, 3\] is needed"),
    ("shrink", torch.zeros(1, 3, 3), GOOD_X, r"shrink: y is \[1, 3, 3\]"),
    ("shrink", BUFFER.half(), GOOD_X.half(), r"shrink: y is torch.float16; torch.float32"),
    ("shrink", BUFFER, GOOD_X.int(), r"shrink: x is torch.int32; a floating dtype is needed"),
    ("expand", GOOD_Y.int(), BUFFER, r"expand: y is torch.int32; a floating dtype is needed"),
    ("expand", torch.zeros(3, 9), BUFFER, r"expand: y is \[3, 9\]; \[3, 10\] is needed"),
    ("expand", GOOD_Y, BUFFER.double(), r"expand: x is torch.float64; torch.float32 is needed"),
    ("embedding", torch.zeros(3, 6), IDS.int(), r"embedding: token_ids is torch.int32"),
    ("embedding", torch.zeros(3, 6).int(), IDS, r"embedding: y is torch.int32; a floating"),
    ("embedding", torch.zeros(3, 5), IDS, r"embedding: y is \[3, 5\]; \[3, 6\] is needed"),
]


def attempt(kernels: Kernels, operation: str, y: torch.Tensor, x: torch.Tensor) -> None:
    case = EMBEDDING if operation == "embedding" else LINEAR
    arguments = (1.0,) if operation == "embedding" else ()
    getattr(kernels, operation)(y, x, case.slices, case.groups, *arguments)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[3])
@pytest.mark.parametrize("name", NAMES)
def test_operands_that_do_not_fit_are_refused(name: str, bad: Attempt) -> None:
    operation, y, x, words = bad
    kernels = kernels_of(name)
    good = {
        "linear": (GOOD_Y, GOOD_X),
        "shrink": (BUFFER, GOOD_X),
        "expand": (GOOD_Y, BUFFER),
        "embedding": (torch.zeros(3, 6), IDS),
    }
    attempt(kernels, operation, *good[operation])
    with pytest.raises(ValueError, match=words):
        attempt(kernels, operation, y, x)
    attempt(kernels, operation, *good[operation])


@pytest.mark.parametrize("name", NAMES)
def test_a_layer_of_another_kind_is_refused(name: str) -> None:
    kernels, groups = kernels_of(name), LINEAR.groups
    with pytest.raises(ValueError, match="linear: the layer's kind is"):
        kernels.linear(torch.zeros(3, 6), GOOD_X, EMBEDDING.slices, groups)
    with pytest.raises(ValueError, match="embedding: the layer's kind is"):
        kernels.embedding(GOOD_Y, IDS, LINEAR.slices, groups, 1.0)


@pytest.mark.parametrize("name", NAMES)
def test_groups_of_a_slot_that_the_directory_does_not_have_are_refused(name: str) -> None:
    kernels, groups = kernels_of(name), groups_of([0, 2, 1])
    with pytest.raises(ValueError, match="linear: a group is of slot 2; the directory has 2"):
        kernels.linear(GOOD_Y, GOOD_X, LINEAR.slices, groups)
    with pytest.raises(ValueError, match="shrink: a group is of slot 2"):
        kernels.shrink(BUFFER, GOOD_X, LINEAR.slices, groups)
    with pytest.raises(ValueError, match="expand: a group is of slot 2"):
        kernels.expand(GOOD_Y, BUFFER, LINEAR.slices, groups)
    with pytest.raises(ValueError, match="embedding: a group is of slot 2"):
        kernels.embedding(torch.zeros(3, 6), IDS, EMBEDDING.slices, groups, 1.0)


def test_groups_on_another_device_than_the_weights_are_refused() -> None:
    groups = replace(LINEAR.groups, rows=LINEAR.groups.rows.to("meta"))
    with pytest.raises(
        ValueError, match=r"linear: the groups' table of rows is on meta; .* on cpu"
    ):
        check_linear(GOOD_Y, GOOD_X, LINEAR.slices, groups)


EXPERTS = make_case(
    Shape(12, (6, 4), 2, (3,), 0.0, ModuleKind.EXPERTS, 3), [0, 1, -1], torch.float32, 1
)
ROUTED = group_experts(EXPERTS.groups, lambda _: True, torch.tensor([[0], [2], [1]]), 3)

BAD_EXPERTS: list[tuple[list[torch.Tensor], torch.Tensor, dict[str, object], str]] = [
    ([torch.zeros(3, 6)], GOOD_X, {}, r"experts: 1 outputs; the layer has 2 slices"),
    ([], torch.zeros(2, 12), {}, r"experts: x is \[2, 12\]; \[3, 12\] is needed"),
    ([], torch.zeros(12, 3).T, {}, r"experts: x has strides \(1, 3\)"),
    ([], torch.zeros(3, 12, device="meta"), {}, "experts: x is on meta; the weights are on cpu"),
    ([], GOOD_X.half(), {}, r"experts: y is torch.float32; torch.float16 is needed"),
    ([], GOOD_X.long(), {}, r"experts: x is torch.int64; a floating dtype is needed"),
    ([torch.zeros(3, 4), torch.zeros(3, 4)], GOOD_X, {}, r"experts: y is \[3, 4\]; \[3, 6\]"),
    ([], GOOD_X, {"experts": 4}, r"experts: the groups are of 4 experts; the layer has 3"),
    ([], GOOD_X, {"slots": (0, 5)}, r"experts: a group is of slot 5; the directory has 2"),
]


@pytest.mark.parametrize("bad", BAD_EXPERTS, ids=lambda bad: bad[3])
@pytest.mark.parametrize("name", NAMES)
def test_operands_of_experts_that_do_not_fit_are_refused(name: str, bad) -> None:
    ys, x, changed, words = bad
    assert ROUTED is not None
    with pytest.raises(ValueError, match=words):
        kernels_of(name).experts(
            ys or [torch.zeros(3, 6), torch.zeros(3, 4)],
            x,
            EXPERTS.slices,
            replace(ROUTED, **changed),
        )
