"""The tests of all implementations with Triton's kernels, in Triton's interpreter.

The interpreter must be chosen before Triton is imported, so these tests run in a separate process;
`make gpu` runs the same files with compiled kernels on a device.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
# The interpreter multiplies with NumPy. OpenBLAS's kernels with fused multiply-add round a row by
# its index in their tile, so on some processors equal rows would differ: an older one is chosen.
INTERPRETED = {"TRITON_INTERPRET": "1", "OPENBLAS_CORETYPE": "Nehalem"}


@pytest.mark.skipif("LORADOCK_COMPILE" not in os.environ, reason="run by `make rehearse`")
def test_the_interpreted_kernels_pass_the_shared_tests() -> None:
    operations = (
        *("linear", "shrink_expand", "embedding", "checks", "traffic"),
        *("experts", "experts_shrink_expand", "offsets", "block_attention", "fused"),
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
        "from loradock.engine.kernels import choose_kernels\n"
        "import loradock.engine.punica, loradock.engine.layers\n"
        "choose_kernels('cpu'), choose_kernels('cpu', 'reference')\n"
        "try: choose_kernels('cpu', 'triton')\n"
        "except ImportError: print('missing')\n"
    )
    done = run({}, [sys.executable, "-c", script])
    assert done.stdout == "missing\n", done.stderr


def run(settings: dict[str, str], command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **settings}
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
