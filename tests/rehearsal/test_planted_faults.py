"""Faults that are planted into the engine, each of which the simulated device has to report."""

from collections.abc import Callable, Iterator

import pytest
import torch

from loradock.engine.kernels import choose_kernels
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.punica.side_stream import SideStream
from loradock.engine.residency.copier import StreamCopier, StreamCopy
from loradock.engine.residency.extents import Compactor, Extents
from loradock.engine.residency.pinned import PinnedMemory
from loradock.engine.serving.decoding import CudaCapture
from tests.support.device import RECORD
from tests.support.device.streams import Event, Stream, use_stream
from tests.support.device.tensors import SimulatedTensor
from tests.support.engine.arena_examples import make_arena, make_blob

pytestmark = pytest.mark.simulated
DEVICE = torch.device("cuda")


def replace_adapter() -> None:
    """Write a slot, read it, reset it, and write another adapter at the same place."""
    arena = make_arena(torch.float32, device="cuda")
    pinned = PinnedMemory(1 << 20)
    old, new = (
        make_blob({0: 4, 3: 5}, seed, torch.float32)[0].to_pinned(pinned) for seed in (1, 2)
    )
    for version, blob in enumerate((old, new), start=1):
        if version > 1:
            arena.reset(0, version - 1)
        arena.begin_write(0, version, blob)
        arena.finish_write(0)
        arena.data.clone()
    arena.close()


def compact() -> None:
    """Slide an extent that the forward passes read before and afterwards."""
    memory = torch.zeros(1024, dtype=torch.uint8, device=DEVICE)
    extents = Extents(len(memory))
    for owner in range(8):
        extents.allocate(owner, 128)
    memory.clone()
    for owner in (0, 2):
        extents.free(owner)
    assert Compactor(memory, extents, StreamCopier(DEVICE)).make_hole(256, ())
    memory.clone()


def group_batches() -> None:
    """Copy the tables of more batches than there are page-locked buffers."""
    punica = PunicaWrapper(DEVICE, 16, choose_kernels("cuda", "reference"))
    for batch in range(4):
        ids = [1 + (row + batch) % 3 for row in range(8)]
        punica.update_metadata(LoRAMapping(ids, ids), [1, 2, 3])


def run_both_streams() -> None:
    """Use and free the result of a side stream."""
    side, x = SideStream(DEVICE), torch.randn(8, 8, device=DEVICE)
    for _ in range(3):
        y, delta = side.run(lambda: x @ x, lambda: x + 1)
        total = y + delta
        del y, delta, total


def replay() -> None:
    """Capture a step, and replay it with other values on the device."""
    position = torch.zeros(1, device=DEVICE)
    replayed = CudaCapture(DEVICE)(lambda: step(position))
    position.fill_(7.0)
    if replayed().tolist() != [8.0]:
        RECORD.error("a replayed step answers wrongly")


def step(position: torch.Tensor) -> torch.Tensor:
    return position + 1


def step_with_host_value(position: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), float(position.item()) + 1, device=DEVICE)


def step_with_stale_value(position: torch.Tensor) -> torch.Tensor:
    return torch.full((1,), 1.0, device=DEVICE)


def move_on_copy_stream(self: StreamCopier, target: torch.Tensor, source: torch.Tensor) -> None:
    with use_stream(self._stream):
        target.copy_(source, non_blocking=True)


def ignore(*_: object) -> None:
    """Do nothing."""


WORK = (replace_adapter, compact, group_batches, run_both_streams, replay)
FAULTS = {
    "a copy does not wait for the forward passes": (replace_adapter, Stream, "wait_stream", ignore),
    "a slot is published before its copy has ended": (replace_adapter, StreamCopy, "wait", ignore),
    "moves run on the copy stream": (compact, StreamCopier, "move", move_on_copy_stream),
    "a page-locked table is refilled in flight": (group_batches, Event, "synchronize", ignore),
    "no fork and no join": (run_both_streams, Stream, "wait_stream", ignore),
    "no record_stream": (run_both_streams, SimulatedTensor, "record_stream", ignore),
    "a host value is read into a graph": (replay, None, "step", step_with_host_value),
    "a host value is baked into a graph": (replay, None, "step", step_with_stale_value),
}


@pytest.fixture(autouse=True)
def _forget_reports() -> Iterator[None]:
    """The plugin fails tests by what is left in the record."""
    RECORD.reset()
    yield
    RECORD.reset()


@pytest.mark.parametrize("work", WORK, ids=lambda work: work.__name__)
def test_nothing_is_reported_without_a_fault(work: Callable[[], None]) -> None:
    work()
    assert not RECORD.errors


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_reported(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    work, owner, name, replacement = FAULTS[fault]
    if owner is None:
        monkeypatch.setitem(globals(), name, replacement)
    else:
        monkeypatch.setattr(owner, name, replacement)
    try:
        work()
    finally:
        reported = dict(RECORD.errors)
        RECORD.errors.clear()
    assert reported
