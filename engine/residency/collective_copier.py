"""Copies that complete once every rank has completed them."""

import msgspec
import torch

from engine.errors import code_of, error_of
from engine.parallel import ParallelGroup
from engine.residency.copier import Copier, Copy
from messages.errors import ErrorCode


class AgreedCopier:
    """A copier whose copies have ended when they have on all ranks."""

    def __init__(self, copier: Copier, group: ParallelGroup) -> None:
        self._copier = copier
        self._group = group

    def start(self, target: torch.Tensor, source: torch.Tensor) -> "AgreedCopy":
        """Begin this rank's copy."""
        return AgreedCopy(self._copier.start(target, source), self._group)

    def move(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy within this rank's device."""
        self._copier.move(target, source)

    def close(self) -> None:
        """Wait for what runs here."""
        self._copier.close()


class AgreedCopy:
    """One copy on each rank."""

    def __init__(self, copy: Copy, group: ParallelGroup) -> None:
        self._copy = copy
        self._group = group

    def is_done(self) -> bool:
        """Whether it has ended on every rank."""
        return self._group.all_true(self._copy.is_done())

    def wait(self) -> None:
        """Block until it has ended everywhere; raises what it raised, on whichever rank."""
        error: Exception | None = None
        try:
            self._copy.wait()
        except Exception as raised:
            # Whatever it is, the other ranks have to hear of it before it goes on its way.
            error = raised
        told = b"" if error is None else msgspec.msgpack.encode((code_of(error), str(error)))
        texts = self._group.gather_bytes(told)
        if error is not None:
            raise error
        if first := next(filter(None, texts), None):
            code, text = msgspec.msgpack.decode(first, type=tuple[ErrorCode, str])
            raise error_of(code, text)
