"""The ranks of one engine, started by `torchrun` and ended as one process.

What it is: torchrun's own main, and what its end means to whoever started it. What it is not: a
launcher of our own. One rule: the exit status is that of the rank that ended all, so that a
supervisor sees of several ranks what it would see of one; being told to end is no failure.

    python -m engine.worker.torchrun --standalone --nproc-per-node 2 -m engine.worker --connect ...
"""

import os
import signal
import sys
from collections.abc import Callable

from torch.distributed import run
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError


def main(launch: Callable[[], None] = run.main) -> int:
    """Run torchrun with this process's arguments; the exit status."""
    try:
        launch()
    except SignalException:
        return 0
    except ChildFailedError as error:
        return _status_of(error)
    return 0


def _status_of(error: ChildFailedError) -> int:
    """The status of a rank that was killed, before those that missed it; else the first one."""
    killed = [end.exitcode for end in error.failures.values() if end.exitcode < 0]
    first: int = error.get_first_failure()[1].exitcode
    return next((code for code in killed if code != -signal.SIGTERM), first)


def end(status: int) -> None:
    """End this process with a rank's exit status; a negative one is the signal that ended it."""
    if status < 0:
        # Without the default handler torchrun's own would make another end of it.
        if -status not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    end(main())
