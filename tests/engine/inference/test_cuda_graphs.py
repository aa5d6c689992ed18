"""What a captured graph may be replayed for; that CUDA's computes rightly is seen on a device."""

from weakref import ref

import pytest
import structlog
import torch
from torch import Tensor

from engine.inference.cuda_graphs import CapturedSteps, CudaCapture, GraphKey, Step, WhileHeld
from engine.kernels import choose_kernels
from engine.punica import LoRAMapping, PunicaWrapper
from tests.support.engine.replayed_steps import TapeCapture

SLOTS = [1, 2, 3, 4, 5, 6]


def wrapper(specialize_active: bool = False) -> PunicaWrapper:
    return PunicaWrapper(
        torch.device("cpu"),
        16,
        choose_kernels("cpu", "reference"),
        specialize_active=specialize_active,
    )


def keys(batches: list[list[int]], specialize_active: bool) -> list[GraphKey]:
    """A key for each batch of adapter ids by row."""
    punica = wrapper(specialize_active)
    steps = CapturedSteps(punica, lambda step: step)
    found = []
    for ids in batches:
        punica.update_metadata(LoRAMapping(ids, ids), SLOTS)
        steps.run(lambda: torch.zeros(1), len(ids))
        found.append(steps.keys[-1])
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


def test_a_step_of_another_shape_is_another_graph() -> None:
    three, four = keys([[1, 0, 0], [1, 0, 0, 0]], specialize_active=False)
    assert three != four


def test_a_graph_is_not_replayed_for_tables_that_lie_elsewhere() -> None:
    punica = wrapper()
    captured = CapturedSteps(punica, lambda step: step)
    for place in (object(), object()):
        punica.grouper = Elsewhere(place)
        captured.run(lambda: torch.zeros(1), "shape")
    assert len(captured.keys) == 2


class Elsewhere:
    """A grouper whose tables lie at `place`."""

    def __init__(self, place: object) -> None:
        self.place = place


def test_a_graph_reads_what_lies_in_its_tensors_now() -> None:
    captured = CapturedSteps(wrapper(), capture := TapeCapture())
    x = torch.zeros(3)
    for value in (2.0, 5.0, -1.0):
        x.fill_(value)
        assert captured.run(lambda: x * 2 + 1, "shape").tolist() == [2 * value + 1] * 3
    assert (capture.captures, capture.replays) == (1, 3)


def test_the_graph_that_was_not_used_for_longest_makes_room() -> None:
    made: list[object] = []

    def capture(step: Step) -> Step:
        made.append(step().item())
        return step

    captured = CapturedSteps(wrapper(), capture, graphs_max=2)

    def run(number: int) -> Tensor:
        return captured.run(lambda: torch.tensor(number), number)

    for number in (1, 2, 1, 3, 1, 2):
        assert run(number) == number
    assert made == [1, 2, 3, 2]
    assert [key.shape for key in captured.keys] == [1, 2]
    captured.forget()
    run(1)
    assert made[-1] == 1


def test_a_step_that_can_not_be_captured_runs_by_itself() -> None:
    tries: list[Step] = []

    def capture(step: Step) -> Step:
        tries.append(step)
        raise RuntimeError("operation not permitted when stream is capturing")

    captured = CapturedSteps(wrapper(), capture)
    with structlog.testing.capture_logs() as logs:
        found = [captured.run(lambda n=n: torch.tensor(n), "shape").item() for n in range(3)]
    assert found == [0, 1, 2]
    assert len(tries) == len(logs) == 1
    assert "not permitted" in captured.failure
    assert "not permitted" in logs[0]["reason"]


def test_memory_is_shared_by_what_lives_together_and_by_nothing_after_it() -> None:
    class Pool:
        """What graphs hold."""

    give = WhileHeld(Pool)
    graphs = [give(), give()]
    assert graphs[0] is graphs[1]
    first = ref(graphs.pop())
    assert give() is first()
    graphs.clear()
    assert first() is None
    second = give()
    assert give() is second


def test_graphs_are_refused_where_there_are_none() -> None:
    with pytest.raises(ValueError, match="graphs are CUDA's"):
        CudaCapture(torch.device("cpu"))
