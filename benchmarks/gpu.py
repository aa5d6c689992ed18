"""`make gpu`: what only a CUDA device can show.

What it is: the tests marked `gpu`, then the benchmarks of groups that measure a device. What it is
not: part of CI. One rule: without a device it says so and succeeds, for nothing was found wrong.
"""

import subprocess
import sys

import torch


def main() -> int:
    """Run the tests on the device; the exit status is theirs."""
    if not torch.cuda.is_available():
        print("no CUDA device is here: the tests and benchmarks that need one are skipped")
        return 0
    print(f"on {torch.cuda.get_device_name()}")
    return subprocess.run([sys.executable, "-m", "pytest", "-m", "gpu"], check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
