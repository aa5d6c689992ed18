"""Clients in the wrong hands: a forked process, a second thread, generations that are not kept."""

import asyncio
import os
import threading

import pytest

from loradock import AsyncClient, EngineGone
from loradock.messages import requests as rq
from tests.support.simulation.client_examples import FAST
from tests.support.simulation.standin_controller import view
from tests.support.waiting import HANG_S, wait_until


def silent(request):
    """No answer; a first chunk for a generation."""
    if isinstance(request, rq.Generate):
        return rq.TokensStreamed(request.request_id, 0, (1,), "o")
    return None


def in_fork(action) -> str:
    """Return the text of the error that `action` raises in a forked process."""
    reader, writer = os.pipe()
    if os.fork() == 0:
        try:
            action()
            text = "no error"
        except RuntimeError as error:
            text = str(error)
        os.write(writer, text.encode())
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader) as report:
        text = report.read()
    os.wait()
    return text


def test_a_forked_client_raises_at_once_and_the_parent_goes_on(client):
    assert client.status().epoch == 1
    generation = client.generate("p")
    for action in (client.status, generation.text, lambda: client.generate("p")):
        assert "make a client in each process" in in_fork(action)
    assert generation.text() == "one"
    assert client.status().epoch == 1


def test_a_forked_asyncio_client_raises_at_once(controller):
    async def main():
        async with AsyncClient(controller.directory, timeout_s=HANG_S, timing=FAST) as client:
            await client.status()
            # The fork has no event loop; a coroutine runs to its first suspension.
            error = in_fork(lambda: client.status().send(None))
            assert "make a client in each process" in error
            assert (await client.status()).epoch == 1

    asyncio.run(main())


def test_a_second_thread_is_refused_while_the_first_is_in_a_call(client, controller):
    controller.answers[rq.LoadAdapter] = silent
    thread = threading.Thread(target=client.load, args=("upper",))
    thread.start()
    wait_until(lambda: controller.requests(rq.LoadAdapter))
    for action in (client.status, lambda: client.generate("p"), lambda: list(client.generate("p"))):
        with pytest.raises(RuntimeError, match="make a client in each thread"):
            action()
    del controller.answers[rq.LoadAdapter]
    thread.join()
    # One after the other, both may use it.
    assert client.status().epoch == 1


def cancelled(controller) -> set[str]:
    return {request.target for request in controller.requests(rq.CancelGeneration)}


def started(controller) -> set[str]:
    return {request.request_id for request in controller.requests(rq.Generate)}


def test_a_generation_that_is_dropped_closed_or_too_late_is_cancelled(client, controller):
    controller.answers[rq.Generate] = silent
    for _ in client.generate("dropped"):
        break
    with client.generate("closed") as generation:
        next(generation)
    late = client.generate("late", timeout_s=0.1)
    with pytest.raises(EngineGone):
        late.text()
    client.status()
    assert len(started(controller)) == 3
    wait_until(lambda: cancelled(controller) == started(controller))


def test_dropping_in_another_thread_cancels_with_the_next_call(client, controller):
    controller.answers[rq.Generate] = silent
    held = [client.generate("p")]
    controller.answers[rq.LoadAdapter] = silent
    thread = threading.Thread(target=client.load, args=("upper",))
    thread.start()
    wait_until(lambda: controller.requests(rq.LoadAdapter))
    held.clear()
    del controller.answers[rq.LoadAdapter]
    thread.join()
    client.status()
    wait_until(lambda: cancelled(controller) == started(controller))


def test_asyncio_generations_need_no_await_and_end_with_their_last_reference(controller):
    controller.answers[rq.Generate] = silent

    async def main():
        async with AsyncClient(controller.directory, timeout_s=HANG_S, timing=FAST) as client:
            async for chunk in client.generate("dropped"):
                assert chunk.text == "o"
                break
            waiting = asyncio.create_task(client.generate("ended by a timeout").text())
            while len(started(controller)) < 2:
                await asyncio.sleep(0.001)
            waiting.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            del waiting
            async with client.generate("closed") as generation:
                await anext(generation)
            del controller.answers[rq.Generate]
            assert "".join([chunk.text async for chunk in client.generate("p")]) == "one"
            assert await (await client.generate("p")).text() == "one"
            unused = client.generate("never used")
            assert unused.request_id == ""
            await client.status()
            while len(cancelled(controller)) < 3:
                await asyncio.sleep(0.001)

    asyncio.run(main())
    assert len(started(controller)) == 5


def test_a_list_counts_and_iterates(client, controller):
    views = (view("a"), view("b"))
    controller.answers[rq.ListAdapters] = lambda request: rq.AdaptersListed(
        request.request_id, views, 1
    )
    listed = client.list()
    assert len(listed) == 2
    assert [adapter.adapter for adapter in listed] == ["a", "b"]
