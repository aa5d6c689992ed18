"""Use of a client by one thread at a time, in the process that made it."""

import os
import threading
from types import TracebackType


class ExclusiveUse:
    """A context that one thread at a time may enter; it raises instead of waiting.

    The sockets of ZeroMQ must not be used by two threads, and do not work after a fork.
    """

    def __init__(self) -> None:
        self._pid = os.getpid()
        self._lock = threading.RLock()

    def check_process(self) -> None:
        """Raise `RuntimeError` in a process that was forked after the client was made."""
        if os.getpid() != self._pid:
            raise RuntimeError(
                f"this client was made in process {self._pid} and does not work in its fork "
                f"{os.getpid()}; make a client in each process"
            )

    def __enter__(self) -> None:
        self.check_process()
        if not self.enter_if_free():
            raise RuntimeError(
                "this client is in use by another thread; make a client in each thread"
            )

    def enter_if_free(self) -> bool:
        """Enter, unless another thread has; `leave` follows."""
        return self._lock.acquire(blocking=False)

    def leave(self) -> None:
        """Leave the context that was entered last."""
        self._lock.release()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.leave()
