"""What a dock's real gateway sends, as the picker reads it; gaps and silence end it."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from structlog.testing import capture_logs

from loradock.fleet.catalogue import Dock, Entry
from loradock.fleet.following import DockView, Following, GapError, Sent, read_events
from loradock.fleet.picker import Picker, Seen
from loradock.messages import events as ev
from tests.support.gateway.served import serve_gateway
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import HANG_S

DOCK = "a:1"


def told(*sent: Sent) -> Picker:
    found = Picker()
    found.set_docks({DOCK: 1})
    dock = DockView(DOCK, found)
    for one in sent:
        dock.on(one)
    return found


def event(seq: int, kind: str, **fields: object) -> Sent:
    data = {"seq": seq, "time_ms": 0, "event": {"type": kind, **fields}}
    return Sent("event", seq, msgspec.json.encode(data))


SNAPSHOT = Sent("snapshot", 4, b'{"adapters": [{"id": "a", "state": "pinned"}], "status": null}')


@pytest.mark.parametrize(
    ("kind", "state"),
    [("AdapterActivated", "gpu-slot"), ("AdapterDeactivated", "pinned"),
     ("AdapterPinned", "pinned"), ("AdapterUnpinned", "cpu-cached"),
     ("AdapterCached", "cpu-cached"), ("AdapterEvicted", "evicted"), ("AdapterHeld", "pinned")],
)  # fmt: skip
def test_events_change_states(kind: str, state: str) -> None:
    seen = told(SNAPSHOT, event(5, kind, adapter="a")).state_of(DOCK, "a")
    assert seen == Seen(state)


def test_a_new_version_has_another_fingerprint_and_a_removed_one_is_unknown() -> None:
    changed = event(5, "AdapterReplaced", adapter="a", fingerprint="f")
    assert told(SNAPSHOT, changed).state_of(DOCK, "a") == Seen("pinned", "f")
    removed = event(6, "AdapterRemoved", adapter="a")
    assert told(SNAPSHOT, changed, removed).state_of(DOCK, "a") is None


@pytest.mark.parametrize("seq", [4, 6])
def test_a_gap_is_an_error(seq: int) -> None:
    with pytest.raises(GapError):
        told(SNAPSHOT, event(seq, "AdapterEvicted", adapter="a"))


def test_lines_of_a_stream_become_events() -> None:
    async def run() -> list[Sent]:
        async def lines() -> object:
            for line in (": ", "", "event: a", "id: 3", "data: {}", "", "event: b", "data: 1", ""):
                yield line

        return [one async for one in read_events(lines())]  # type: ignore[arg-type]

    assert asyncio.run(run()) == [Sent("a", 3, b"{}"), Sent("b", 0, b"1")]


def test_a_dock_that_is_down_is_logged_once(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> int:
        tries = 0

        class Lost(Picker):
            def lose(self, address: str) -> None:
                nonlocal tries
                tries += 1
                super().lose(address)

        monkeypatch.setattr("loradock.fleet.following._RETRY_S", 0.001)
        following = Following(Lost(), "k" * 16)
        address = "127.0.0.1:1"
        following.set_docks({address: Entry(Dock(address), 1, 1)})
        async with asyncio.timeout(HANG_S):
            while tries < 5:
                await asyncio.sleep(0.001)
        await following.close()
        return tries

    with capture_logs() as logs:
        asyncio.run(run())
    assert [one["event"] for one in logs] == ["a dock can't be followed"]


def test_the_events_of_a_real_gateway_are_followed(tmp_path: Path) -> None:
    found = Picker()
    with StandIn(tmp_path) as controller, serve_gateway(controller) as gateway:
        address = f"127.0.0.1:{gateway.port}"

        async def until(condition: object) -> None:
            async with asyncio.timeout(HANG_S):
                while not condition():  # type: ignore[operator]
                    await asyncio.sleep(0.01)

        async def run() -> None:
            following = Following(found, "k" * 16)
            following.set_docks({address: Entry(Dock(address, "base", 8), 1, 1)})
            await until(lambda: found.pick("upper", 0.0).docks == [address])
            assert found.state_of(address, "upper") == Seen("gpu-slot", "ab" * 16)
            controller.adapters["lower"] = view("lower")
            controller.publish(ev.AdapterActivated("lower", 3, 1))
            await until(lambda: found.state_of(address, "lower") == Seen("gpu-slot", "ab" * 16))
            assert found.shown(0.0).docks[address].ready
            controller.status_changes["unready"] = "it stops"
            await until(lambda: not found.shown(0.0).docks[address].ready)
            following.set_docks({})
            assert found.shown(0.0).docks == {}
            await following.close()

        asyncio.run(run())
