"""Processes that are forked from one that has imported their modules: a start takes no imports.

`python -m tests.support.parallel.forked_processes MODULE...` imports the modules and waits for
orders. A forked process has its own pid and output, the environment and the limits of the test, and
runs a module's `main`. So a test that starts hundreds of processes spends its time on what they do.
"""

import atexit
import gc
import importlib
import os
import resource
import select
import signal
import subprocess
import sys
import threading
from functools import cache
from pathlib import Path

import msgspec
from msgspec import Struct

ROOT = Path(__file__).parents[3]

_LIMITED = (resource.RLIMIT_FSIZE, resource.RLIMIT_NOFILE)


class Start(Struct, tag=True):
    """Fork a process that runs the `main` of a module; answered with its pid."""

    module: str
    arguments: tuple[str, ...]
    environment: dict[str, str]
    limits: dict[int, tuple[int, int]]
    output: str


class Status(Struct, tag=True):
    """Answered with the exit status of a process, None while it runs."""

    pid: int


class ForkedProcess:
    """A process of a `Forker`, with the methods of `subprocess.Popen`."""

    def __init__(self, forker: "Forker", pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._forker = forker
        self._fd = os.pidfd_open(pid)

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self._forker.send(Status(self.pid))
            if self.returncode is not None:
                os.close(self._fd)
        return self.returncode

    def wait(self, timeout_s: float | None = None) -> int:
        if self.returncode is None:
            ended = select.poll()
            ended.register(self._fd, select.POLLIN)
            if not ended.poll(None if timeout_s is None else 1000 * timeout_s):
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout_s or 0.0)
        status = self.poll()
        assert status is not None
        return status

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)


class Forker:
    """The process that forks others; it ends them when this process ends."""

    def __init__(self, *modules: str) -> None:
        self._lock = threading.Lock()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.parallel.forked_processes", *modules],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._orders, self._answers = self._process.stdin, self._process.stdout
        atexit.register(self.close)

    def start(self, module: str, arguments: tuple[str, ...], output: Path) -> ForkedProcess:
        """Start a process whose standard output and errors are appended to a file."""
        limits = {kind: resource.getrlimit(kind) for kind in _LIMITED}
        order = Start(module, arguments, dict(os.environ), limits, str(output))
        pid = self.send(order)
        assert pid is not None
        return ForkedProcess(self, pid)

    def send(self, order: Start | Status) -> int | None:
        """Return the answer to an order."""
        with self._lock:
            self._orders.write(msgspec.json.encode(order) + b"\n")
            self._orders.flush()
            return msgspec.json.decode(self._answers.readline(), type=int | None)

    def close(self) -> None:
        """End all processes that were forked."""
        self._orders.close()
        self._process.wait()
        self._answers.close()


@cache
def forker(number: int, *modules: str) -> Forker:
    """Return a forker of these modules; each number has another seed of hashes."""
    del number
    return Forker(*modules)


def _fork(order: Start) -> int:
    pid = os.fork()
    if pid:
        return pid
    output = os.open(order.output, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    for fd, source in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
        os.dup2(source, fd)
    for kind, limit in order.limits.items():
        resource.setrlimit(kind, limit)
    os.environ.clear()
    os.environ.update(order.environment)
    sys.argv = [order.module, *order.arguments]
    # The interpreter ends as usual, with the threads that write the log.
    sys.exit(sys.modules[order.module].main())


def main() -> None:
    for module in sys.argv[1:]:
        importlib.import_module(module)
    gc.freeze()
    running: set[int] = set()
    for line in sys.stdin.buffer:
        order = msgspec.json.decode(line, type=Start | Status)
        answer: int | None
        if isinstance(order, Start):
            answer = _fork(order)
            running.add(answer)
        else:
            pid, status = os.waitpid(order.pid, os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
            running -= {pid}
        print(msgspec.json.encode(answer).decode(), flush=True)
    for pid in running:
        os.kill(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
