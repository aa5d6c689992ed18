"""A request ends with its client: as the gateway's protocol reports it, and under other servers."""

import asyncio

import pytest

from loradock.gateway.http.endpoint import CONNECTION, watch_of


class Lost:
    """A connection that the test loses."""

    def __init__(self, is_lost=False):
        self.has_received_all = True
        self.watch = None
        self.is_lost = is_lost

    def set_watch(self, watch):
        self.watch = watch
        if watch is not None and self.is_lost:
            watch.on_left()


async def watched(scope, receive, work):
    """Run `work` as a request does; return whether it ended because its client left."""
    watch = watch_of(scope, receive)
    try:
        await work
    except asyncio.CancelledError:
        if not watch.take_cancellation():
            raise
        return True
    finally:
        watch.end()
    return False


async def never():
    await asyncio.Event().wait()


async def disconnect():
    return {"type": "http.disconnect"}


async def no_message():
    await never()


def scope_of(connection):
    return {"extensions": {CONNECTION: connection}}


def test_a_lost_connection_ends_its_request():
    async def main():
        connection = Lost()
        task = asyncio.create_task(watched(scope_of(connection), no_message, never()))
        await asyncio.sleep(0)
        connection.watch.on_left()
        assert await task
        # The connection forgets the request.
        assert connection.watch is None

    asyncio.run(main())


def test_a_connection_that_was_lost_before_ends_its_request():
    assert asyncio.run(watched(scope_of(Lost(is_lost=True)), no_message, never()))


@pytest.mark.parametrize("scope", [{}, {"extensions": {}}, {"extensions": None}])
def test_without_the_extension_a_message_ends_the_request(scope):
    assert asyncio.run(watched(scope, disconnect, never()))


@pytest.mark.parametrize("scope", [{}, scope_of(Lost())])
def test_a_request_that_ends_in_time_is_not_cancelled(scope):
    assert not asyncio.run(watched(scope, no_message, asyncio.sleep(0)))


@pytest.mark.parametrize("has_left", [False, True])
def test_a_cancellation_by_the_server_is_not_taken_for_the_client(has_left):
    async def main():
        connection = Lost()
        task = asyncio.create_task(watched(scope_of(connection), no_message, never()))
        await asyncio.sleep(0)
        if has_left:
            connection.watch.on_left()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
