"""The catalogue of a fleet: which docks and fronts are there, and which adapters are wanted.

It is in etcd (3.4 or later), reached through its JSON gateway, below `/loradock/NAME/`. Where
adapters are is not in it: the picker follows the docks' own events.
"""

import asyncio
import base64
from collections.abc import AsyncIterator, Iterable
from types import TracebackType
from typing import Annotated, Any, Final, Generic, Literal, Self, TypeVar

import httpx
import msgspec
import structlog
from msgspec import Meta, Struct, field

from loradock.fleet.config import FleetConfig, FleetError, tls_context

LEASE_S: Final = 5
"""A dock or a front that is not heard of for this time is not in the fleet any more."""

_CALL_TIMEOUT: Final = httpx.Timeout(2.0)
# A watch that is idle for as long is begun again, where it stopped: its connection can be dead.
_WATCH_TIMEOUT: Final = httpx.Timeout(2.0, read=LEASE_S)
_RETRY_S: Final = 0.5

log = structlog.get_logger("fleet")


class CatalogueError(FleetError):
    """No member of etcd answers, or etcd refuses a call."""


class Dock(Struct, frozen=True):
    """A server of the fleet, at `HOST:PORT` for HTTP; `weight` is its number of slots."""

    address: str
    model: str = ""
    weight: Annotated[int, Meta(ge=1)] = 1


class Front(Struct, frozen=True):
    """A front of the fleet: where its HTTP clients connect, and its certificate, if it has one."""

    address: str
    certificate: str = ""


class WantedAdapter(Struct, frozen=True):
    """An adapter that all docks can serve: `copies` docks keep it loaded; 0: as demand decides.

    `path` is its directory, relative to an adapter root of each dock. A dock whose files have
    another fingerprint does not serve it.
    """

    path: str
    fingerprint: str = ""
    rank: int = 0
    hold: bool = False
    copies: Annotated[int, Meta(ge=0)] = 0


Record = TypeVar("Record", bound=Dock | Front | WantedAdapter)
Kind = Literal["docks", "fronts", "adapters"]
KINDS: Final[dict[type[Any], Kind]] = {Dock: "docks", Front: "fronts", WantedAdapter: "adapters"}


class Entry(Struct, Generic[Record], frozen=True):
    """A record with etcd's numbers: `epoch` is its creation's revision, `changed` the last one."""

    record: Record
    epoch: int
    changed: int


# The part of etcd's messages that is read. The gateway writes integers as strings, bytes in base64,
# and leaves out what is 0 or empty.
class _Header(Struct, frozen=True):
    revision: int = 0


class _KeyValue(Struct, frozen=True):
    key: str = ""
    value: str = ""
    create_revision: int = 0
    mod_revision: int = 0


class _Event(Struct, frozen=True):
    kv: _KeyValue
    type: str = "PUT"


class _Answer(Struct, frozen=True):
    header: _Header = _Header()
    kvs: list[_KeyValue] = field(default_factory=list)
    succeeded: bool = False
    id: int = msgspec.field(name="ID", default=0)
    ttl: int = msgspec.field(name="TTL", default=0)


class _KeptAlive(Struct, frozen=True):
    result: _Answer = _Answer()


class _Watched(Struct, frozen=True):
    header: _Header = _Header()
    canceled: bool = False
    compact_revision: int = 0
    events: list[_Event] = field(default_factory=list)


class _WatchLine(Struct, frozen=True):
    result: _Watched | None = None


Answer = TypeVar("Answer")


class Catalogue:
    """A client of etcd for one fleet; a call tries the members one after another.

    Every method raises `CatalogueError` if no member answers, or if etcd refuses.
    """

    def __init__(self, config: FleetConfig) -> None:
        """Raise `ConfigError` for certificates that can't be used."""
        self._members = list(config.members)
        self._root = f"/loradock/{config.name}/"
        self._http = httpx.AsyncClient(
            verify=tls_context(config), timeout=_CALL_TIMEOUT, trust_env=False
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self._http.aclose()

    async def grant(self) -> int:
        """Return a new lease of `LEASE_S`."""
        return (await self._call("lease/grant", {"TTL": LEASE_S}, _Answer)).id

    async def keep_alive(self, lease: int) -> bool:
        """Extend a lease; False if it has ended."""
        return (await self._call("lease/keepalive", {"ID": lease}, _KeptAlive)).result.ttl > 0

    async def revoke(self, lease: int) -> None:
        """End a lease, and with it the records that have it."""
        await self._call("lease/revoke", {"ID": lease}, _Answer)

    async def put(
        self, name: str, record: Record, *, changed: int | None = None, lease: int = 0
    ) -> bool:
        """Write a record if its last change is `changed` (0: if it does not exist; None: always).

        Return whether it was written.
        """
        key = _text(self._key(type(record), name))
        value = _text(msgspec.json.encode(record))
        body = {"success": [{"requestPut": {"key": key, "value": value, "lease": lease}}]}
        return await self._compare(key, changed, body)

    async def delete(self, kind: type[Record], name: str, *, changed: int | None = None) -> bool:
        """Delete a record if its last change is `changed`; return whether that was so."""
        key = _text(self._key(kind, name))
        body = {"success": [{"requestDeleteRange": {"key": key}}]}
        return await self._compare(key, changed, body)

    async def _compare(self, key: str, changed: int | None, body: dict[str, Any]) -> bool:
        expected = {"key": key, "target": "MOD", "result": "EQUAL", "modRevision": changed}
        compare = {} if changed is None else {"compare": [expected]}
        return (await self._call("kv/txn", body | compare, _Answer)).succeeded

    async def get(self, kind: type[Record], name: str) -> Entry[Record] | None:
        """Return a record; None if there is none, as any member knows it."""
        body = {"key": _text(self._key(kind, name)), "serializable": True}
        found = await self._call("kv/range", body, _Answer)
        return _entry(kind, found.kvs[0]) if found.kvs else None

    async def read(self, kind: type[Record]) -> dict[str, Entry[Record]]:
        """Return all records of a kind by name. It needs a quorum."""
        return self._table(kind, await self._call("kv/range", self._range(kind), _Answer))

    async def follow(self, kind: type[Record]) -> AsyncIterator[dict[str, Entry[Record]]]:
        """Yield all records of a kind, and again after each change, until it is cancelled.

        Any member serves it, also without a quorum: the table is then as old as the quorum. The
        same dictionary is yielded each time.
        """
        table: dict[str, Entry[Record]] = {}
        revision, is_followed = 0, True
        while True:
            try:
                if not revision:
                    # A table that is there already must not get older: with a quorum only.
                    body = self._range(kind) | {"serializable": not table}
                    found = await self._call("kv/range", body, _Answer)
                    revision = found.header.revision
                    table = self._table(kind, found)
                    yield table
                async for watched in self._watch(kind, revision):
                    if watched.compact_revision or watched.header.revision < revision:
                        # The changes in between are not kept any more, or etcd has begun anew.
                        revision = 0
                        break
                    is_followed = True
                    if watched.events:
                        # The header's revision can be of changes that are still to be sent.
                        revision = max(event.kv.mod_revision for event in watched.events)
                        self._apply(kind, table, watched.events)
                        yield table
            except CatalogueError as error:
                if is_followed:
                    log.warning("can't follow the catalogue", kind=KINDS[kind], error=str(error))
                is_followed = False
                await asyncio.sleep(_RETRY_S)

    async def _watch(self, kind: type[Record], revision: int) -> AsyncIterator[_Watched]:
        """Yield what a member says of the changes after a revision, until it says no more."""
        body = {"create_request": self._range(kind) | {"start_revision": revision + 1}}
        url = f"{self._members[0]}/v3/watch"
        # A member that has no leader ends the watch, so that another one is asked.
        headers = {"Grpc-Metadata-hasleader": "true"}
        content, has_begun = msgspec.json.encode(body), False
        try:
            async with self._http.stream(
                "POST", url, content=content, headers=headers, timeout=_WATCH_TIMEOUT
            ) as answer:
                async for line in answer.aiter_lines():
                    watched = _decode(line.encode(), _WatchLine).result
                    if watched is None or (watched.canceled and not watched.compact_revision):
                        break
                    has_begun = True
                    yield watched
        except (httpx.HTTPError, OSError) as error:
            if has_begun and isinstance(error, httpx.ReadTimeout):
                return
            self._skip_member()
            raise CatalogueError(f"{url}: {error or type(error).__name__}") from error
        self._skip_member()
        await asyncio.sleep(_RETRY_S)

    async def _call(self, path: str, body: dict[str, Any], kind: type[Answer]) -> Answer:
        content, reasons = msgspec.json.encode(body), []
        for _ in self._members:
            url = f"{self._members[0]}/v3/{path}"
            try:
                answer = await self._http.post(url, content=content)
            except (httpx.HTTPError, OSError) as error:
                reasons.append(f"{url}: {error or type(error).__name__}")
            else:
                if answer.status_code == httpx.codes.OK:
                    return _decode(answer.content, kind)
                if answer.status_code == httpx.codes.NOT_FOUND and path.startswith("lease/"):
                    # A lease that has ended.
                    return _decode(b"{}", kind)
                reasons.append(f"{url}: {answer.status_code} {answer.text[:200]}")
            self._skip_member()
        raise CatalogueError(f"no member of etcd answers; {'; '.join(reasons)}")

    def _skip_member(self) -> None:
        self._members.append(self._members.pop(0))

    def _key(self, kind: type[Any], name: str) -> bytes:
        return f"{self._root}{KINDS[kind]}/{name}".encode()

    def _range(self, kind: type[Any]) -> dict[str, Any]:
        first = self._key(kind, "")
        # "0" follows "/": all keys that begin with the prefix.
        return {"key": _text(first), "range_end": _text(first[:-1] + b"0")}

    def _table(self, kind: type[Record], found: _Answer) -> dict[str, Entry[Record]]:
        table: dict[str, Entry[Record]] = {}
        self._apply(kind, table, (_Event(kv) for kv in found.kvs))
        return table

    def _apply(
        self, kind: type[Record], table: dict[str, Entry[Record]], events: Iterable[_Event]
    ) -> None:
        for event in events:
            name = _bytes(event.kv.key)[len(self._key(kind, "")) :].decode()
            table.pop(name, None)
            if event.type != "DELETE":
                try:
                    table[name] = _entry(kind, event.kv)
                except CatalogueError as error:
                    # It must not hide the others, of this message and of later ones.
                    log.error("a record is left out", kind=KINDS[kind], name=name, error=str(error))


def _entry(kind: type[Record], found: _KeyValue) -> Entry[Record]:
    record = _decode(_bytes(found.value), kind)
    return Entry(record, found.create_revision, found.mod_revision)


def _decode(data: bytes, kind: type[Answer]) -> Answer:
    try:
        return msgspec.json.decode(data, type=kind, strict=False)
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise CatalogueError(f"etcd has what is no {kind.__name__}: {error}") from error


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: str) -> bytes:
    return base64.b64decode(text)
