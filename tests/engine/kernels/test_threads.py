"""Small products use one thread, and the number of threads is restored."""

from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from loradock.engine.kernels.expert_groups import group_experts
from loradock.engine.kernels.threads import THREADED_ROWS, threads_for
from loradock.engine.layout import ModuleKind
from tests.support.kernels.kernel_cases import Shape, kernels_of, make_case


@pytest.fixture(autouse=True)
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    ("rows", "threads"), [(0, 1), (1, 1), (THREADED_ROWS - 1, 1), (THREADED_ROWS, 2)]
)
def test_only_products_of_many_rows_use_more_threads(rows: int, threads: int) -> None:
    with threads_for(rows):
        assert torch.get_num_threads() == threads
    assert torch.get_num_threads() == 2


def test_the_number_of_threads_is_restored_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), threads_for(1):
        raise ZeroDivisionError
    assert torch.get_num_threads() == 2


class ThreadsOfProducts(TorchDispatchMode):
    """Records the number of threads of each matrix product."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ in ("mm", "bmm", "addmm_", "baddbmm_"):
            self.seen.add(torch.get_num_threads())
        return func(*args, **(kwargs or {}))


OPERATIONS = ("linear", "shrink", "expand", "embedding", "experts")


@pytest.mark.parametrize(("rows", "threads"), [(THREADED_ROWS - 1, 1), (THREADED_ROWS, 2)])
@pytest.mark.parametrize("operation", OPERATIONS)
def test_every_operation_limits_the_threads_of_small_products(
    operation: str, rows: int, threads: int
) -> None:
    kinds = {"embedding": ModuleKind.EMBEDDING, "experts": ModuleKind.EXPERTS}
    shape = Shape(12, (6,), 1, (3,), 0.0, kinds.get(operation, ModuleKind.LINEAR))
    case = make_case(shape, [0] * rows, torch.float32, 1)
    groups = case.groups
    routed = group_experts(groups, lambda _: True, torch.zeros(rows, 1, dtype=torch.int64), 1)
    shrunk = torch.zeros(1, rows, 3)
    operands = {
        "shrink": (shrunk, case.x, case.slices, groups),
        "expand": (case.y, shrunk, case.slices, groups),
        "embedding": (case.y, case.x, case.slices, groups, 1.0),
        "experts": ([case.y], case.x, case.slices, routed),
    }
    own = operands.get(operation, (case.y, case.x, case.slices, groups))
    with ThreadsOfProducts() as products:
        getattr(kernels_of("cpu"), operation)(*own)
    assert products.seen == {threads}
    assert torch.get_num_threads() == 2
    if operation != "experts":
        with ThreadsOfProducts() as products:
            getattr(kernels_of("cpu", batch_invariant=True), operation)(*own)
        assert products.seen == {1}
