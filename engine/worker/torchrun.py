"""The ranks of one engine: `torchrun`, with the exit status of the rank that ended first.

A supervisor therefore gets the same status as from an engine of one process. If a signal to
`torchrun` ends the engine, the status is 0.
`loradock.processes.subprocesses.engine_command` makes its command line.
"""

import os
import signal
import sys
from collections.abc import Callable

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(launch: Callable[[], None] = run.main) -> int:
    """Run torchrun with this process's arguments; return the exit status."""
    try:
        launch()
    except SignalException:
        return 0
    except ChildFailedError as error:
        return _status_of(error)
    return 0


def _status_of(error: ChildFailedError) -> int:
    """Return the status of a rank that was killed, as the others fail after it; else the first."""
    killed = [end.exitcode for end in error.failures.values() if end.exitcode < 0]
    first: int = error.get_first_failure()[1].exitcode
    return next((code for code in killed if code != -signal.SIGTERM), first)


def end(status: int) -> None:
    """End this process with a rank's exit status; a negative one is the signal that ended it."""
    if status < 0:
        # The handlers of torchrun would turn the signal into another status.
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    end(main())
