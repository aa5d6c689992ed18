"""The process of a dock that makes it a member of its fleet.

It registers the dock under a lease, and loads the adapters of which the dock keeps a copy. A dock
that loses its lease registers anew. The end of the process ends the membership before requests end.
"""

import asyncio
import sys
from collections.abc import Mapping
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
from loradock.messages.errors import ErrorCode
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
        # The revision of what is loaded, or refused for good.
        self._done: dict[str, int] = {}

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
        """Load, hold and remove what the catalogue says, one adapter after another."""
        while True:
            await self._changed.wait()
            self._changed.clear()
            retry = False
            for name in self._done.keys() - self._wanted.keys():
                retry |= not await self._settle(name, None)
            for name, entry in sorted(self._wanted.items()):
                if self._done.get(name) != entry.changed and self._keeps(name, entry.record):
                    retry |= not await self._settle(name, entry)
            if retry:
                await asyncio.sleep(_RETRY_S)
                self._changed.set()

    def _keeps(self, name: str, wanted: WantedAdapter) -> bool:
        """Return whether this dock has one of the adapter's copies."""
        weights = {dock: entry.record.weight for dock, entry in self._docks.items()}
        return self._dock.address in rendezvous(name, weights, wanted.copies)

    async def _settle(self, name: str, entry: Entry[WantedAdapter] | None) -> bool:
        """Bring the dock to what is wanted of one adapter; return False to try it again."""
        try:
            if entry is None:
                await self._client.remove(name, force=True)
            else:
                await self._client.load(name, entry.record.path, replace=True)
                await (self._client.hold if entry.record.hold else self._client.prefetch)(name)
        except LoradockError as error:
            if error.retryable:
                return False
            if error.code is not ErrorCode.UNKNOWN_ADAPTER:
                log.error("a copy can't be kept", adapter=name, error=str(error))
        if entry is None:
            del self._done[name]
        else:
            self._done[name] = entry.changed
        return True


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
