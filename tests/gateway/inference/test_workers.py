"""The threads that clients share: turns, and what is left of a turn that was abandoned."""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.gateway.http.endpoint import CLIENT
from loradock.gateway.inference.workers import INLINE_SIZE, PIECE_SIZE, Workers

LONG = INLINE_SIZE + 1


def run_of(workers: Workers, client: str, work: Callable[[], Any]) -> "asyncio.Task[Any]":
    async def run() -> Any:
        CLIENT.set(client)
        return await workers.run(LONG, work)

    return asyncio.create_task(run())


@given(st.lists(st.sampled_from("abcd"), max_size=24), st.integers(1, 4))
def test_a_client_has_one_thread_and_waits_for_one_piece_of_each_other(
    clients: list[str], threads: int
) -> None:
    begun: list[str] = []
    running: list[str] = []
    most = [0]
    lock = threading.Lock()

    def work(client: str) -> None:
        with lock:
            assert client not in running
            running.append(client)
            begun.append(client)
            most[0] = max(most[0], len(running))
        with lock:
            running.remove(client)

    async def all_of_them() -> None:
        workers = Workers(threads)
        tasks = [run_of(workers, client, partial(work, client)) for client in clients]
        await asyncio.gather(*tasks)
        workers.close()

    asyncio.run(all_of_them())
    assert sorted(begun) == sorted(clients)
    assert most[0] <= threads


def test_a_client_with_one_piece_does_not_wait_for_all_of_another() -> None:
    begun: list[str] = []

    async def scenario() -> None:
        workers = Workers(1)
        may_end = threading.Event()
        first = run_of(workers, "many", may_end.wait)
        many = [run_of(workers, "many", lambda: begun.append("many")) for _ in range(50)]
        one = run_of(workers, "one", lambda: begun.append("one"))
        await asyncio.sleep(0)
        may_end.set()
        await asyncio.gather(first, one, *many)
        workers.close()

    asyncio.run(scenario())
    assert begun.index("one") <= 1


def test_a_second_client_runs_while_the_first_occupies_its_thread() -> None:
    async def scenario() -> None:
        workers, may_end = Workers(2), threading.Event()
        busy = [run_of(workers, "busy", may_end.wait) for _ in range(10)]
        assert await run_of(workers, "other", lambda: "done") == "done"
        may_end.set()
        await asyncio.gather(*busy)
        workers.close()

    asyncio.run(scenario())


@pytest.mark.parametrize("when", ["waiting", "running"])
def test_an_abandoned_piece_leaves_its_place_to_others(when: str) -> None:
    async def scenario() -> None:
        workers, may_end = Workers(1), threading.Event()
        running = run_of(workers, "a", may_end.wait)
        waiting = run_of(workers, "a", lambda: None)
        await asyncio.sleep(0)
        abandoned = waiting if when == "waiting" else running
        abandoned.cancel()
        with suppress(asyncio.CancelledError):
            await abandoned
        may_end.set()
        assert await run_of(workers, "b", lambda: "done") == "done"
        workers.close()

    asyncio.run(scenario())


def test_what_is_short_runs_at_once() -> None:
    async def scenario() -> str:
        return await Workers().run(INLINE_SIZE, lambda: threading.current_thread().name)

    assert asyncio.run(scenario()) == threading.current_thread().name


def test_an_error_of_the_work_is_raised() -> None:
    async def scenario() -> None:
        workers = Workers()
        with pytest.raises(ZeroDivisionError):
            await workers.run(LONG, lambda: 1 / 0)
        workers.close()

    asyncio.run(scenario())


@given(st.lists(st.integers(0, PIECE_SIZE // 2), max_size=12))
def test_texts_share_pieces_and_keep_their_order(sizes: list[int]) -> None:
    texts = ["x" * size for size in sizes]

    async def scenario() -> list[int]:
        workers = Workers()
        try:
            return await workers.map(len, texts)
        finally:
            workers.close()

    assert asyncio.run(scenario()) == sizes
