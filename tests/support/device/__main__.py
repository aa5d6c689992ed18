"""`python -m tests.support.device MODULE ARGUMENTS`: run a module with the simulated device.

Triton's kernels are counted and not run.
"""

import runpy
import sys

from tests.support.device import RECORD, simulated_device
from tests.support.device.tensors import skipped_kernels


def main() -> None:
    """Run the module; fail if the device reports an error."""
    module, sys.argv = sys.argv[1], sys.argv[1:]
    with simulated_device(), skipped_kernels():
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        finally:
            if RECORD.errors:
                sys.exit(f"the simulated device reports {dict(RECORD.errors)}")


if __name__ == "__main__":
    main()
