"""The kernels of a model: calibrated where that pays, and with one choice on all ranks."""

import itertools
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from loradock.engine.config import LoRAConfig
from loradock.engine.kernels import Calibration, Kernels
from loradock.engine.kernels.cpu.calibration import ProductSpeeds
from loradock.engine.kernels.cpu.costs import DEFAULT_COSTS
from loradock.engine.models import binding
from loradock.engine.parallel import SINGLE
from tests.support.kernels.way_times import way_times
from tests.support.parallel.threads import RANKS, on_all_ranks

LARGE = nn.Linear(4096, 4097, device="meta")
SMALL = nn.Linear(8, 8)
TWO_SLOTS = LoRAConfig(max_loras=2)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Calibration]:
    """Record the measurements, each of which has other constants."""
    found: list[Calibration] = []
    numbers = itertools.count(1)

    def measure() -> Calibration:
        costs = DEFAULT_COSTS._replace(convert_call=float(next(numbers)))
        found.append(Calibration(costs, ProductSpeeds(way_times(9.0, {16: 1.0}), 2.0, 3.0)))
        return found[-1]

    monkeypatch.setattr(binding, "calibration", measure)
    return found


def kernels_of(model: nn.Module, group: object, config: LoRAConfig = TWO_SLOTS) -> Kernels:
    served = SimpleNamespace(model=model, group=group, device=torch.device("cpu"))
    return binding._kernels_of(served, config)


def test_a_large_model_is_calibrated(measured: list[Calibration]) -> None:
    """It may be any module, without a config."""
    kernels = kernels_of(LARGE, SINGLE)
    assert kernels.linear._costs == measured[0].costs
    assert kernels.base_linear is not None


@pytest.mark.parametrize(
    ("model", "config"), [(SMALL, TWO_SLOTS), (LARGE, LoRAConfig(batch_invariant=True))]
)
def test_a_small_or_batch_invariant_one_is_not(
    model: nn.Module, config: LoRAConfig, measured: list[Calibration]
) -> None:
    kernels = kernels_of(model, SINGLE, config)
    assert kernels.linear._costs == DEFAULT_COSTS
    assert kernels.base_linear is None
    assert measured == []


def test_the_products_of_a_quantised_model_are_its_own(measured: list[Calibration]) -> None:
    model = nn.Linear(4096, 4097, device="meta")
    model.config = SimpleNamespace(quantization_config=SimpleNamespace())
    kernels = kernels_of(model, SINGLE)
    assert kernels.linear._costs == measured[0].costs
    assert kernels.base_linear is None


@pytest.mark.parametrize("leading", [LARGE, SMALL])
@pytest.mark.parametrize("following", [LARGE, SMALL])
def test_all_ranks_use_the_constants_of_rank_0(
    leading: nn.Module, following: nn.Module, measured: list[Calibration]
) -> None:
    """Their parts of a model may be on either side of the least size."""
    made = on_all_ranks(lambda group: kernels_of(following if group.rank else leading, group))
    costs = measured[0].costs if leading is LARGE else DEFAULT_COSTS
    assert [kernels.linear._costs for kernels in made] == [costs] * RANKS
    assert {kernels.base_linear is None for kernels in made} == {leading is SMALL}
    assert len(measured) == int(leading is LARGE)
