"""The process of a dock that makes it a member of its fleet.

It registers the dock under a lease, and loads the adapters of which the dock keeps a copy. A dock
that loses its lease registers anew. The end of the process ends the membership before requests end.
"""

import asyncio
import sys
from collections.abc import Coroutine, Mapping
from typing import Final

import msgspec
import structlog
from msgspec import Struct

from loradock.client import AsyncClient, LoradockError
from loradock.fleet.catalogue import Catalogue, Dock, Entry, WantedAdapter
from loradock.fleet.config import FleetConfig, FleetError, read_config
from loradock.fleet.leases import Registration
from loradock.fleet.placement import rendezvous
from loradock.fleet.process import advertised_host, until_stopped
from loradock.messages.engine_options import LogFormat
from loradock.messages.errors import Conflict, ErrorCode
from loradock.messages.views import AdapterView
from loradock.processes import process_log
from loradock.processes.subprocesses import EXIT_CONFIG

_RETRY_S: Final = 1.0
_CONNECT_S: Final = 1.0

log = structlog.get_logger("fleet")


class MemberConfig(Struct, frozen=True, kw_only=True):
    """Configuration of a member: its fleet's file, and the dock that it registers.

    `host` and `port`: where the dock serves HTTP. `slots`: how many adapters it has in slots.
    `directory`: the controller's. `parent_fd` closes when the supervisor ends; -1 without one.
    """

    fleet: str
    host: str
    port: int
    slots: int
    directory: str
    model: str = ""
    log_format: LogFormat = "console"
    parent_fd: int = -1


def main() -> int:
    """Run the process with a `MemberConfig` as JSON in `sys.argv`; return its exit status."""
    process_log.configure(name="member")
    try:
        config = msgspec.json.decode(sys.argv[1], type=MemberConfig)
        process_log.configure(config.log_format, "member")
        fleet = read_config(config.fleet)
        asyncio.run(_run(config, fleet))
    except (IndexError, msgspec.MsgspecError, FleetError, OSError) as error:
        log.error("can't be a member", error=str(error))
        return EXIT_CONFIG
    return 0


async def _run(config: MemberConfig, fleet: FleetConfig) -> None:
    address = f"{advertised_host(config.host, fleet)}:{config.port}"
    async with Catalogue(fleet) as catalogue, AsyncClient(config.directory) as client:
        member = Member(catalogue, client, Dock(address, config.model, config.slots))
        await until_stopped(member.run(), config.parent_fd)
        await member.registration.end()


class Member:
    """The tasks of one dock's membership."""

    def __init__(self, catalogue: Catalogue, client: AsyncClient, dock: Dock) -> None:
        self.registration: Final = Registration(catalogue, dock)
        self._catalogue = catalogue
        self._client = client
        self._dock = dock
        self._docks: Mapping[str, Entry[Dock]] = {}
        self._wanted: Mapping[str, Entry[WantedAdapter]] = {}
        self._changed = asyncio.Event()
        # What was done, or refused for good: the revision, and whether a copy is kept for it.
        self._settled: dict[str, tuple[int, bool]] = {}

    async def run(self) -> None:
        """Register once the dock's gateway listens, and load what is wanted, until cancelled."""
        await _wait_for(self._dock.address)
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self.registration.run())
            tasks.create_task(self._follow_docks())
            tasks.create_task(self._follow_adapters())
            tasks.create_task(self._load())

    async def _follow_docks(self) -> None:
        async for docks in self._catalogue.follow(Dock):
            self._docks = docks
            self._changed.set()

    async def _follow_adapters(self) -> None:
        async for wanted in self._catalogue.follow(WantedAdapter):
            self._wanted = wanted
            self._changed.set()

    async def _load(self) -> None:
        """Bring this dock to what the catalogue says, again after each change."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            # Without its lease, the dock has no copies to keep and none to give up.
            if self._dock.address in self._docks and not await self._settle_all():
                await asyncio.sleep(_RETRY_S)
                self._changed.set()

    async def _settle_all(self) -> bool:
        """Settle one adapter after another; return False to try again."""
        try:
            views = (await self._client.list()).adapters
        except LoradockError as error:
            log.warning("the adapters of this dock are not known", error=str(error))
            return False
        known, is_done = {one.adapter: one for one in views if not one.retired}, True
        for name in self._settled.keys() - self._wanted.keys():
            is_done &= await self._try(name, self._forget(name))
        for name, entry in sorted(self._wanted.items()):
            # A long catalogue must not delay the lease.
            await asyncio.sleep(0)
            is_done &= await self._try(name, self._settle(name, entry, known.get(name)))
        return is_done

    async def _try(self, name: str, change: Coroutine[None, None, None]) -> bool:
        """Make a change; return False to try it again."""
        before = self._settled.get(name)
        try:
            await change
        except LoradockError as error:
            if error.retryable:
                self._settled.pop(name, None)
                if before is not None:
                    self._settled[name] = before
                return False
            if error.code is not ErrorCode.UNKNOWN_ADAPTER:
                log.error("an adapter of the fleet can't be served", adapter=name, error=str(error))
        return True

    async def _forget(self, name: str) -> None:
        _, was_kept = self._settled.pop(name)
        if was_kept:
            await self._client.remove(name, force=True)

    async def _settle(
        self, name: str, entry: Entry[WantedAdapter], view: AdapterView | None
    ) -> None:
        """Bring the dock to what is wanted of one adapter."""
        keeps, settled = self._keeps(name, entry.record), self._settled.get(name)
        was_kept = settled is not None and settled[1]
        if keeps or (not was_kept and _is_other(entry.record, view)):
            if settled != (entry.changed, keeps):
                self._settled[name] = entry.changed, keeps
                await self._load_wanted(name, entry.record, view, keeps=keeps)
        elif was_kept:
            # Another dock keeps this copy.
            del self._settled[name]
            if entry.record.hold:
                await self._client.release(name)

    async def _load_wanted(
        self, name: str, wanted: WantedAdapter, view: AdapterView | None, *, keeps: bool
    ) -> None:
        """Load the files of an adapter, unless they are loaded; raises `LoradockError`."""
        if view is None or not view.fingerprint or view.fingerprint != wanted.fingerprint:
            await self._client.load(name, wanted.path, replace=True)
            view = (await self._client.show(name)).adapter
        if _is_other(wanted, view):
            raise Conflict(
                f"the files here have the fingerprint {view.fingerprint}, and the catalogue has "
                f"{wanted.fingerprint}; copy the right files here, and load them with "
                f"`loradock load {name} --replace`"
            )
        if keeps:
            await (self._client.hold if wanted.hold else self._client.prefetch)(name)

    def _keeps(self, name: str, wanted: WantedAdapter) -> bool:
        """Return whether this dock has one of the adapter's copies."""
        if not wanted.copies:
            return False
        weights = {dock: entry.record.weight for dock, entry in self._docks.items()}
        return self._dock.address in rendezvous(name, weights, wanted.copies)


def _is_other(wanted: WantedAdapter, view: AdapterView | None) -> bool:
    """Return whether a dock has other content than the catalogue under a name."""
    return view is not None and "" != wanted.fingerprint != view.fingerprint != ""


async def _wait_for(address: str) -> None:
    """Wait until something listens at a dock's address, as others will reach it."""
    host, _, port = address.rpartition(":")
    reason = ""
    while True:
        try:
            async with asyncio.timeout(_CONNECT_S):
                _, writer = await asyncio.open_connection(host.strip("[]"), int(port))
        except (OSError, TimeoutError) as error:
            if (now := str(error) or type(error).__name__) != reason:
                reason = now
                log.info("waiting for the gateway", address=address, reason=reason)
            await asyncio.sleep(_RETRY_S)
        else:
            writer.close()
            return
