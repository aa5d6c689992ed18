"""Two processes that form a tensor-parallel group, and run cases for tests.

What it is: a pair that is started once for many cases, because starting costs seconds. What it is
not: the engine's own processes. One rule: a case runs on all ranks and tells of each what it found;
one that raises tells that, and the pair goes on.

A case is a function of `tests.support.parallel.layer_cases` or `tests.support.parallel.models` that takes the group and
what the test gives it, and returns what JSON can carry.
"""

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from engine.parallel import ParallelGroup, join_group, leave_group

ROOT = Path(__file__).parents[3]
Case = Callable[..., Any]


class Ranks:
    """The parent's end."""

    def __init__(self, module: str, world_size: int = 2) -> None:
        environment = os.environ | {
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": str(_free_port()),
            "WORLD_SIZE": str(world_size),
            "OMP_NUM_THREADS": "1",
        }
        self._children = [
            subprocess.Popen(
                [sys.executable, "-m", module],
                cwd=ROOT,
                env=environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(world_size)
        ]

    def run(self, case: str, **given: Any) -> list[Any]:
        """What each rank found, rank 0 first; raises AssertionError where one failed."""
        for child in self._children:
            print(json.dumps([case, given]), file=child.stdin, flush=True)
        told = [json.loads(child.stdout.readline()) for child in self._children]
        for answer in told:
            assert "error" not in answer, answer["error"]
        return [answer["found"] for answer in told]

    def close(self) -> None:
        for child in self._children:
            child.stdin.close()
            try:
                child.wait(10)
            except subprocess.TimeoutExpired:
                child.kill()
                child.wait()
            child.stdout.close()


@contextmanager
def ranks(module: str) -> Iterator[Ranks]:
    pair = Ranks(module)
    try:
        yield pair
    finally:
        pair.close()


def serve(cases: Mapping[str, Case]) -> None:
    """The children's end: run what is asked for until nothing more is."""
    import torch  # noqa: PLC0415 - the parent has no need of it

    torch.set_num_threads(1)
    group = join_group("cpu")
    answers, sys.stdout = sys.stdout, sys.stderr
    for line in sys.stdin:
        case, given = json.loads(line)
        print(json.dumps(_run(cases[case], group, given)), file=answers, flush=True)
    leave_group(group)


def _run(case: Case, group: ParallelGroup, given: Mapping[str, Any]) -> dict[str, Any]:
    try:
        return {"found": case(group, **given)}
    except Exception as error:
        return {"error": f"rank {group.rank}: {type(error).__name__}: {error}"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
