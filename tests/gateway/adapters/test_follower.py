"""The table of adapters, and the task that follows the controller."""

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from loradock.client import AsyncClient, EngineGone
from loradock.gateway.adapters.follower import RECENT_EVENTS, AdapterTable, Follower
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.views import AdapterUse
from tests.support.gateway.served import Served, serve_gateway
from tests.support.simulation.message_examples import example_of
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import HANG_S, wait_until


def a_table(*views: Any, seq: int = 0) -> AdapterTable:
    table = AdapterTable()
    table.reset(rq.AdaptersListed("", views, seq))
    return table


def apply(table: AdapterTable, *happened: Any) -> None:
    for event in happened:
        table.apply(ev.Published((table.seq or 0) + 1, 0, event))


@pytest.mark.parametrize(
    ("event", "state", "slot"),
    [
        (ev.AdapterCached("a"), "cpu-cached", -1),
        (ev.AdapterPinned("a"), "pinned", -1),
        (ev.AdapterActivated("a", 3, 9), "gpu-slot", 3),
        (ev.AdapterDeactivated("a", 2), "pinned", -1),
        (ev.AdapterUnpinned("a"), "cpu-cached", -1),
        (ev.AdapterEvicted("a", "policy"), "evicted", -1),
    ],
)
def test_an_event_changes_the_state_at_once(event: Any, state: str, slot: int) -> None:
    table = a_table(view("a"), view("b"))
    apply(table, event)
    assert (table.views["a"].state, table.views["a"].slot) == (state, slot)
    assert table.views["b"] == view("b")
    assert table.stale == {"a"}


def test_holds_are_followed() -> None:
    table = a_table(view("a"))
    apply(table, ev.AdapterHeld("a"))
    assert table.views["a"].held
    apply(table, ev.AdapterReleased("a"))
    assert not table.views["a"].held


def test_unknown_names_are_read_again_and_removed_ones_forgotten() -> None:
    table = a_table()
    apply(table, ev.AdapterAccepted("new", "ab", 8, 100), ev.AdapterCached("new"))
    assert table.views == {}
    assert table.stale == {"new"}
    table.update("new", view("new"))
    assert table.stale == set()
    apply(table, ev.AdapterRemoved("new"))
    assert table.stale == {"new"}
    table.update("new", None)
    assert table.views == {}


@pytest.mark.parametrize(
    "event",
    [ev.EngineAttached("e", "m"), ev.EngineDetached("e", "killed"), ev.ControllerResumed(2)],
)
def test_everything_is_read_again_after_a_restart(event: Any) -> None:
    table = a_table(view("a"))
    apply(table, event)
    assert table.needs_list
    table.reset(rq.AdaptersListed("", (view("b"), view("c", retired=True)), 5))
    assert not table.needs_list
    assert list(table.views) == ["b"]
    # The stream continues at its own position.
    assert table.seq == 1


def test_totals_are_sums_of_events() -> None:
    table = a_table(view("a"))
    apply(
        table,
        *(ev.AdapterCached("a"), ev.AdapterPinned("a"), ev.AdapterActivated("a", 0, 1)),
        *(ev.AdapterEvicted("a", "policy"), ev.AdapterEvicted("a", "policy")),
        ev.AdapterFailed("a", "evicted", ErrorCode.NOT_FOUND, "x"),
        *(ev.GenerationFinished("a", "stop", 3, 4), ev.GenerationFinished("", "stop", 1, 1)),
        ev.PoolingFinished("a", "embed", "done", 2, 7),
    )
    totals = table.totals
    assert (totals.loads, totals.stagings, totals.activations) == (1, 1, 1)
    assert totals.evictions == {"policy": 2}
    assert totals.failures == {"L002": 1}
    assert totals.requests == {"a": {"stop": 1, "done": 1}, "": {"stop": 1}}
    assert (totals.prompt_tokens, totals.output_tokens) == (11, 5)


def test_requests_are_counted_of_known_adapters_only() -> None:
    table = a_table(*(view(f"a{number}") for number in range(6)))

    def finish(*names: str) -> None:
        apply(table, *(ev.GenerationFinished(name, "stop", 1, 1) for name in names))

    finish("", *(f"a{number}" for number in range(6)))
    for number in range(3):
        apply(table, ev.AdapterRemoved(f"a{number}"))
        # A request that came before its removal can still end.
        finish(f"a{number}")
        table.update(f"a{number}", None)
    assert table.totals.requests.keys() == {"", "a3", "a4", "a5"}
    # The events of a removal can be lost, and of many changes only the list is read.
    table.reset(rq.AdaptersListed("", (view("a5"),), 0))
    assert table.totals.requests == {"": {"stop": 1}, "a5": {"stop": 1}}


def test_recent_events_are_kept_for_readers() -> None:
    table = a_table(seq=10)
    assert table.events_after(10) == ()
    assert table.events_after(9) is None
    assert table.events_after(11) is None
    apply(table, *(ev.AdapterCached(f"a{number}") for number in range(3)))
    assert [published.seq for published in table.events_after(10) or ()] == [11, 12, 13]
    assert [published.seq for published in table.events_after(12) or ()] == [13]
    assert table.events_after(13) == ()
    assert table.events_after(9) is None
    apply(table, *(ev.AdapterCached("a") for _ in range(RECENT_EVENTS)))
    assert table.events_after(10) is None


def test_a_gap_ends_what_readers_can_continue_from() -> None:
    table = a_table(seq=10)
    apply(table, ev.AdapterCached("a"))
    table.on_gap(19)
    assert table.needs_list
    assert table.totals.gaps == 1
    assert table.events_after(11) is None
    table.apply(ev.Published(20, 0, ev.AdapterCached("a")))
    assert [published.seq for published in table.events_after(19) or ()] == [20]


def test_nothing_is_known_before_the_first_list() -> None:
    table = AdapterTable()
    assert table.events_after(0) is None
    assert not table.synced


def test_loads_are_measured_from_acceptance_to_the_host() -> None:
    table = a_table()

    def at(time_ns: int, event: Any) -> None:
        table.apply(ev.Published((table.seq or 0) + 1, time_ns, event))

    at(0, ev.AdapterAccepted("a", "ab", 8, 100))
    at(0, ev.AdapterAccepted("b", "ab", 8, 100))
    at(20_000_000, ev.AdapterCached("a"))
    # A failed load, a later one of known files, and a clock that was set back do not count.
    at(30_000_000, ev.AdapterFailed("b", "unregistered", ErrorCode.NOT_FOUND, "x"))
    at(40_000_000, ev.AdapterCached("b"))
    at(50_000_000, ev.AdapterCached("a"))
    at(60_000_000, ev.AdapterAccepted("c", "ab", 8, 100))
    at(10_000_000, ev.AdapterCached("c"))
    assert table.totals.load_s.sum == pytest.approx(0.02)
    assert table.totals.load_s.buckets()[-1] == ("+Inf", 1.0)


def test_views_that_were_read_are_kept_for_readers() -> None:
    table = a_table(view("a"), view("b"))
    count = table.update_count
    assert table.updated_after(count) == []
    table.update("a", view("a", "pinned"))
    table.update("a", view("a", "gpu-slot"))
    table.reset(rq.AdaptersListed("", (view("a", "gpu-slot"), view("b", "evicted")), 0))
    assert table.updated_after(count) == [view("a", "gpu-slot"), view("b", "evicted")]
    for _ in range(RECENT_EVENTS):
        table.update("a", view("a"))
    assert table.updated_after(count) is None
    assert table.updated_after(table.update_count - RECENT_EVENTS) == [view("a")]


def a_status(*uses: Any) -> Any:
    return msgspec.structs.replace(example_of(rq.StatusShown), uses=uses)


def test_requests_are_those_of_the_last_status() -> None:
    """No event reports that a request begins to wait, or that it ends to."""
    table = a_table(view("a"), view("b", waiting=4), view("c"))
    table.set_status(a_status(AdapterUse("a", 2, leases=3), AdapterUse("new", -1, waiters=1)))
    counts = {name: (one.leases, one.waiting) for name, one in table.views.items()}
    assert counts == {"a": (3, 0), "b": (0, 0), "c": (0, 0)}
    table.update("c", view("c", leases=7))
    count = table.update_count
    table.set_status(a_status(AdapterUse("a", 2, leases=3)))
    counts = {name: (one.leases, one.waiting) for name, one in table.views.items()}
    assert counts == {"a": (3, 0), "b": (0, 0), "c": (0, 0)}
    # Readers receive what has changed, and nothing else.
    assert [one.adapter for one in table.updated_after(count) or ()] == ["c"]


@pytest.fixture
def gateway(tmp_path: Path) -> Iterator[Served]:
    with StandIn(tmp_path) as controller, serve_gateway(controller) as served:
        yield served


def listed(gateway: Served) -> list[str]:
    return [card["id"] for card in gateway.get("/v1/models").json()["data"][1:]]


def metric(gateway: Served, line: str) -> bool:
    return f"\n{line}\n" in gateway.get("/metrics").text


def test_new_and_removed_adapters_are_seen(gateway: Served) -> None:
    controller = gateway.controller
    controller.adapters["new"] = view("new")
    controller.publish(ev.AdapterAccepted("new", "ab", 8, 100), ev.AdapterCached("new"))
    wait_until(lambda: "new" in listed(gateway))
    del controller.adapters["new"]
    controller.publish(ev.AdapterRemoved("new"))
    wait_until(lambda: "new" not in listed(gateway))


def test_lost_frames_are_fetched(gateway: Served) -> None:
    gateway.controller.publish(ev.AdapterEvicted("upper", "policy"), silently=True)
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 1.0'))


def test_each_event_is_counted_once_over_a_restart(gateway: Served) -> None:
    controller = gateway.controller
    controller.publish(ev.AdapterEvicted("upper", "policy"))
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 1.0'))
    controller.restart()
    controller.publish(ev.ControllerResumed(2), ev.AdapterEvicted("upper", "policy"))
    wait_until(lambda: metric(gateway, 'loradock_evictions_total{reason="policy"} 2.0'))


def test_many_changes_are_read_as_one_list(gateway: Served) -> None:
    controller = gateway.controller
    names = [f"many-{number}" for number in range(500)]
    controller.adapters = {name: view(name, "cpu-cached") for name in names}
    lists = len(controller.requests(rq.ListAdapters))
    controller.publish(*(ev.AdapterCached(name) for name in names))
    wait_until(lambda: len(listed(gateway)) == 500)
    assert len(controller.requests(rq.ListAdapters)) > lists
    assert len(controller.requests(rq.ShowAdapter)) == 0


class Answers(AsyncClient):
    """A client whose statuses are numbered, and answered once the test lets them."""

    def __init__(self) -> None:
        self.begun = 0
        self.released = asyncio.Semaphore(0)
        self.fails = False

    async def status(self, timeout_s: float | None = None, *, uses: bool = False) -> Any:
        assert uses
        self.begun += 1
        number = self.begun
        await self.released.acquire()
        if self.fails:
            raise EngineGone("no answer")
        return msgspec.structs.replace(example_of(rq.StatusShown), seq=number)


async def begun(client: Answers, count: int) -> None:
    while client.begun < count:
        await asyncio.sleep(0)


def test_readers_during_one_query_share_the_next() -> None:
    async def main() -> None:
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


def test_a_query_that_fails_is_not_shared() -> None:
    async def main() -> None:
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


def test_a_silent_controller_is_not_awaited_for_longer_than_the_bound() -> None:
    async def main() -> None:
        follower = Follower(Answers(), AdapterTable())
        found = await asyncio.gather(*(follower.status_now(0.01) for _ in range(100)))
        assert set(found) == {None}

    asyncio.run(main())


def test_without_the_controller_its_families_are_absent_and_those_of_the_gateway_stay(
    tmp_path: Path,
) -> None:
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
