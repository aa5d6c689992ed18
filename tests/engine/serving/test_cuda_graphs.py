"""The mappings for which a graph may be replayed. CUDA's own results are tested on a device."""

from weakref import ref

import pytest
import structlog
import torch
from torch import Tensor

from loradock.engine.kernels import choose_kernels
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.serving.decoding import (
    CudaCapture,
    DecodeStep,
    GraphKey,
    GraphRunner,
    WeakShared,
)
from tests.support.engine.tape_capture import TapeCapture

SLOTS = [1, 2, 3, 4, 5, 6]


def wrapper(specialize_active: bool = False) -> PunicaWrapper:
    return PunicaWrapper(
        torch.device("cpu"),
        16,
        choose_kernels("cpu", "reference"),
        specialize_active=specialize_active,
    )


def keys(batches: list[list[int]], specialize_active: bool) -> list[GraphKey]:
    """Return a key for each batch of adapter ids by row."""
    punica = wrapper(specialize_active)
    runner = GraphRunner(punica, lambda step: step)
    found = []
    for ids in batches:
        punica.update_metadata(LoRAMapping(ids, ids), SLOTS)
        runner.run(lambda: torch.zeros(1), len(ids))
        found.append(runner.keys[-1])
    return found


def test_one_graph_serves_all_adapters_and_any_number_of_them() -> None:
    found = keys([[1, 2, 0, 0], [3, 0, 0, 0], [1, 2, 3, 4], [6, 6, 6, 6]], specialize_active=False)
    assert len(set(found)) == 1


def test_a_specialised_graph_serves_a_power_of_two_of_active_adapters() -> None:
    one, other, two, three, four = keys(
        [[1, 1, 0, 0], [0, 5, 5, 5], [1, 2, 1, 0], [1, 2, 3, 0], [1, 2, 3, 4]],
        specialize_active=True,
    )
    assert one == other
    assert three == four
    assert len({one, two, three}) == 3


@pytest.mark.parametrize("specialize_active", [True, False])
def test_a_batch_without_adapters_has_a_graph_of_its_own(specialize_active: bool) -> None:
    none, some = keys([[0, 0, 0, 0], [0, 0, 0, 1]], specialize_active)
    assert none != some


def test_a_graph_belongs_to_the_launches_over_tokens_and_over_sampled_rows() -> None:
    punica = wrapper()
    runner = GraphRunner(punica, lambda step: step)
    for tokens, rows in ((4, 2), (4, 3), (8, 2)):
        punica.update_metadata(LoRAMapping([1] * tokens, [1] * rows), SLOTS)
        runner.run(lambda: torch.zeros(1), "shape")
    assert len(runner.keys) == 3


def test_a_step_of_another_shape_is_another_graph() -> None:
    three, four = keys([[1, 0, 0], [1, 0, 0, 0]], specialize_active=False)
    assert three != four


def test_a_step_with_saved_layers_is_neither_captured_nor_replayed() -> None:
    """Their rows are chosen by index, so a replay would compute those of the captured batch."""
    punica = PunicaWrapper(
        torch.device("cpu"),
        16,
        choose_kernels("cpu", "reference"),
        has_saved_layers=lambda slot: slot == 2,
    )
    replays: list[DecodeStep] = []

    def capture(step: DecodeStep) -> DecodeStep:
        return lambda: replays.append(step) or step()

    runner = GraphRunner(punica, capture)
    for ids, is_replayed in (([1, 0], True), ([3, 0], False), ([1, 3], False), ([1, 1], True)):
        punica.update_metadata(LoRAMapping(ids, ids), SLOTS)
        replays.clear()
        assert runner.run(lambda: torch.ones(1), "shape") == 1.0
        assert bool(replays) == is_replayed
    assert len(runner.keys) == 1


def test_a_step_with_groups_for_a_layers_own_rows_is_not_replayed() -> None:
    """No later mapping overwrites the tables of those groups."""
    punica = wrapper()

    def capture(step: DecodeStep) -> DecodeStep:
        found = step()
        return lambda: found

    def step() -> Tensor:
        groups = punica.groups_of((2, 6))
        assert groups is not None
        return groups.token_slots

    runner = GraphRunner(punica, capture)
    for ids in ([1, 2], [3, 1], [2, 2]):
        punica.update_metadata(LoRAMapping([ids[0], *ids, ids[1]], ids), SLOTS)
        expected = [id_ - 1 for id_ in ids for _ in range(6)]
        assert runner.run(step, "shape").tolist() == expected


def test_a_graph_is_not_replayed_for_reallocated_tables() -> None:
    punica = wrapper()
    runner = GraphRunner(punica, lambda step: step)
    for identity in (object(), object()):
        punica.grouper = Reallocated(identity)
        runner.run(lambda: torch.zeros(1), "shape")
    assert len(runner.keys) == 2


class Reallocated:
    """A grouper whose tables are elsewhere for each `buffer_identity`."""

    def __init__(self, buffer_identity: object) -> None:
        self.buffer_identity = buffer_identity


def test_a_graph_reads_the_current_contents_of_its_tensors() -> None:
    runner = GraphRunner(wrapper(), capture := TapeCapture())
    x = torch.zeros(3)
    for value in (2.0, 5.0, -1.0):
        x.fill_(value)
        assert runner.run(lambda: x * 2 + 1, "shape").tolist() == [2 * value + 1] * 3
    assert (capture.captures, capture.replays) == (1, 3)


def test_the_least_recently_used_graph_is_evicted() -> None:
    made: list[object] = []

    def capture(step: DecodeStep) -> DecodeStep:
        made.append(step().item())
        return step

    runner = GraphRunner(wrapper(), capture, graphs_max=2)

    def run(number: int) -> Tensor:
        return runner.run(lambda: torch.tensor(number), number)

    for number in (1, 2, 1, 3, 1, 2):
        assert run(number) == number
    assert made == [1, 2, 3, 2]
    assert [key.shape for key in runner.keys] == [1, 2]
    runner.invalidate()
    run(1)
    assert made[-1] == 1


def test_a_step_that_can_not_be_captured_is_called_directly() -> None:
    tries: list[DecodeStep] = []

    def capture(step: DecodeStep) -> DecodeStep:
        tries.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = GraphRunner(wrapper(), capture)
    with structlog.testing.capture_logs() as logs:
        found = [runner.run(lambda n=n: torch.tensor(n), "shape").item() for n in range(3)]
    assert found == [0, 1, 2]
    assert len(tries) == len(logs) == 1
    assert "not permitted" in runner.failure
    assert "not permitted" in logs[0]["reason"]


def test_a_pool_is_shared_by_live_graphs_and_by_no_later_one() -> None:
    class Pool:
        """An object that graphs keep alive."""

    pool = WeakShared(Pool)
    graphs = [pool(), pool()]
    assert graphs[0] is graphs[1]
    first = ref(graphs.pop())
    assert pool() is first()
    graphs.clear()
    assert first() is None
    second = pool()
    assert pool() is second


def test_a_device_without_graphs_is_refused() -> None:
    with pytest.raises(ValueError, match="a CUDA device is needed"):
        CudaCapture(torch.device("cpu"))
