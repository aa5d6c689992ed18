"""Copies that complete once every rank has completed them."""

import msgspec
import torch

from loradock.engine.errors import code_of, error_of, text_of
from loradock.engine.parallel import ParallelGroup
from loradock.engine.residency.copier import Copier, Copy
from loradock.messages.errors import ErrorCode


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
        """Whether it has ended on every rank."""
        return self._group.all_true(self._copy.is_done())

    def wait(self) -> None:
        """Block until it has ended on every rank; raises the error of this rank, else the first."""
        error: Exception | None = None
        try:
            self._copy.wait()
        except Exception as raised:
            # The other ranks have to receive any error before it propagates here.
            error = raised
        report = b"" if error is None else msgspec.msgpack.encode((code_of(error), text_of(error)))
        reports = self._group.gather_bytes(report)
        if error is not None:
            raise error
        if first := next(filter(None, reports), None):
            code, text = msgspec.msgpack.decode(first, type=tuple[ErrorCode, str])
            raise error_of(code, text)
