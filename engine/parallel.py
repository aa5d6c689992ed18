"""One rank's view of a tensor-parallel group, over torch.distributed.

Every call is collective: all ranks must make the same calls in the same order, from one thread. If
a rank does not join a call, the call ends with `RankLost` within `TIMEOUT_S` on all others. A group
of one makes no calls, so that a single process needs no torch.distributed.

On CUDA, sums and gathers return before they have run. If a rank is lost meanwhile, NCCL's watchdog
finds it within `TIMEOUT_S`, prints the reason and aborts the process, which no Python code can turn
into `RankLost`. The engine's supervisor sees a process that has ended, as after any other crash.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

TIMEOUT_S: Final = 60.0
"""Longest wait of a call for the other ranks, once all have started."""

START_TIMEOUT_S: Final = 1800.0
"""Longest wait of the first ready rank for ranks that still load the model."""


class RankLost(Exception):  # noqa: N818 - named by what was found, as the engine's errors
    """Another rank ended, does not answer, or differs; the group can't continue."""


@contextmanager
def _collective_call(operation: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RankLost(f"{operation} with the other ranks failed: {str(error)[:300]}") from error


class ParameterShard(NamedTuple):
    """The part of a whole tensor that one rank holds: ranges of one dimension, in their order.

    `ranges` None: all of it. `is_zero`: zeros of the whole shape, because another rank holds it.
    """

    dimension: int = 0
    ranges: tuple[range, ...] | None = None
    is_zero: bool = False

    def indices(self, dimensions: int) -> Iterator[tuple[slice, ...]]:
        """Yield the index of each range in a tensor with this number of dimensions."""
        before = (slice(None),) * (self.dimension % dimensions)
        parts: tuple[slice, ...] = (slice(None),)
        if self.ranges is not None:
            parts = tuple(slice(part.start, part.stop) for part in self.ranges)
        for part in parts:
            yield (*before, part)

    def take(self, whole: Tensor) -> Tensor:
        """Return the part as a tensor of its own."""
        if self.is_zero:
            return torch.zeros_like(whole)
        parts = [whole[index] for index in self.indices(whole.ndim)]
        return torch.cat(parts, dim=self.dimension) if len(parts) > 1 else parts[0].clone()


WHOLE_PARAMETER: Final = ParameterShard()
"""All of a tensor."""


@dataclass(frozen=True)
class ParallelGroup:
    """A tensor-parallel group, with this process's `rank` in it, from 0 to `world_size` - 1.

    `device_group` transfers tensors on the model's device, `host_group` those on the host. Both are
    None for a group of one.
    """

    rank: int = 0
    world_size: int = 1
    device_group: dist.ProcessGroup | None = None
    host_group: dist.ProcessGroup | None = None

    @property
    def is_trivial(self) -> bool:
        """True if this process is the only one."""
        return self.world_size == 1

    @property
    def is_leader(self) -> bool:
        """True if this is rank 0, which decides for all."""
        return self.rank == 0

    def all_reduce(self, x: Tensor) -> Tensor:
        """Sum `x` over the ranks in place, to the same bits on all; return it."""
        if not self.is_trivial:
            with _collective_call("summing"):
                dist.all_reduce(x, group=self.device_group)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        """Return every rank's `x`: [world_size, *x.shape]."""
        if self.is_trivial:
            return x[None]
        gathered = x.new_empty((self.world_size, *x.shape))
        with _collective_call("gathering"):
            dist.all_gather(list(gathered.unbind()), x.contiguous(), group=self.device_group)
        return gathered

    def gather_columns(self, x: Tensor) -> Tensor:
        """Concatenate every rank's `x`, in rank order: [..., n] to [..., world_size * n]."""
        if self.is_trivial:
            return x
        return self.all_gather(x).movedim(0, -2).flatten(-2)

    def assemble(self, shard: ParameterShard, part: Tensor | None, whole: Tensor) -> Tensor:
        """Fill `whole`, zeros on every rank, from the `part` that each holds; return it.

        `shard`: where this rank's part is; None: it has none. Equal values of several ranks stay.
        """
        dimension = shard.dimension % whole.ndim
        holders = whole.new_zeros(whole.shape[dimension])
        if part is not None and not shard.is_zero:
            start = 0
            for index in shard.indices(whole.ndim):
                size = whole[index].shape[dimension]
                whole[index] = part.narrow(dimension, start, size)
                holders[index[-1]] = 1
                start += size
        counts = self.all_reduce(holders).view(-1, *[1] * (whole.ndim - 1 - dimension))
        return self.all_reduce(whole).div_(counts)

    def broadcast_numbers(self, numbers: Sequence[int]) -> list[int]:
        """Return rank 0's numbers; all ranks must pass the same count."""
        if self.is_trivial:
            return list(numbers)
        tensor = torch.tensor(numbers, dtype=torch.int64)
        self._broadcast(tensor)
        return tensor.tolist()

    def broadcast_bytes(self, data: bytes) -> bytes:
        """Return rank 0's bytes; those of the other ranks are ignored."""
        if self.is_trivial:
            return data
        (size,) = self.broadcast_numbers([len(data)])
        tensor = _tensor_of(data) if self.is_leader else torch.empty(size, dtype=torch.uint8)
        if size:
            self._broadcast(tensor)
        return tensor.numpy().tobytes()

    def gather_bytes(self, data: bytes) -> list[bytes]:
        """Return every rank's bytes, in rank order."""
        if self.is_trivial:
            return [data]
        sizes = self._gather_on_host(torch.tensor([len(data)]))
        largest = max(int(size) for size in sizes)
        padded = _tensor_of(data.ljust(largest, b"\0"))
        gathered = self._gather_on_host(padded) if largest else [padded] * self.world_size
        return [
            tensor.numpy().tobytes()[: int(size)]
            for tensor, size in zip(gathered, sizes, strict=True)
        ]

    def all_true(self, value: bool) -> bool:
        """Return the logical AND of every rank's `value`."""
        if self.is_trivial:
            return value
        return all(bool(one) for one in self._gather_on_host(torch.tensor([int(value)])))

    def wait_for_all(self) -> None:
        """Wait until every rank calls this, for at most `START_TIMEOUT_S`."""
        if not self.is_trivial:
            with _collective_call("starting"):
                dist.monitored_barrier(timeout=timedelta(seconds=START_TIMEOUT_S))

    def shard_range(self, size: int, name: str) -> range:
        """Return this rank's equal share of `range(size)`; ValueError if it can't be divided.

        `name` is that of `size` in the error's text.
        """
        if size % self.world_size:
            raise ValueError(f"{name} {size} can't be shared evenly by {self.world_size} ranks")
        share = size // self.world_size
        return range(self.rank * share, (self.rank + 1) * share)

    def _gather_on_host(self, tensor: Tensor) -> list[Tensor]:
        gathered = [torch.empty_like(tensor) for _ in range(self.world_size)]
        with _collective_call("gathering"):
            dist.all_gather(gathered, tensor, group=self.host_group)
        return gathered

    def _broadcast(self, tensor: Tensor) -> None:
        with _collective_call("broadcasting"):
            dist.broadcast(tensor, 0, group=self.host_group)


SINGLE: Final = ParallelGroup()
"""The group of a single process."""


def is_rank() -> bool:
    """Return whether `torchrun` started this process as one of several."""
    return int(os.environ.get("WORLD_SIZE", "1")) > 1


def device_of(device: torch.device) -> str:
    """Return this rank's device of a type; ValueError for a device with an index."""
    if device.type != "cuda":
        return str(device)
    if device.index:
        raise ValueError(
            f"device is {str(device)!r} for several ranks; use cuda, which has one per rank"
        )
    return f"cuda:{os.environ['LOCAL_RANK']}"


def join_group(device_type: str) -> ParallelGroup:
    """Join the group in which `torchrun` started this process, and wait for all ranks.

    On CUDA the process selects the device of its local rank.
    """
    if device_type == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    # Only the start waits for ranks that load a model; all other calls have the short timeout.
    dist.init_process_group("gloo", timeout=timedelta(seconds=START_TIMEOUT_S))
    timeout = timedelta(seconds=TIMEOUT_S)
    host_group = dist.new_group(backend="gloo", timeout=timeout)
    backend = "nccl" if device_type == "cuda" else "gloo"
    device_group = dist.new_group(backend=backend, timeout=timeout)
    return ParallelGroup(dist.get_rank(), dist.get_world_size(), device_group, host_group)


def leave_group(group: ParallelGroup) -> None:
    """Close the connections; the other ranks can then only do the same."""
    if not group.is_trivial:
        dist.destroy_process_group()


def _tensor_of(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
