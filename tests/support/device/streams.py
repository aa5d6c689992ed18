"""Streams, events and the host as vector clocks, and the accesses of memory that they order.

Two accesses of the same bytes, of which one writes, are a race unless the later one's stream, or
the host, had waited for the earlier one. The order in which Python ran them doesn't matter.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import count
from typing import Final, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.support.device.record import RECORD, site

DEVICE: Final = torch.device("cuda", 0)
_ACCESSES_MAX: Final = 200
_PENDING_QUERIES: Final = 2
"""The queries of an event that find it pending, if nothing waits for it."""

Interval = tuple[int, int]
"""The first byte of a storage, and the first after the last."""


class Clock(dict[int, int]):
    """The launches of each stream that are known to have ended, or to be ordered before."""

    def join(self, other: "Clock") -> None:
        """Know what the other clock knows."""
        for stream, launches in other.items():
            self[stream] = max(self.get(stream, 0), launches)


HOST: Final = Clock()


class Stream:
    """A stream that is ordered with others by waits alone, as streams of PyTorch are."""

    _numbers: Final = count(1)

    def __init__(self, device: object = None, priority: int = 0, **_: object) -> None:
        self.id = next(self._numbers)
        self.clock = Clock()
        self.device = DEVICE
        self.cuda_stream = self.id

    def launch(self) -> int:
        """Order a launch after everything that the host has waited for; return its number."""
        self.clock.join(HOST)
        self.clock[self.id] = self.clock.get(self.id, 0) + 1
        return self.clock[self.id]

    def wait_stream(self, other: "Stream") -> None:
        MEMORY.sweep()
        self.clock.join(other.clock)

    def wait_event(self, event: "Event") -> None:
        MEMORY.sweep()
        self.clock.join(event.clock)

    def record_event(self, event: "Event | None" = None) -> "Event":
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self) -> None:
        HOST.join(self.clock)
        host_waits("stream.synchronize")

    def query(self) -> bool:
        return True

    def __enter__(self) -> "Stream":
        self._entered = use_stream(self)
        self._entered.__enter__()
        return self

    def __exit__(self, *raised: object) -> None:
        self._entered.__exit__(*raised)


class Event:
    """A point of a stream; pending for some queries unless the host waits for it."""

    def __init__(self, *_: object, **__: object) -> None:
        self.clock = Clock()
        self._queries_left = 0

    def record(self, stream: Stream | None = None) -> None:
        self.clock = Clock((stream or current_stream()).clock)
        self._queries_left = _PENDING_QUERIES

    def query(self) -> bool:
        if self._queries_left:
            self._queries_left -= 1
            return False
        HOST.join(self.clock)
        return True

    def synchronize(self) -> None:
        self._queries_left = 0
        HOST.join(self.clock)

    def wait(self, stream: Stream | None = None) -> None:
        (stream or current_stream()).wait_event(self)

    def elapsed_time(self, other: "Event") -> float:
        return 1.0


class _Thread(threading.local):
    stream: Stream


DEFAULT: Final = Stream()
_thread: Final = _Thread()


def current_stream(device: object = None) -> Stream:
    """Return the calling thread's current stream."""
    return getattr(_thread, "stream", DEFAULT)


@contextmanager
def use_stream(stream: Stream | None) -> Iterator[None]:
    """Make a stream the current one of the calling thread."""
    before = current_stream()
    _thread.stream = stream or before
    try:
        yield
    finally:
        _thread.stream = before


def host_waits(what: str) -> None:
    """Record that the host waits for the device."""
    RECORD.waits[what, site()] += 1
    if capture.is_active:
        RECORD.error("the host waits during a capture", what)


def host_reads(what: str) -> None:
    """Record that the host waits for a value of the current stream."""
    HOST.join(current_stream().clock)
    RECORD.reads[what, site()] += 1
    if capture.is_active:
        RECORD.error("the host reads a value during a capture", what)


class _Capture:
    is_active = False


capture: Final = _Capture()


class Access(NamedTuple):
    """A launch of a stream that read or wrote some bytes of a storage."""

    intervals: tuple[Interval, ...]
    stream: Stream
    launch: int
    site: str


class Allocation:
    """The accesses of one storage; `stream` is that of its allocation, None for host memory."""

    def __init__(self, storage: torch.UntypedStorage, stream: Stream | None) -> None:
        self.storage = StorageWeakRef(storage)
        self.stream = stream
        self.reads: list[Access] = []
        self.writes: list[Access] = []
        self.recorded: set[Stream] = set()
        self._site = site()

    def conflicts(self, intervals: tuple[Interval, ...], is_write: bool) -> Iterator[Access]:
        """Yield earlier accesses of the same bytes; reads only if this access writes."""
        for access in (*self.writes, *(self.reads if is_write else ())):
            if any(a < d and c < b for a, b in access.intervals for c, d in intervals):
                yield access

    def add(self, access: Access, is_write: bool) -> None:
        """Add an access; it replaces those of the same stream that it covers."""
        accesses = self.writes if is_write else self.reads
        first, last = access.intervals[0][0], access.intervals[-1][1]
        covers = len(access.intervals) == 1
        accesses[:] = [
            old
            for old in accesses
            if not (
                covers
                and old.stream is access.stream
                and first <= old.intervals[0][0]
                and old.intervals[-1][1] <= last
            )
        ][-_ACCESSES_MAX:]
        accesses.append(access)

    def check_free(self) -> None:
        """Report a stream that can still use the memory, which the allocator already reuses."""
        for access in (*self.reads, *self.writes):
            known = self.stream is None or access.stream in (self.stream, *self.recorded)
            if not known and self.stream.clock.get(access.stream.id, 0) < access.launch:
                text = "freed while another stream can use it (record_stream is missing)"
                RECORD.errors[text, f"{self._site} USED BY {access.site}"] += 1
                return


class Memory:
    """Every storage that the device reads or writes, by its address."""

    def __init__(self) -> None:
        self._allocations: dict[int, Allocation] = {}
        self._shared: dict[int, Allocation] = {}
        self._lock = threading.RLock()

    def find(self, tensor: Tensor) -> Allocation | None:
        """Return a living storage's accesses, or None if the device has not used it."""
        found = self._allocations.get(tensor.untyped_storage().data_ptr())
        return None if found is None or found.storage.expired() else found

    def of(self, tensor: Tensor, on_device: bool = True) -> Allocation:
        """Return a storage's accesses; it is new if the address was freed and reused."""
        found = self.find(tensor)
        if found is None:
            self.sweep()
            storage = tensor.untyped_storage()
            found = Allocation(storage, current_stream() if on_device else None)
            self._allocations[storage.data_ptr()] = found
        return found

    def access(
        self,
        tensor: Tensor,
        is_write: bool,
        launch: int,
        what: str,
        intervals: tuple[Interval, ...] | None = None,
        on_device: bool = True,
    ) -> None:
        """Add an access of the current stream, and report the unordered ones that conflict."""
        intervals = intervals or _intervals_of(tensor)
        if not intervals:
            return
        stream = current_stream()
        with self._lock:
            allocation = self.of(tensor, on_device)
            for other in allocation.conflicts(intervals, is_write):
                if (
                    other.stream is not stream
                    and stream.clock.get(other.stream.id, 0) < other.launch
                ):
                    verb = "write" if is_write else "read"
                    RECORD.error(
                        f"race: a {verb} of {what} is not ordered", f"AFTER {other.site} AT"
                    )
            allocation.add(Access(intervals, stream, launch, site()), is_write)
            if stream is not allocation.stream:
                self._shared[tensor.untyped_storage().data_ptr()] = allocation

    def host_access(self, tensor: Tensor, is_write: bool, what: str) -> None:
        """Report a copy in flight that reads or writes host memory which the host now uses."""
        allocation = self.find(tensor)
        if allocation is None or allocation.stream is not None:
            return
        for other in allocation.conflicts(_intervals_of(tensor), is_write):
            if HOST.get(other.stream.id, 0) < other.launch:
                verb = "writes" if is_write else "reads"
                text = f"race: the host {verb} memory of a copy in flight"
                RECORD.error(text, f"{what} AFTER {other.site} AT")

    def sweep(self) -> None:
        """Check the storages that were freed since the last time, before clocks advance."""
        with self._lock:
            for address, allocation in list(self._shared.items()):
                if allocation.storage.expired():
                    allocation.check_free()
                    del self._shared[address]


MEMORY: Final = Memory()


def _intervals_of(tensor: Tensor) -> tuple[Interval, ...]:
    """Return the bytes from a tensor's first element to its last."""
    if tensor.numel() == 0:
        return ()
    first = tensor.storage_offset()
    last = first + sum(
        (n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True)
    )
    size = tensor.element_size()
    return ((first * size, (last + 1) * size),)


class PinnedMemory:
    """The page-locked host memory: storages of PyTorch, and registered regions."""

    def __init__(self) -> None:
        self._storages: dict[int, StorageWeakRef] = {}
        self._regions: dict[int, int] = {}

    def add(self, tensor: Tensor) -> None:
        """Add a new storage."""
        storage = tensor.untyped_storage()
        self._storages[storage.data_ptr()] = StorageWeakRef(storage)
        RECORD.pinned[storage.nbytes()] += 1

    def register(self, address: int, size_bytes: int, flags: int = 0) -> int:
        """Register a region, as `cudaHostRegister` does."""
        self._regions[address] = size_bytes
        RECORD.pinned[size_bytes] += 1
        return 0

    def unregister(self, address: int) -> int:
        """Unregister a region by its address."""
        return 0 if self._regions.pop(address, None) is not None else 1

    def contains(self, tensor: Tensor) -> bool:
        """Return whether a tensor's memory is page-locked."""
        storage = self._storages.get(tensor.untyped_storage().data_ptr())
        if storage is not None and not storage.expired():
            return True
        at = tensor.data_ptr()
        return any(first <= at < first + size for first, size in self._regions.items())


PINNED: Final = PinnedMemory()


def access_all(tensors: Iterable[Tensor], is_write: bool, launch: int, what: str) -> None:
    """Add an access of each tensor by one launch of the current stream."""
    for tensor in tensors:
        MEMORY.access(tensor, is_write, launch, what)
