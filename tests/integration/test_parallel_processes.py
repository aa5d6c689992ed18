"""An engine of two ranks, started by `loradock serve`: its outputs, and its end.

Both servers are started together and shared by the tests, because starting a rank takes seconds.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from loradock.client import Client
from loradock.messages.errors import AdapterNotFound
from loradock.messages.requests import StatusShown
from tests.support.engine.serve_process import serve, status_once, wait_for_end
from tests.support.parallel.processes import ADAPTERS
from tests.support.waiting import HANG_S

OPTIONS = ("--device", "cpu", "--max-lora-rank", "64", "--max-loras", "2", "--max-cpu-loras", "16")
PROMPT = "parallel"


def is_up(status: StatusShown) -> bool:
    return bool(status.engine_id)


def ranks_of(directory: Path) -> dict[int, int]:
    """Return the pids of an engine's ranks, by rank, from the environment of each process."""
    found = {}
    for process in Path("/proc").iterdir():
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        variables = dict(word.split(b"=", 1) for word in environment if b"=" in word)
        if b"RANK" in variables and any(bytes(directory) in word for word in words):
            found[int(variables[b"RANK"])] = int(process.name)
    return found


def texts(directory: Path) -> dict[str, str]:
    """Return each adapter's and the base model's output; there are more adapters than slots."""
    with Client(directory, timeout_s=HANG_S) as client:
        adapters: dict[str, str | None] = {name: name for name in ADAPTERS} | {"base": None}
        return {
            name: client.generate(PROMPT, adapter=adapter, max_tokens=16).text()
            for name, adapter in adapters.items()
        }


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Path]]:
    """The directories of a server with one rank and of one with two."""
    one, two = (tmp_path_factory.mktemp(name) / "d" for name in ("one", "two"))
    sharded = ("--tensor-parallel-size", "2", "--fully-sharded-loras")
    with serve(one, *OPTIONS), serve(two, *OPTIONS, *sharded) as of_two:
        for directory in (one, two):
            status_once(directory, is_up)
            with Client(directory, timeout_s=HANG_S) as client:
                for name in ADAPTERS:
                    client.load(name)
        yield one, two
        pids = [*ranks_of(two).values(), status_once(two, is_up).controller_pid]
        of_two.send_signal(signal.SIGTERM)
        assert of_two.wait(HANG_S) == 0
        wait_for_end(*pids)


def test_two_ranks_generate_what_one_generates(directories: tuple[Path, Path]) -> None:
    one, two = directories
    outputs = texts(two)
    assert outputs == texts(one)
    assert len(set(outputs.values())) > len(ADAPTERS) / 2


def test_all_ranks_use_rank_0s_samples(directories: tuple[Path, Path]) -> None:
    outputs = []
    for directory in directories:
        with Client(directory, timeout_s=HANG_S) as client:
            drawn = client.generate(PROMPT, adapter="upper", max_tokens=16, temperature=2.0, seed=3)
            outputs.append(drawn.text())
            # Without a seed every process draws for itself, and rank 0's tokens are used by all.
            client.generate(PROMPT, adapter="upper", max_tokens=16, temperature=2.0).text()
    assert outputs[0] == outputs[1]


def test_a_failure_occurs_on_all_ranks_and_changes_nothing(directories: tuple[Path, Path]) -> None:
    with Client(directories[1], timeout_s=HANG_S) as client:
        with pytest.raises(AdapterNotFound):
            client.load("unknown")
        assert client.generate(PROMPT, adapter="upper", max_tokens=4).text()


@pytest.mark.parametrize(("rank", "number"), [(1, signal.SIGKILL), (0, signal.SIGSTOP)])
def test_a_rank_that_dies_or_is_stopped_takes_its_engine_down_and_a_new_one_serves(
    directories: tuple[Path, Path], rank: int, number: signal.Signals
) -> None:
    one, two = directories
    before = status_once(two, is_up)
    ranks = ranks_of(two)
    assert sorted(ranks) == [0, 1]
    assert ranks[0] == before.engine_pid
    os.kill(ranks[rank], number)
    status_once(two, lambda status: status.engine_id != before.engine_id)
    wait_for_end(*ranks.values())
    status_once(two, lambda status: status.engine_id not in ("", before.engine_id))
    assert texts(two) == texts(one)
