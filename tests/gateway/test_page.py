"""The page, and the events that it follows."""

import asyncio
import json
import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from loradock.gateway import page, web
from loradock.gateway.adapters.follower import AdapterTable
from loradock.gateway.http.streams import named_event
from loradock.gateway.page import Live, content_security_policy, snapshot_of
from loradock.messages import events as ev
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.views import AdapterUse
from tests.support.gateway.served import Served
from tests.support.simulation.message_examples import example_of
from tests.support.simulation.standin_controller import view
from tests.support.waiting import wait_until


def test_the_page_is_served_with_its_policy(served: Served) -> None:
    response = served.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert response.text == web.page()
    policy = response.headers["content-security-policy"]
    assert policy == content_security_policy(response.text)
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_page_refers_to_no_other_host() -> None:
    text = web.page()
    # The empty icon keeps browsers from requesting one.
    assert re.findall(r"(?:src|href|action)\s*=\s*\S+", text) == ['href="data:,">']
    # Names of XML are not fetched, nor is the charts' home in a comment.
    addresses = set(re.findall(r"https?://[^\"'\s<>]+", text))
    assert addresses <= {"http://www.w3.org/2000/svg", "https://github.com/leeoniya/uPlot"}
    assert re.findall(r"@import|url\(", text) == []


def test_the_policy_has_a_digest_per_block() -> None:
    policy = content_security_policy("<script>a</script><style>b</style><script>c</script>")
    assert policy.count("'sha256-") == 3
    assert policy != content_security_policy("<script>x</script><style>b</style>")


class Reader:
    """One connection to `/events`."""

    def __init__(self, served: Served, **headers: Any) -> None:
        self._context = served.http.stream("GET", "/events", headers=headers)
        self._response = self._context.__enter__()
        assert self._response.headers["content-type"].startswith("text/event-stream")
        self._text = self._response.iter_text()
        self._buffer = ""

    def next(self, *kinds: Any) -> Any:
        """Return kind, number and data of the next event of these kinds."""
        while True:
            while "\n\n" not in self._buffer:
                self._buffer += next(self._text)
            block, _, self._buffer = self._buffer.partition("\n\n")
            fields = dict(line.split(": ", 1) for line in block.split("\n") if ": " in line)
            if fields.get("event") in kinds:
                return fields["event"], int(fields["id"]), json.loads(fields["data"])

    def close(self) -> None:
        self._context.__exit__(None, None, None)


def test_a_reader_follows_the_adapters(served: Served) -> None:
    reader = Reader(served)
    _, seq, snapshot = reader.next("snapshot")
    assert [card["id"] for card in snapshot["adapters"]] == ["reverse", "upper"]
    assert snapshot["status"]["tiers"][2]["count_max"] == 8
    failed = ev.AdapterFailed("upper", "pinned", ErrorCode.NOT_FOUND, "no file")
    served.controller.publish(ev.AdapterActivated("reverse", 3, 8), failed)
    _, first, event = reader.next("event")
    assert first == seq + 1
    assert event["event"] == {
        "type": "AdapterActivated",
        "adapter": "reverse",
        "slot": 3,
        "generation": 8,
        "duration_ns": 0,
        "wait_ns": 0,
    }
    _, second, event = reader.next("event")
    assert (second, event["event"]["code"]) == (seq + 2, "L002")
    reader.close()


def test_a_reader_receives_what_events_do_not_contain(served: Served) -> None:
    reader = Reader(served)
    reader.next("snapshot")
    waiting = msgspec.structs.replace(view("upper", "pinned"), waiting=3)
    served.controller.adapters["upper"] = waiting
    served.controller.publish(ev.AdapterHeld("upper"))
    cards: Any = []
    while not any(card["waiting"] == 3 for card in cards):
        _, _, cards = reader.next("adapters")
    reader.close()


def test_a_reader_continues_where_it_lost_its_connection(served: Served) -> None:
    reader = Reader(served)
    _, seq, _ = reader.next("snapshot")
    reader.close()
    served.controller.publish(ev.AdapterHeld("upper"), ev.AdapterReleased("upper"))
    reader = Reader(served, **{"last-event-id": str(seq)})
    assert [reader.next("event", "snapshot")[:2] for _ in range(2)] == [
        ("event", seq + 1),
        ("event", seq + 2),
    ]
    reader.close()


def test_a_reader_with_an_unknown_number_starts_again(served: Served) -> None:
    for number in ("999999999", "x", "-1", "9" * 5000):
        reader = Reader(served, **{"last-event-id": number})
        assert reader.next("event", "snapshot")[0] == "snapshot"
        reader.close()


def test_past_events_are_read_in_pages(served: Served) -> None:
    served.controller.publish(*(ev.AdapterHeld(name) for name in ("a", "b", "a", "b", "a")))
    everything = []
    since = 0
    while since is not None:
        page = served.get(f"/events/history?since={since}&limit=2").json()
        assert len(page["events"]) <= 2
        everything += page["events"]
        since = page["next_seq"]
    assert [event["seq"] for event in everything] == list(range(1, len(everything) + 1))
    own = served.get("/events/history?adapter=a").json()["events"]
    assert [event["event"]["adapter"] for event in own] == ["a"] * 3


def test_wrong_numbers_are_refused(served: Served) -> None:
    for query in ("since=x", "since=-1", "limit=3000", "since=" + "9" * 40):
        response = served.get(f"/events/history?{query}")
        assert response.status_code == 400
        assert response.json()["error"]["param"] == query.partition("=")[0]


def test_readers_are_bounded_and_leave_nothing(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loradock.gateway.page.READERS_MAX", 2)
    readers = [Reader(served), Reader(served)]
    assert served.get("/events").status_code == 429
    for reader in readers:
        reader.close()

    def again() -> Any:
        with served.http.stream("GET", "/events") as response:
            return response.status_code == 200

    wait_until(again)


def test_the_head_of_a_stream_can_be_requested_alone(served: Served) -> None:
    response = served.http.head("/events")
    assert (response.status_code, response.content) == (200, b"")


def live_of(table: AdapterTable) -> Live:
    follower: Any = SimpleNamespace(table=table)
    rates: Any = SimpleNamespace(after=lambda _: [], count=0)
    return Live(follower, rates, may_change=True)


def a_table() -> AdapterTable:
    table = AdapterTable()
    table.reset(rq.AdaptersListed("", (view("a"), view("b")), 3))
    return table


def a_status(*uses: AdapterUse) -> rq.StatusShown:
    status: rq.StatusShown = msgspec.structs.replace(example_of(rq.StatusShown), uses=uses)
    return status


CHANGES: dict[str, Callable[[AdapterTable], None]] = {
    "event": lambda table: table.apply(ev.Published(4, 0, ev.AdapterHeld("a"))),
    "gap": lambda table: table.on_gap(9),
    "update": lambda table: table.update("a", view("a", "pinned")),
    "unknown": lambda table: table.update("a", None),
    "list": lambda table: table.reset(rq.AdaptersListed("", (view("a", "pinned"), view("b")), 3)),
    "shorter list": lambda table: table.reset(rq.AdaptersListed("", (view("b"),), 3)),
    "other list": lambda table: table.reset(rq.AdaptersListed("", (view("b"), view("c")), 3)),
    "status": lambda table: table.set_status(a_status()),
    "uses": lambda table: table.set_status(a_status(AdapterUse("a", 2, leases=3))),
    "lost stream": lambda table: setattr(table, "synced", False),
}


@pytest.mark.parametrize("name", CHANGES)
def test_readers_share_one_encoding_of_the_table_until_it_changes(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded: list[int] = []

    def counted(table: AdapterTable, *, may_change: bool) -> Any:
        encoded.append(len(table.views))
        return snapshot_of(table, may_change=may_change)

    monkeypatch.setattr(page, "snapshot_of", counted)
    table = a_table()
    live = live_of(table)

    async def read() -> None:
        received = [await anext(live._stream(None)) for _ in range(5)]
        now = named_event("snapshot", table.seq or 0, snapshot_of(table, may_change=True))
        assert received == [now] * 5

    asyncio.run(read())
    CHANGES[name](table)
    asyncio.run(read())
    assert len(encoded) == 2


def test_what_happens_while_a_snapshot_is_sent_follows_it() -> None:
    async def main() -> None:
        table = a_table()
        reader = live_of(table)._stream(None)
        assert b"event: snapshot\nid: 3\n" in await anext(reader)
        table.apply(ev.Published(4, 0, ev.AdapterHeld("a")))
        assert b"event: event\nid: 4\n" in await anext(reader)

    asyncio.run(main())
