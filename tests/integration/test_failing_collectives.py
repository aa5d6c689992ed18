"""Two ranks, one of whose collective calls fails: both end, and nothing wrong was sent.

`LORADOCK_FAILING_COLLECTIVES=all` lets each call of the generations fail on each rank; otherwise
one call of each kind and module fails, on one of them.
"""

import os
from functools import partial
from pathlib import Path

import msgspec
import pytest

from loradock.messages.engine_options import (
    EngineOptions,
    EngineProcess,
    EngineStart,
    LoRAOptions,
)
from tests.support.parallel.failing_collective import (
    NO_CALL,
    TOKENS,
    FailingRank,
    RankRecord,
)
from tests.support.parallel.forked_processes import forker
from tests.support.parallel.processes import TINY
from tests.support.parallel.ranks import free_port
from tests.support.simulation.key_examples import engine_keys
from tests.support.waiting import HANG_S

MODULE = "tests.support.parallel.failing_collective"


def run_ranks(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failing: int, at: int
) -> tuple[list[int], list[RankRecord]]:
    """Return the exit status of both ranks and what they did; call `at` fails on one of them."""
    options = EngineProcess(
        start=EngineStart(
            connect=f"ipc://{directory}/s",
            model=str(TINY / "model"),
            adapter_roots=(str(TINY / "adapters"),),
            **engine_keys(directory),
        ),
        lora=LoRAOptions(max_lora_rank=64),
        engine=EngineOptions(device="cpu", max_num_batched_tokens=8),
    )
    fixed = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    processes = []
    for rank in range(2):
        for name, value in (fixed | {"RANK": str(rank), "LOCAL_RANK": str(rank)}).items():
            monkeypatch.setenv(name, value)
        output = directory / f"{rank}.json"
        given = FailingRank(at if rank == failing else NO_CALL, str(output), options)
        argument = msgspec.json.encode(given).decode()
        processes.append(forker(0, MODULE).start(MODULE, (argument,), directory / f"{rank}.log"))
    try:
        statuses = [process.wait(HANG_S) for process in processes]
    finally:
        for process in processes:
            process.kill()
    decode = partial(msgspec.json.decode, type=RankRecord)
    return statuses, [decode((directory / f"{rank}.json").read_bytes()) for rank in range(2)]


def chosen(sites: list[str]) -> list[tuple[int, int]]:
    """Return the calls that fail, each with its rank: in the middle of those of a module."""
    if os.environ.get("LORADOCK_FAILING_COLLECTIVES") == "all":
        return [(at, rank) for at in range(len(sites)) for rank in range(2)]
    places: dict[str, list[int]] = {}
    for at, site in enumerate(sites):
        places.setdefault(site.rpartition(".")[0], []).append(at)
    return [(calls[len(calls) // 2], number % 2) for number, calls in enumerate(places.values())]


def test_a_collective_that_fails_on_one_rank_ends_both_and_sends_no_wrong_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    statuses, [first, second] = run_ranks(tmp_path, monkeypatch, 0, NO_CALL)
    assert statuses == [0, 0], (tmp_path / "0.log").read_text()
    assert [len(tokens) for tokens in first.tokens.values()] == [TOKENS, TOKENS]
    assert len(first.sites) == len(second.sites)
    for at, failing in chosen(first.sites):
        where = f"call {at} on rank {failing}: {first.sites[at]}"
        statuses, records = run_ranks(tmp_path, monkeypatch, failing, at)
        assert statuses == [1, 1], where
        assert len(records[failing].sites) == at + 1, where
        for request, tokens in records[0].tokens.items():
            assert tokens == first.tokens[request][: len(tokens)], where
        assert records[0].ends == first.ends[: len(records[0].ends)], where
