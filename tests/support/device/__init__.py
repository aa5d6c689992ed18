"""A simulated CUDA device: what a machine without a card can know about a program for one.

Tensors have real values in host memory, and their device is `cuda:0`. Mixed devices are refused;
launches, copies and reads are counted with the lines that caused them; streams and the host have
vector clocks, so races are reported; graphs are replayed; Triton's kernels run in its interpreter.
It has no speed, no memory of its own and no NCCL.
"""

from tests.support.device.install import install, simulated_device
from tests.support.device.record import RECORD, Record
from tests.support.device.tensors import SimulatedTensor

__all__ = ["RECORD", "Record", "SimulatedTensor", "install", "simulated_device"]
