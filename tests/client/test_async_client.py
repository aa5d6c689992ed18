"""Tests of the asyncio client: many tasks, and a controller that loses answers."""

import asyncio

import pytest

from loradock.client import AsyncClient, EngineGone, Timing, UnknownAdapter
from loradock.messages import events as ev
from loradock.messages import requests as rq
from tests.support.waiting import HANG_S

FAST = Timing(retry_s_min=0.05, retry_s_max=0.2, slack_s=0.1, lost_tokens_s=HANG_S)


def open_async(controller):
    return AsyncClient(controller.directory, timeout_s=HANG_S, timing=FAST)


def resumed(*epochs):
    return [ev.ControllerResumed(epoch) for epoch in epochs]


def test_many_tasks_share_a_client(controller):
    controller.lose = 5

    async def main():
        async with open_async(controller) as client:
            return await asyncio.gather(*(client.load("upper") for _ in range(200)))

    replies = asyncio.run(main())
    assert len({reply.request_id for reply in replies}) == 200
    assert {reply.state for reply in replies} == {"gpu-slot"}


def test_many_generations_stream_concurrently(controller):
    controller.lose_chunks = 4

    async def read(client, name):
        generation = await client.generate("p", name)
        text = "".join([chunk.text async for chunk in generation])
        assert await generation.text() == text
        return text, generation.result.adapter

    async def main():
        async with open_async(controller) as client:
            names = ["upper", None] * 20
            assert await asyncio.gather(*(read(client, name) for name in names)) == [
                ("one", name) for name in names
            ]

    asyncio.run(main())


def test_a_function_is_called_with_each_chunk_as_it_arrives(controller):
    async def main():
        async with open_async(controller) as client:
            chunks = []
            generation = await client.generate("p")
            result = await generation.read(chunks.append)
            assert "".join(chunk.text for chunk in chunks) == await generation.text() == "one"
            assert result is generation.result
            assert sum(len(chunk.tokens) for chunk in chunks) == result.output_tokens

            def refuse(chunk):
                raise ZeroDivisionError

            with pytest.raises(ZeroDivisionError):
                await (await client.generate("p")).read(refuse)
            # Other calls are not affected.
            assert await (await client.generate("p")).text() == "one"

    asyncio.run(main())


def test_errors_cancellation_and_closing_on_asyncio(controller):
    controller.answers[rq.LoadAdapter] = controller.answers[rq.Generate] = lambda request: None

    async def main():
        async with open_async(controller) as client:
            with pytest.raises(UnknownAdapter):
                await client.activate("nobody")
            with pytest.raises(EngineGone, match="no answer"):
                await client.load("upper", timeout_s=0.1)
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await client.load("upper")
            assert len(client._port.session) == 0
            async with await client.generate("p") as generation:
                await client.status()
                assert await generation.cancel()
            unsent = await client.generate("p")
            assert not await unsent.cancel()
            assert await unsent.text() == ""
            assert unsent.result.finish_reason == "cancelled"
            waiting = asyncio.create_task(client.load("upper"))
            await client.status()
        with pytest.raises(EngineGone, match="the client was closed"):
            await waiting
        with pytest.raises(ValueError, match="closed"):
            await client.status()

    asyncio.run(main())


def test_a_failed_task_settles_every_call(controller, monkeypatch):
    async def main():
        async with open_async(controller) as client:

            def broken(data, now):
                raise MemoryError("no more")

            monkeypatch.setattr(client._port.session, "receive", broken)
            with pytest.raises(EngineGone, match="no more"):
                await client.status()

    asyncio.run(main())


def test_an_unopened_client_is_refused(controller):
    async def main():
        client = open_async(controller)
        with pytest.raises(ValueError, match="async with"):
            await client.status()
        await client.close()

    asyncio.run(main())


def test_events_on_asyncio(controller):
    controller.publish(*resumed(1, 2))

    async def main():
        async with open_async(controller) as client:
            async with await client.events(since=0) as stream:
                controller.publish(*resumed(3), silently=True)
                assert [(await anext(stream)).seq for _ in range(3)] == [1, 2, 3]
                controller.publish(*resumed(4))
                assert (await anext(stream)).seq == stream.seq == 4
                assert await stream.next_within(0.0) is None
            past = await client.events(since=2, follow=False)
            assert [item.seq async for item in past] == [3, 4]

    asyncio.run(main())
