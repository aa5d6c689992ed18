"""Two processes that form a tensor-parallel group and run cases for tests.

They are started once for many cases, because starting takes seconds. A case runs on all ranks, and
each rank returns its result or its error; after an error the processes continue.

A case is a function of a module that the ranks can import. It accepts the group and the test's
arguments, and returns a value that JSON can express.
"""

import importlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from loradock.engine.parallel import ParallelGroup, join_group, leave_group

ROOT = Path(__file__).parents[3]
Case = Callable[..., Any]


class Ranks:
    """The test's side: the processes of all ranks."""

    def __init__(self, world_size: int = 2) -> None:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(free_port()),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
        }
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.support.parallel.ranks"],
                cwd=ROOT,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def run(self, case: Case, **given: Any) -> list[Any]:
        """Return each rank's result, rank 0 first; raises `AssertionError` if one failed."""
        for child in self._children:
            order = [case.__module__, case.__name__, given]
            print(json.dumps(order), file=child.stdin, flush=True)
        answers = [json.loads(child.stdout.readline()) for child in self._children]
        for answer in answers:
            assert "error" not in answer, answer["error"]
        return [answer["result"] for answer in answers]

    def close(self) -> None:
        for child in self._children:
            child.stdin.close()
        for child in self._children:
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


@contextmanager
def ranks() -> Iterator[Ranks]:
    pair = Ranks()
    try:
        yield pair
    finally:
        pair.close()


def serve() -> None:
    """Run cases in a rank's process, until its input ends."""
    import torch  # noqa: PLC0415 - the test's process does not need it

    torch.set_num_threads(1)
    group = join_group("cpu")
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        module, name, given = json.loads(line)
        case = getattr(importlib.import_module(module), name)
        print(json.dumps(_run(case, group, given)), file=answers, flush=True)
    leave_group(group)
    # As in an engine's rank: the interpreter's cleanup would wait seconds for the other rank.
    sys.stderr.flush()
    os._exit(0)


def _run(case: Case, group: ParallelGroup, given: dict[str, Any]) -> dict[str, Any]:
    try:
        return {"result": case(group, **given)}
    except Exception as error:
        return {"error": f"rank {group.rank}: {type(error).__name__}: {error}"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


if __name__ == "__main__":
    serve()
