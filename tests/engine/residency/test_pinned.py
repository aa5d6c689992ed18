"""Page-locked memory: exact sizes, returned at the end of their last view."""

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import structlog
import torch

from loradock.engine.errors import HostOutOfMemory
from loradock.engine.residency.pinned import PinnedMemory

REGION_BYTES = 1 << 16


class Runtime(SimpleNamespace):
    """CUDA's registration of host memory: which regions are registered, and whether it fails."""

    def __init__(self) -> None:
        super().__init__(registered={}, error=0)

    def cudaHostRegister(self, address: int, size_bytes: int, flags: int) -> int:  # noqa: N802
        if not self.error:
            self.registered[address] = size_bytes
        return self.error

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.registered[address]
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> Runtime:
    runtime = Runtime()
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    return runtime


def test_allocations_are_disjoint_aligned_and_returned(runtime: Runtime) -> None:
    memory, choice = PinnedMemory(REGION_BYTES), random.Random(5)
    living: list[torch.Tensor] = []
    for number in range(200):
        if living and (memory.free_bytes < 8192 or choice.random() < 0.4):
            living.pop(choice.randrange(len(living)))
        living.append(memory.allocate(choice.randint(1, 1000), torch.float32).fill_(number))
        spans = sorted((t.data_ptr(), t.data_ptr() + t.nbytes, float(t[0])) for t in living)
        assert all(start % 128 == 0 for start, _, _ in spans)
        assert all(end <= start for (_, end, _), (start, _, _) in pairwise(spans))
        assert all((t == t[0]).all() for t in living)
    view = living[0].view(1, -1)[:, :1]
    living.clear()
    assert memory.free_bytes < REGION_BYTES, "a view keeps its allocation"
    del view
    assert memory.free_bytes == REGION_BYTES


def test_memory_without_a_hole_is_separate_and_returned(runtime: Runtime) -> None:
    memory = PinnedMemory(REGION_BYTES)
    quarters = [memory.allocate(REGION_BYTES // 4, torch.uint8) for _ in range(4)]
    del quarters[0], quarters[1]
    with structlog.testing.capture_logs() as logs:
        half = memory.allocate(REGION_BYTES // 2, torch.uint8)
    assert [log["free_bytes"] for log in logs] == [REGION_BYTES // 2]
    assert sorted(runtime.registered.values()) == [REGION_BYTES // 2, REGION_BYTES]
    del half
    assert list(runtime.registered.values()) == [REGION_BYTES]
    del memory, quarters
    assert not runtime.registered


def test_a_driver_that_refuses_is_a_lack_of_host_memory(runtime: Runtime) -> None:
    runtime.error = 2
    with pytest.raises(
        HostOutOfMemory, match=r"65536 bytes of page-locked.*lower pinned_bytes_max"
    ):
        PinnedMemory(REGION_BYTES)


def test_an_empty_allocation_takes_nothing(runtime: Runtime) -> None:
    assert PinnedMemory(0).allocate(0, torch.float32).numel() == 0
    assert not runtime.registered
