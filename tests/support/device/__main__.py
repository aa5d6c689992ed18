"""`python -m tests.support.device MODULE ARGUMENTS`: run a module with the simulated device.

Triton's kernels are counted and not run.
"""

import runpy
import sys
from typing import Any

import torch

from tests.support.device import RECORD, simulated_device
from tests.support.device.tensors import skipped_kernels


class NoProfile:
    """A profile in which no kernel ran: PyTorch's reads the counters of a device."""

    def __init__(self, **_: Any) -> None:
        pass

    def __enter__(self) -> "NoProfile":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def key_averages(self) -> list[Any]:
        return []


def main() -> None:
    """Run the module; fail if the device reports an error."""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    torch.profiler.profile = NoProfile
    with simulated_device(), skipped_kernels():
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            if RECORD.errors:
                sys.exit(f"the simulated device reports {dict(RECORD.errors)}")


if __name__ == "__main__":
    main()
