"""What a captured graph may be replayed for; that it computes rightly is seen on a device."""

import pytest
import torch

from engine.graphs import CapturedStep
from engine.kernels import choose_kernels
from engine.punica import LoRAMapping, PunicaWrapper

SLOTS = [1, 2, 3, 4, 5, 6]


def keys(batches: list[list[int]], specialize_active: bool) -> list[object]:
    """A key for each batch of adapter ids by row, with one captured input."""
    punica = PunicaWrapper(
        torch.device("cpu"),
        16,
        choose_kernels("cpu", "reference"),
        specialize_active=specialize_active,
    )
    step = CapturedStep(lambda x: x, punica)
    found = []
    for ids in batches:
        punica.update_metadata(LoRAMapping(ids, ids), SLOTS)
        found.append(step.key_of(torch.zeros(len(ids), 4)))
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


def test_an_input_of_another_shape_is_another_graph() -> None:
    three, four = keys([[1, 0, 0], [1, 0, 0, 0]], specialize_active=False)
    assert three != four


def test_graphs_are_refused_where_there_are_none() -> None:
    punica = PunicaWrapper(torch.device("cpu"), 16, choose_kernels("cpu", "reference"))
    with pytest.raises(ValueError, match="graphs are CUDA's"):
        CapturedStep(lambda x: x, punica)(torch.zeros(1))
