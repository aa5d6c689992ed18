"""The picker's process: it follows the catalogue and the docks, and answers the proxy."""

import asyncio
import sys
from pathlib import Path
from typing import Final

import httpx
import msgspec
import structlog
from msgspec import Struct

from loradock.fleet import ext_proc
from loradock.fleet.catalogue import Catalogue, Dock, Front, WantedAdapter
from loradock.fleet.config import FleetConfig, FleetError, read_config
from loradock.fleet.envoy import ADMIN_SOCKET, RELAYED, DockFiles
from loradock.fleet.following import Following
from loradock.fleet.leases import Registration
from loradock.fleet.picker import Picker
from loradock.fleet.process import advertised_host, until_stopped
from loradock.fleet.processor import Processor
from loradock.messages.engine_options import LogFormat
from loradock.processes import process_log
from loradock.processes.event_loop import loop_runner
from loradock.processes.subprocesses import EXIT_CONFIG, EXIT_SOCKET

_DRAIN_S: Final = 8.0
"""The supervisor ends a process that takes 10 s to end."""

_LOOK_S: Final = 0.1

log = structlog.get_logger("fleet")


class PickerConfig(Struct, frozen=True, kw_only=True):
    """Configuration of a picker: its fleet's file, and where it listens for gRPC.

    `listen`: `HOST:PORT` or `unix:PATH`. `directory`: where the docks are written for Envoy, and
    `host`, `port`: where that serves; empty without an Envoy of its own. `certificate`: PEM of the
    front; empty for HTTP.
    """

    fleet: str
    listen: str
    directory: str = ""
    host: str = ""
    port: int = 0
    certificate: str = ""
    log_format: LogFormat = "console"
    parent_fd: int = -1


def main() -> int:
    """Run the process with a `PickerConfig` as JSON in `sys.argv`; return its exit status."""
    process_log.configure(name="picker")
    try:
        config = msgspec.json.decode(sys.argv[1], type=PickerConfig)
        process_log.configure(config.log_format, "picker")
        fleet = read_config(config.fleet)
        loop_runner()(_run(config, fleet))
    except (IndexError, msgspec.MsgspecError, FleetError) as error:
        log.error("can't pick", error=str(error))
        return EXIT_CONFIG
    except OSError as error:
        log.error("the address can't be used", listen=config.listen, error=str(error))
        return EXIT_SOCKET
    return 0


async def _run(config: PickerConfig, fleet: FleetConfig) -> None:
    picker = Picker()
    processor = Processor(picker, fleet.key, RELAYED if config.directory else "")
    server = await ext_proc.start(config.listen, processor.begin)
    following = Following(picker, fleet.key)
    async with Catalogue(fleet) as catalogue:
        scheme = "https" if config.certificate else "http"
        address = f"{scheme}://{advertised_host(config.host, fleet)}:{config.port}"
        registration = Registration(catalogue, Front(address, config.certificate))
        await until_stopped(
            _follow(catalogue, picker, following, config.directory, registration),
            config.parent_fd,
        )
        await registration.end()
    if config.directory:
        await _drain(Path(config.directory))
    await following.close()
    await server.stop(0)


async def _follow(
    catalogue: Catalogue,
    picker: Picker,
    following: Following,
    directory: str,
    registration: Registration,
) -> None:
    files = DockFiles(Path(directory)) if directory else None

    async def docks() -> None:
        async for table in catalogue.follow(Dock):
            if not table:
                # All have stopped, or none of them reaches etcd: who serves is known from the
                # docks themselves, and the last ones are better than none.
                log.warning("no dock is in the catalogue; the last ones are kept")
                continue
            following.set_docks(table)
            if files:
                files.set_docks(table)

    async def adapters() -> None:
        async for table in catalogue.follow(WantedAdapter):
            picker.set_wanted({name: entry.record for name, entry in table.items()})

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(docks())
        tasks.create_task(adapters())
        if directory:
            tasks.create_task(registration.run())


async def _drain(directory: Path) -> None:
    """Let the front's requests end: Envoy, which is stopped after this process, accepts no more."""
    transport = httpx.AsyncHTTPTransport(uds=str(directory / ADMIN_SOCKET))
    try:
        async with httpx.AsyncClient(transport=transport, base_url="http://envoy") as admin:
            await admin.post("/drain_listeners")
            async with asyncio.timeout(_DRAIN_S):
                while await _active(admin):
                    await asyncio.sleep(_LOOK_S)
    except TimeoutError:
        log.warning("requests are ended before their time", seconds=_DRAIN_S)
    except (httpx.HTTPError, OSError) as error:
        log.warning("the proxy can't be drained", error=str(error) or type(error).__name__)


async def _active(admin: httpx.AsyncClient) -> bool:
    """Return whether requests are in the proxy."""
    shown = await admin.get("/stats", params={"filter": r"^http\.front\.downstream_rq_active$"})
    return not shown.text.strip().endswith(": 0")
