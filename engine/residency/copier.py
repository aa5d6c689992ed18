"""Copies of bytes into the arena and within it: a copier per kind of device, or of several ranks.

`start` returns at once, and its copy runs concurrently with forward passes. `move` is ordered with
the forward passes: those launched earlier read the bytes before it, later ones the bytes after it.
"""

from concurrent.futures import Future, ThreadPoolExecutor
from typing import Protocol

import msgspec
import torch

from loradock.engine.errors import code_of, error_of
from loradock.engine.parallel import ParallelGroup
from loradock.messages.errors import ErrorCode


class Copy(Protocol):
    """One copy that was started."""

    def is_done(self) -> bool:
        """Return whether it has ended, with or without an error; never blocks."""
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
        """Return whether it has ended; never blocks."""
        return self._future.done()

    def wait(self) -> None:
        """Block until it has ended; raises what it raised."""
        self._future.result()


class ThreadCopier:
    """Copies into host memory on a dedicated thread.

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
        """Return whether it has ended; never blocks."""
        return bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """Block until it has ended."""
        self._event.synchronize()


class StreamCopier:
    """Copies from page-locked memory on a dedicated CUDA stream.

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


class CollectiveCopier:
    """A copier whose copies have ended once they have ended on every rank of `group`."""

    def __init__(self, copier: Copier, group: ParallelGroup) -> None:
        self._copier = copier
        self._group = group

    def start(self, target: torch.Tensor, source: torch.Tensor) -> "CollectiveCopy":
        """Begin this rank's copy."""
        return CollectiveCopy(self._copier.start(target, source), self._group)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy within this rank's device."""
        self._copier.move(target, source)

    def close(self) -> None:
        """Wait for this rank's running copies."""
        self._copier.close()


class CollectiveCopy:
    """One copy per rank; both methods are collective."""

    def __init__(self, copy: Copy, group: ParallelGroup) -> None:
        self._copy = copy
        self._group = group

    def is_done(self) -> bool:
        """Return whether it has ended on every rank."""
        return self._group.all_true(self._copy.is_done())

    def wait(self) -> None:
        """Block until it has ended on every rank; raises the error of this rank, else the first."""
        error: Exception | None = None
        try:
            self._copy.wait()
        except Exception as raised:
            # The other ranks have to receive any error before it propagates here.
            error = raised
        report = b"" if error is None else msgspec.msgpack.encode((code_of(error), str(error)))
        reports = self._group.gather_bytes(report)
        if error is not None:
            raise error
        if first := next(filter(None, reports), None):
            code, text = msgspec.msgpack.decode(first, type=tuple[ErrorCode, str])
            raise error_of(code, text)
