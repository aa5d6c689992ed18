"""The tests of all implementations with Triton's kernels, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so these tests run in a separate process;
`make gpu` runs the same files with compiled kernels on a device.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from engine.kernels.gpu.tile_configs import (
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
from engine.kernels.operands import TILE_ROWS, GroupBounds

TESTS = Path(__file__).parent
# The interpreter multiplies with NumPy. OpenBLAS's kernels with fused multiply-add round a row by
# its place in their tile, so on some processors equal rows would differ: an older one is chosen.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}


def test_the_interpreted_kernels_pass_the_shared_tests() -> None:
    operations = (
        *("linear", "shrink", "expand", "shrink_expand", "embedding", "checks", "traffic"),
        *("experts", "experts_shrink_expand", "offsets"),
    )
    paths = [str(TESTS / f"test_{operation}.py") for operation in operations]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *paths]
    done = run(INTERPRETED, command)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert " passed" in done.stdout
    assert " skipped" not in done.stdout


def test_the_other_kernels_do_not_need_triton() -> None:
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "from engine.kernels import choose_kernels\n"
        "import engine.punica, engine.layers\n"
        "choose_kernels('cpu'), choose_kernels('cpu', 'reference')\n"
        "try: choose_kernels('cpu', 'triton')\n"
        "except ImportError: print('missing')\n"
    )
    done = run({}, [sys.executable, "-c", script])
    assert done.stdout == "missing\n", done.stderr


def run(settings: dict[str, str], command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)


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
    for capability, architecture in (((8, 0), 80), ((8, 9), 80), ((9, 0), 90), ((12, 0), 100)):
        linear, experts = configs_for(capability)
        assert linear is LINEAR_CONFIGS[architecture]
        assert experts is EXPERTS_CONFIGS[architecture]
    with pytest.raises(ValueError, match=r"7\.5"):
        configs_for((7, 5))
