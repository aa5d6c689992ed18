"""Following docks: a snapshot of each dock's adapters, then its numbered events.

They come from `GET /events` of the dock's gateway. A gap, a silence or a lost connection ends what
is known of the dock; it gets requests again after a new snapshot.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from typing import Final

import httpx
import msgspec
import structlog
from msgspec import Struct

from loradock.fleet.catalogue import Dock, Entry
from loradock.fleet.config import FleetError
from loradock.fleet.picker import Load, Picker, Seen
from loradock.messages.events import STATE_AFTER

SILENCE_S: Final = 3.0
"""A dock reports its status several times per second; after this time without it, it hangs."""

_RETRY_S: Final = 0.2
_TIMEOUT: Final = httpx.Timeout(SILENCE_S)
_REQUEST_S: Final = 0.05
"""The time of a request that is assumed before the first one has ended."""

_STATES: Final = {kind.__name__: state for kind, state in STATE_AFTER.items()}

log = structlog.get_logger("fleet")


class GapError(FleetError):
    """Events of a dock are missing."""


# What a picker reads of the page's events; others, and those of later versions, have more fields.
class _Card(Struct, frozen=True):
    id: str
    state: str
    fingerprint: str = ""
    held: bool = False
    retired: bool = False


class _Tier(Struct, frozen=True):
    name: str
    count_max: int


class _Times(Struct, frozen=True):
    request_s: float
    load_s: float
    stage_s: float
    write_s: float


class _Status(Struct, frozen=True):
    unready: str
    running: int
    queued: int
    waiting: int
    times: _Times
    tiers: list[_Tier]


class _Snapshot(Struct, frozen=True):
    adapters: list[_Card]
    status: _Status | None


class _Happened(Struct, frozen=True):
    type: str
    adapter: str = ""
    fingerprint: str = ""


class _Event(Struct, frozen=True):
    seq: int
    event: _Happened


class Sent(Struct, frozen=True):
    """A server-sent event: its name, its number, and its data."""

    name: str
    number: int
    data: bytes


async def read_events(lines: AsyncIterator[str]) -> AsyncIterator[Sent]:
    """Yield the server-sent events of a stream's lines; comments are left out."""
    fields: dict[str, str] = {}
    async for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif fields:
            if "event" in fields:
                number = int(fields.get("id", "0"))
                yield Sent(fields["event"], number, fields.get("data", "").encode())
            fields = {}


class DockView:
    """What one dock sends, told to a picker."""

    def __init__(self, address: str, picker: Picker) -> None:
        self._address = address
        self._picker = picker
        self._seq = -1

    def on(self, sent: Sent) -> None:
        """Process one event; raises `GapError` if others before it are missing."""
        match sent.name:
            case "snapshot":
                self._seq = sent.number
                self._on_snapshot(msgspec.json.decode(sent.data, type=_Snapshot))
            case "event":
                self._on_event(msgspec.json.decode(sent.data, type=_Event))
            case "adapters":
                for card in msgspec.json.decode(sent.data, type=list[_Card]):
                    if not card.retired:
                        self._picker.on_adapter(self._address, card.id, _seen(card))
            case "status":
                self._on_status(msgspec.json.decode(sent.data, type=_Status | None))

    def _on_snapshot(self, snapshot: _Snapshot) -> None:
        cards = {card.id: _seen(card) for card in snapshot.adapters if not card.retired}
        self._picker.on_snapshot(self._address, cards)
        self._on_status(snapshot.status)

    def _on_event(self, event: _Event) -> None:
        if event.seq != self._seq + 1:
            raise GapError(f"event {event.seq} follows event {self._seq}")
        self._seq = event.seq
        happened = event.event
        before = self._picker.state_of(self._address, happened.adapter)
        if happened.type == "AdapterRemoved":
            self._picker.on_adapter(self._address, happened.adapter, None)
        elif happened.type in ("AdapterAccepted", "AdapterReplaced"):
            seen = before or Seen("unregistered")
            changed = msgspec.structs.replace(seen, fingerprint=happened.fingerprint)
            self._picker.on_adapter(self._address, happened.adapter, changed)
        elif state := _STATES.get(happened.type):
            changed = msgspec.structs.replace(before or Seen(state), state=state)
            self._picker.on_adapter(self._address, happened.adapter, changed)

    def _on_status(self, status: _Status | None) -> None:
        if status is None:
            return
        slots = next((tier.count_max for tier in status.tiers if tier.name == "device"), 1)
        times = status.times
        load = Load(
            status.running + status.queued + status.waiting,
            slots,
            times.request_s or _REQUEST_S,
            # What has never happened yet is assumed as `Load` has it.
            times.load_s or Load().load_s,
            times.stage_s or Load().stage_s,
            times.write_s or Load().write_s,
            status.unready,
        )
        self._picker.on_load(self._address, load, time.monotonic())


def _seen(card: _Card) -> Seen:
    return Seen(card.state, card.fingerprint, card.held)


class Following:
    """A task per dock of the fleet."""

    def __init__(self, picker: Picker, key: str) -> None:
        self._picker = picker
        # Keys of docks are API keys, which their gateways accept as such.
        self._http = httpx.AsyncClient(
            headers={"Authorization": f"Bearer {key}"},
            timeout=_TIMEOUT,
            trust_env=False,
            limits=httpx.Limits(max_connections=None),
        )
        self._tasks: dict[tuple[str, int], asyncio.Task[None]] = {}

    def set_docks(self, docks: Mapping[str, Entry[Dock]]) -> None:
        """Follow these docks and no others; one that has registered anew is followed anew."""
        self._picker.set_docks({name: entry.record.weight for name, entry in docks.items()})
        wanted = {(name, entry.epoch) for name, entry in docks.items()}
        for gone in self._tasks.keys() - wanted:
            self._tasks.pop(gone).cancel()
        for new in wanted - self._tasks.keys():
            self._tasks[new] = asyncio.create_task(self._follow(new[0]))

    async def _follow(self, address: str) -> None:
        logged = ""
        while True:
            try:
                async with self._http.stream("GET", f"http://{address}/events") as answer:
                    answer.raise_for_status()
                    logged = ""
                    log.info("a dock is followed", dock=address)
                    view = DockView(address, self._picker)
                    async for sent in read_events(answer.aiter_lines()):
                        view.on(sent)
                reason = "it ended the stream"
            except (
                httpx.HTTPError,
                OSError,
                FleetError,
                msgspec.MsgspecError,
                ValueError,
            ) as error:
                reason = str(error) or type(error).__name__
            self._picker.lose(address)
            if reason != logged:
                logged = reason
                log.warning("a dock can't be followed", dock=address, reason=reason)
            await asyncio.sleep(_RETRY_S)

    async def close(self) -> None:
        """Stop following."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        await self._http.aclose()
