"""What a launcher refuses, and that it says what it got."""

import pytest
import torch

from engine.kernels import Kernels
from engine.layout import ModuleKind
from tests.kernel_cases import NAMES, Shape, kernels_of, make_case

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
    ("linear", torch.zeros(10, 3).T, GOOD_X, r"linear: y has strides \(1, 3\)"),
    ("linear", GOOD_Y, torch.zeros(3, 12, device="meta"), r"linear: x is on meta; .* are on cpu"),
    ("shrink", torch.zeros(2, 3, 2), GOOD_X, r"shrink: y is \[2, 3, 2\]; \[2, 3, 3\] is needed"),
    ("shrink", torch.zeros(1, 3, 3), GOOD_X, r"shrink: y is \[1, 3, 3\]"),
    ("shrink", BUFFER.half(), GOOD_X.half(), r"shrink: y is torch.float16; torch.float32"),
    ("expand", torch.zeros(3, 9), BUFFER, r"expand: y is \[3, 9\]; \[3, 10\] is needed"),
    ("expand", GOOD_Y, BUFFER.double(), r"expand: x is torch.float64; torch.float32 is needed"),
    ("embedding", torch.zeros(3, 6), IDS.int(), r"embedding: token_ids is torch.int32"),
    ("embedding", torch.zeros(3, 5), IDS, r"embedding: y is \[3, 5\]; \[3, 6\] is needed"),
]


def attempt(kernels: Kernels, operation: str, y: torch.Tensor, x: torch.Tensor) -> None:
    case = EMBEDDING if operation == "embedding" else LINEAR
    arguments = (0, True) if operation == "expand" else (1.0,)
    getattr(kernels, operation)(y, x, case.slices, case.groups, *arguments)


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad[3])
@pytest.mark.parametrize("name", NAMES)
def test_what_an_operation_is_not_defined_for_is_refused(name: str, bad: Attempt) -> None:
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
        kernels.linear(torch.zeros(3, 6), GOOD_X, EMBEDDING.slices, groups, 1.0)
    with pytest.raises(ValueError, match="embedding: the layer's kind is"):
        kernels.embedding(GOOD_Y, IDS, LINEAR.slices, groups, 1.0)
    with pytest.raises(ValueError, match="expand: offset is -1"):
        kernels.expand(GOOD_Y, BUFFER, LINEAR.slices, groups, -1, True)
