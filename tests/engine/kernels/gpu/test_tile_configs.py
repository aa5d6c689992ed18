"""The tables of tile sizes, and the choice of a regime by a batch's bounds."""

import pytest

from loradock.engine.kernels.gpu.tile_configs import (
    EXPERTS_CONFIGS,
    EXPERTS_REGIMES,
    LINEAR_CONFIGS,
    REGIMES,
    SOURCE,
    FusedConfig,
    configs_for,
    experts_regime_of,
    regime_of,
)
from loradock.engine.kernels.operands import TILE_ROWS, GroupBounds


def test_every_architecture_has_configs_for_every_regime() -> None:
    assert LINEAR_CONFIGS.keys() == SOURCE.keys()
    for configs in LINEAR_CONFIGS.values():
        assert tuple(configs) == REGIMES
        for config in configs.values():
            for launch in filter(None, config):
                assert launch.block_m in TILE_ROWS
        assert isinstance(configs["few"].fused, FusedConfig)
    assert EXPERTS_CONFIGS.keys() == SOURCE.keys()
    for experts in EXPERTS_CONFIGS.values():
        assert tuple(experts) == EXPERTS_REGIMES
        assert {launch.block_m for config in experts.values() for launch in config} <= {*TILE_ROWS}


def test_experts_use_long_tiles_for_groups_of_many_pairs() -> None:
    assert experts_regime_of(GroupBounds(64, 2, 16)) == "prefill"
    assert experts_regime_of(GroupBounds(63, 2, 16)) == "decode"
    assert experts_regime_of(GroupBounds(64, 2, 16), batch_invariant=True) == "invariant"


@pytest.mark.parametrize(
    ("tokens", "groups", "regime"),
    [
        (1, 1, "few"),
        (4, 4, "few"),
        (8, 1, "decode"),
        (64, 1, "alone"),
        (2048, 1, "alone"),
        (64, 64, "many"),
        (256, 8, "prefill"),
        (2048, 64, "prefill"),
        (1024, 64, "many"),
        (128, 8, "decode"),
    ],
)
def test_the_bounds_determine_the_regime(tokens: int, groups: int, regime: str) -> None:
    assert regime_of(GroupBounds(tokens, groups, 16)) == regime
    assert regime_of(GroupBounds(tokens, groups, 16), batch_invariant=True) == "invariant"


def test_a_device_gets_the_newest_table_that_it_can_run() -> None:
    for capability, architecture in (((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((12, 0), 90)):
        linear, experts = configs_for(capability)
        assert linear is LINEAR_CONFIGS[architecture]
        assert experts is EXPERTS_CONFIGS[architecture]
    with pytest.raises(ValueError, match=r"7\.5"):
        configs_for((7, 5))
