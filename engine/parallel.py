"""The processes that hold one model together: who is who, and what they say to each other.

What it is: one rank's view of a tensor-parallel group, over torch.distributed. What it is not: a
way to send objects; what is not a tensor travels as bytes that somebody else encodes. One rule: a
group of one calls nothing, so that a single process needs no torch.distributed.

Every call is collective: all ranks make the same calls, in the same order, from one thread. A rank
that stays away ends the call with `RankLost` within `TIMEOUT_S` on all others.
"""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_S: Final = 60.0
"""How long a call waits for the others, once all have started."""

START_TIMEOUT_S: Final = 1800.0
"""How long the first ready rank waits for those that still load the model."""


class RankLost(Exception):  # noqa: N818 - named by what was found, as the engine's errors
    """Another rank is gone, silent, or not the same any more; the group can't go on."""


@contextmanager
def _talking(what: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{what} with the other ranks failed: {str(error)[:300]}") from error


@dataclass(frozen=True)
class ParallelGroup:
    """`rank` counts from 0 to `world_size` - 1; the two process groups are None for a group of one.

    `device_group` carries tensors of the model's device, `host_group` those of the host.
    """

    rank: int = 0
    world_size: int = 1
    device_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None

    @property
    def is_single(self) -> bool:
        """Whether there is nobody to talk to."""
        return self.world_size == 1

    @property
    def leads(self) -> bool:
        """Whether this rank decides what all do."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of every rank's `x`, in place; the same bits on all ranks."""
        if not self.is_single:
            with _talking("summing"):
                dist.all_reduce(x, group=self.device_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Every rank's `x`, [world_size, *x.shape]."""
        if self.is_single:
            return x[None]
        gathered = x.new_empty((self.world_size, *x.shape))
        with _talking("gathering"):
            dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self.device_group)
        return gathered

    def gather_columns(self, x: Tensor) -> Tensor:
        """Every rank's `x` side by side, rank 0's first: [..., n] to [..., world_size * n]."""
        if self.is_single:
            return x
        return self.all_gather(x).movedim(0, -2).flatten(-2)

    def broadcast_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Rank 0's numbers on every rank; all must give equally many."""
        if self.is_single:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._broadcast(tensor)
        return tensor.tolist()

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Rank 0's bytes on every rank; what the others give is ignored."""
        if self.is_single:
            return data
        (size,) = self.broadcast_numbers([len(data)])
        tensor = _tensor_of(data) if self.leads else torch.empty(size, dtype=torch.uint8)
        if size:
            self._broadcast(tensor)
        return tensor.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, in the order of ranks."""
        if self.is_single:
            return [data]
        sizes = self._gather_on_host(torch.tensor([len(data)]))
        largest = max(int(size) for size in sizes)
        padded = _tensor_of(data.ljust(largest, b"\0"))
        gathered = self._gather_on_host(padded) if largest else [padded] * self.world_size
        return [
            tensor.numpy().tobytes()[: int(size)]
            for tensor, size in zip(gathered, sizes, strict=True)
        ]

    def all_true(self, claim: bool) -> bool:
        """Whether every rank claims it."""
        if self.is_single:
            return claim
        return all(bool(told) for told in self._gather_on_host(torch.tensor([int(claim)])))

    def wait_for_all(self) -> None:
        """Return when every rank has come here; they may take as long as loading a model does."""
        if not self.is_single:
            with _talking("starting"):
                dist.monitored_barrier(timeout=timedelta(seconds=START_TIMEOUT_S))

    def part_of(self, size: int, what: str) -> range:
        """This rank's equal share of `size` things; ValueError where there is no such."""
        if size % self.world_size:
            raise ValueError(f"{what} {size} can't be shared evenly by {self.world_size} ranks")
        share = size // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def _gather_on_host(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with _talking("gathering"):
            dist.all_gather(gathered, tensor, group=self.host_group)
        return gathered

    def _broadcast(self, tensor: Tensor) -> None:
        with _talking("telling"):
            dist.broadcast(tensor, 0, group=self.host_group)


SINGLE: Final = ParallelGroup()
"""The group of a process that holds its model alone."""


def is_rank(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether `torchrun` started this process as one of several."""
    return int(environment.get("WORLD_SIZE", "1")) > 1


def device_of(device: torch.device, environment: Mapping[str, str] = os.environ) -> str:
    """This rank's device of a kind; raises ValueError where all were given the same one."""
    if device.type != "cuda":
        return str(device)
    if device.index:
        raise ValueError(f"device is {str(device)!r} for several ranks; say cuda, and each has one")
    return f"cuda:{environment['LOCAL_RANK']}"


def join_group(device_type: str, environment: Mapping[str, str] = os.environ) -> ParallelGroup:
    """The group that `torchrun` started this process in.

    On CUDA the process takes the device of its local rank. Waits until all ranks are there.
    """
    if device_type == "cuda":
        torch.cuda.set_device(int(environment["LOCAL_RANK"]))
    # The first group is for the start alone, so it may wait long; all else must not.
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_TIMEOUT_S))
    timeout = timedelta(seconds=TIMEOUT_S)
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    backend = "nccl" if device_type == "cuda" else "gloo"
    device_group = dist.new_group(backend=backend, timeout=timeout)
    return ParallelGroup(dist.get_rank(), dist.get_world_size(), device_group, host_group)


def leave_group(group: ParallelGroup) -> None:
    """Close the connections; the others may go on only to do the same."""
    if not group.is_single:
        dist.destroy_process_group()


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
