"""Every kernel with every checked-in configuration, compiled for its architectures."""

import os
from pathlib import Path

import pytest
import triton

from tests.support.kernels.compiled_kernels import SHARED_BYTES_MAX, build, jobs

TENSOR_CORES = r"HMMA\..*|HGMMA\..*|UTC\w*MMA.*"
LOADS_OF_128_BITS = r"LDG\..*128.*|LDGSTS\..*128.*"
FLOAT_ATOMICS = r"(RED|ATOM|ATOMG)\b.*"
LOCAL_MEMORY = r"(LDL|STL)\b.*"
SUMS = ("sum_splits_kernel", "experts_sum_kernel", "merge_kernel")
WITHOUT_PRODUCTS = (
    *(*SUMS, "lookup_kernel", "write_kernel"),
    *("rms_norm_kernel", "add_norm_kernel", "gate_kernel", "rotate_kernel"),
)

# Each takes from half a minute to two.
PAIRS = os.environ.get("LORADOCK_COMPILE", "").split()

RESIDENT_WARPS_MIN = {"bf16": 12, "fp16": 12, "fp32": 8}
"""Fewer can't hide the latency of memory; float32 has twice the bytes in shared memory.

The sums of splits are left out: they read little, and only layers that are sharded by rank launch
them. Attention of chunks computes more than it reads, and keeps its sums in registers.
"""

ATTENTION_WARPS_MIN = 8

VARIANTS_MAX = 34
"""Of each architecture and dtype; each is compiled at start for each layer that it is used in."""

SPILLED_BYTES_MAX = 16 if triton.__version__ >= "3.9" else 0
"""Triton 3.9 spills up to four registers of `expand_kernel` in bfloat16 on Hopper and Blackwell."""


@pytest.mark.skipif(not PAIRS, reason="`make rehearse` compiles the kernels")
@pytest.mark.parametrize("pair", PAIRS or [""])
def test_no_spills_no_atomics_tensor_cores_wide_loads_and_resident_warps(
    pair: str, tmp_path: Path
) -> None:
    version, dtype = pair.split("-")
    architecture = int(version)
    launches = jobs(architecture, dtype)
    assert len(launches) <= VARIANTS_MAX
    for job in launches:
        made = build(job, architecture, tmp_path)
        # Shown where the test fails, and with `pytest -rP`.
        print(
            f"sm_{architecture} {dtype} {job.name}: {made.registers} registers, "
            f"{made.shared_bytes} bytes shared, {job.warps} warps"
        )
        assert made.spilled_bytes <= SPILLED_BYTES_MAX, job.name
        assert made.count(LOCAL_MEMORY) <= SPILLED_BYTES_MAX // 2, job.name
        assert made.shared_bytes <= SHARED_BYTES_MAX[architecture], job.name
        if job.kernel.__name__ not in SUMS:
            resident = made.resident_warps(job.warps, architecture)
            is_attention = job.kernel.__name__ == "attend_kernel"
            least = ATTENTION_WARPS_MIN if is_attention else RESIDENT_WARPS_MIN[dtype]
            assert resident >= least, job.name
        assert made.count(FLOAT_ATOMICS) == 0, job.name
        assert made.count("EXIT") > 0, "no instruction was read"
        if job.kernel.__name__ not in SUMS:
            assert made.count(LOADS_OF_128_BITS) > 0, job.name
        if job.kernel.__name__ not in WITHOUT_PRODUCTS:
            assert made.count(TENSOR_CORES) > 0, job.name
