"""Copies of bytes into the arena and within it: one copier per kind of device.

`start` returns at once, and its copy runs concurrently with forward passes. `move` is ordered with
the forward passes: those launched earlier read the bytes before it, later ones the bytes after it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import torch


class Copy(Protocol):
    """One copy that was started."""

    def is_done(self) -> bool:
        """Whether it has ended, with or without an error; never blocks."""
        ...

    def wait(self) -> None:
        """Block until it has ended; raises what it raised."""
        ...


class Copier(Protocol):
    """Copies bytes into one device's memory."""

    def start(self, target: torch.Tensor, source: torch.Tensor) -> Copy:
        """Begin to copy host memory into the arena, after every forward pass launched so far."""
        ...

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy within the device; `target` and `source` don't overlap."""
        ...

    def close(self) -> None:
        """Wait for running copies and release the copier's resources."""
        ...


class ThreadCopy:
    """A copy on the thread of a `ThreadCopier`."""

    def __init__(self, future: Future[torch.Tensor]) -> None:
        self._future = future

    def is_done(self) -> bool:
        """Whether it has ended; never blocks."""
        return self._future.done()

    def wait(self) -> None:
        """Block until it has ended; raises what it raised."""
        self._future.result()


class ThreadCopier:
    """Copies into host memory on one thread of its own.

    `copy_` releases the interpreter's lock while it copies, so forward passes continue. They never
    read a copy's target, because its row is published only once the copy is complete.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="arena-copy")

    def start(self, target: torch.Tensor, source: torch.Tensor) -> ThreadCopy:
        """Begin to copy `source` into `target`."""
        return ThreadCopy(self._pool.submit(target.copy_, source))

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy at once."""
        target.copy_(source)

    def close(self) -> None:
        """Wait for running copies and end the thread."""
        self._pool.shutdown()


class StreamCopy:
    """A copy on the stream of a `StreamCopier`; keeps its source alive until it is done."""

    def __init__(self, event: torch.cuda.Event, source: torch.Tensor) -> None:
        self._event = event
        self._source = source

    def is_done(self) -> bool:
        """Whether it has ended; never blocks."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until it has ended."""
        self._event.synchronize()


class StreamCopier:
    """Copies from page-locked memory on one CUDA stream of its own.

    The stream first waits for the forward passes that were launched before, because they may still
    read the bytes that are overwritten. Moves run on the stream of the forward passes.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def start(self, target: torch.Tensor, source: torch.Tensor) -> StreamCopy:
        """Begin to copy `source` into `target`."""
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            target.copy_(source, non_blocking=True)
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            event.record(self._stream)
        return StreamCopy(event, source)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy on the stream of the forward passes; returns before the copy has run."""
        target.copy_(source, non_blocking=True)

    def close(self) -> None:
        """Wait for running copies."""
        self._stream.synchronize()


def copier_for(device: torch.device) -> Copier:
    """Return a copier for this kind of device."""
    return StreamCopier(device) if device.type == "cuda" else ThreadCopier()
