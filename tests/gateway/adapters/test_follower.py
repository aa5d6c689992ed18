"""The table follows the controller: new adapters, lost frames, restarts, and silence."""

import asyncio

import msgspec
import pytest

from loradock.client import EngineGone
from loradock.gateway.adapters.follower import AdapterTable, Follower
from loradock.messages import events as ev
from loradock.messages import requests as rq
from tests.support.gateway.served import serve_gateway
from tests.support.simulation.message_examples import example_of
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import HANG_S, wait_until


@pytest.fixture
def gateway(tmp_path):
    with StandIn(tmp_path) as controller, serve_gateway(controller) as served:
        yield served


def listed(gateway):
    return [card["id"] for card in gateway.get("/v1/models").json()["data"][1:]]


def metric(gateway, line):
    return f"\n{line}\n" in gateway.get("/metrics").text


def test_new_and_removed_adapters_are_seen(gateway):
    controller = gateway.controller
    controller.adapters["new"] = view("new")
    controller.publish(ev.AdapterAccepted("new", "ab", 8, 100), ev.AdapterCached("new"))
    wait_until(lambda: "new" in listed(gateway))
    del controller.adapters["new"]
    controller.publish(ev.AdapterRemoved("new"))
    wait_until(lambda: "new" not in listed(gateway))


def test_lost_frames_are_fetched(gateway):
    gateway.controller.publish(ev.AdapterEvicted("upper", "policy"), silently=True)
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 1.0'))


def test_each_event_is_counted_once_over_a_restart(gateway):
    controller = gateway.controller
    controller.publish(ev.AdapterEvicted("upper", "policy"))
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 1.0'))
    controller.restart()
    controller.publish(ev.ControllerResumed(2), ev.AdapterEvicted("upper", "policy"))
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 2.0'))


def test_many_changes_are_read_as_one_list(gateway):
    controller = gateway.controller
    names = [f"many-{number}" for number in range(500)]
    controller.adapters = {name: view(name, "cpu-cached") for name in names}
    lists = len(controller.requests(rq.ListAdapters))
    controller.publish(*(ev.AdapterCached(name) for name in names))
    wait_until(lambda: len(listed(gateway)) == 500)
    assert len(controller.requests(rq.ListAdapters)) > lists
    assert len(controller.requests(rq.ShowAdapter)) == 0


class Answers:
    """A client whose statuses are numbered, and answered once the test lets them."""

    def __init__(self):
        self.begun = 0
        self.released = asyncio.Semaphore(0)
        self.fails = False

    async def status(self, timeout_s, *, uses):
        assert uses
        self.begun += 1
        number = self.begun
        await self.released.acquire()
        if self.fails:
            raise EngineGone("no answer")
        return msgspec.structs.replace(example_of(rq.StatusShown), seq=number)


async def begun(client, count):
    while client.begun < count:
        await asyncio.sleep(0)


def test_readers_during_one_query_share_the_next():
    async def main():
        client = Answers()
        follower = Follower(client, AdapterTable())
        first = asyncio.create_task(follower.read_status(HANG_S))
        await begun(client, 1)
        # What they read has to be newer than their calls, so the answer to the first is too old.
        later = [asyncio.create_task(follower.read_status(HANG_S)) for _ in range(100)]
        await asyncio.sleep(0)
        client.released.release()
        await begun(client, 2)
        client.released.release()
        assert (await first).seq == 1
        assert {status.seq for status in await asyncio.gather(*later)} == {2}
        assert client.begun == 2

    asyncio.run(main())


def test_a_query_that_fails_is_not_shared():
    async def main():
        client = Answers()
        follower = Follower(client, AdapterTable())
        client.fails = True
        first = asyncio.create_task(follower.status_now(HANG_S))
        await begun(client, 1)
        second = asyncio.create_task(follower.read_status(HANG_S))
        await asyncio.sleep(0)
        client.released.release()
        assert await first is None
        client.fails = False
        await begun(client, 2)
        client.released.release()
        assert (await second).seq == 2

    asyncio.run(main())


def test_a_silent_controller_is_not_awaited_for_longer_than_the_bound():
    async def main():
        follower = Follower(Answers(), AdapterTable())
        found = await asyncio.gather(*(follower.status_now(0.01) for _ in range(100)))
        assert set(found) == {None}

    asyncio.run(main())


def test_without_the_controller_its_families_are_absent_and_those_of_the_gateway_stay(tmp_path):
    with StandIn(tmp_path) as controller, serve_gateway(controller) as served:
        served.post("/v1/completions", {"prompt": "p"})
        present = served.get("/metrics").text
        controller.stop()
        try:
            absent = served.get("/metrics").text
        finally:
            controller.start()
        wait_until(lambda: metric(served, "loradock_controller_up 1.0"))
    for name in ("vllm:num_requests_running", "vllm:lora_requests_info", "loradock_leases"):
        assert (f"\n{name}" in present, f"\n{name}" in absent) == (True, False)
    assert "\nloradock_controller_up 0.0\n" in absent
    assert 'vllm:generation_tokens_total{engine="0",model_name="tiny"} 3.0' in absent
