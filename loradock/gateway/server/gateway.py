"""The parts of one gateway, connected; they live as long as its event loop."""

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Final

import structlog

from loradock.client import AsyncClient, LoradockError
from loradock.gateway.adapters.follower import AdapterTable, Follower
from loradock.gateway.adapters.models import ModelNames, Models
from loradock.gateway.adapters.sources import (
    Resolution,
    configured_resolvers,
    load_modules,
    parse_lora_modules,
)
from loradock.gateway.inference.adapter_files import AdapterFiles
from loradock.gateway.inference.model_files import read_model_files
from loradock.gateway.inference.service import Service
from loradock.gateway.inference.workers import Workers
from loradock.gateway.options import GatewayConfig, allows_updating
from loradock.gateway.page import Live
from loradock.gateway.rates import Rates
from loradock.gateway.recorder import Recorder
from loradock.messages.errors import EngineGone, ErrorCode, NotAllowed
from loradock.messages.traces import configured_tracer

if TYPE_CHECKING:
    from loradock.fleet.resolver import CatalogueResolver
    from loradock.gateway.inference.traces import Traces

_SERVER_RETRY_S: Final = 1.0

log = structlog.get_logger("gateway")


class StartError(Exception):
    """A configuration that can't be served."""


class Gateway:
    """The parts of a gateway.

    Construct it in its event loop. Raises `ResolverError`, `OSError` and `ValueError` for a
    configuration that can't be used. `spans` is None if requests have none.
    """

    def __init__(self, config: GatewayConfig) -> None:
        self.config: Final = config
        # What can be refused precedes the client, which has a socket.
        tracer = configured_tracer("gateway")
        resolvers = configured_resolvers(config.lora_resolver_roots, config.lora_resolvers)
        self._catalogue: Final = _catalogue_of(config)
        if self._catalogue is not None:
            resolvers = (*resolvers, self._catalogue.resolve)
        self._modules = parse_lora_modules(config.lora_modules)
        files = read_model_files(
            config.model, config.chat_template, config.max_model_len, config.tool_call_parser
        )
        self.names: Final = ModelNames(config.served_model_names, config.model)
        self.client: Final = AsyncClient(
            config.directory or None,
            address=config.address,
            key=config.key,
            server_key=config.server_key,
        )
        self.table: Final = AdapterTable()
        self.follower: Final = Follower(self.client, self.table)
        self.recorder: Final = Recorder()
        self.rates: Final = Rates(self.follower, self.recorder)
        self.live: Final = Live(
            self.follower, self.rates, may_change=allows_updating(config, os.environ)
        )
        resolution = Resolution(self.client, resolvers)
        models = Models(self.follower, self.names, resolution, self._catalogue)
        timeout_s = float(config.http_timeout_s)
        self._adapter_files = AdapterFiles(
            models, files, config.adapter_roots, has_template=bool(config.chat_template)
        )
        self._workers = Workers()
        self.service: Final = Service(
            self.client, models, self.recorder, self._adapter_files, self._workers, timeout_s
        )
        self.spans: Traces | None = None
        if tracer is not None:
            # Its library is an extra.
            from loradock.gateway.inference import traces  # noqa: PLC0415

            self.spans = traces.Traces(tracer, self.table, self.names)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[asyncio.Future[None]]:
        """Run the tasks of the gateway; the future ends with `StartError` if it can't serve."""
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        async with AsyncExitStack() as stack:
            await self._open_client(stack)
            tasks = [
                asyncio.create_task(self.follower.run()),
                asyncio.create_task(self.rates.run()),
                asyncio.create_task(self._prepare(failed)),
            ]
            if self._catalogue is not None:
                tasks.append(asyncio.create_task(self._catalogue.run()))
            try:
                yield failed
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                self._workers.close()
                await self._adapter_files.process.close()
                failed.cancel()

    async def _open_client(self, stack: AsyncExitStack) -> None:
        """Open the client; a server that was never started before can start after its gateway.

        Raises `StartError` if the server refuses the gateway's key.
        """
        while True:
            try:
                await stack.enter_async_context(self.client)
            except NotAllowed as error:
                raise StartError(error.message) from error
            except EngineGone as error:
                log.warning("waiting for a server", reason=error.message)
                await asyncio.sleep(_SERVER_RETRY_S)
            else:
                return

    async def _prepare(self, failed: asyncio.Future[None]) -> None:
        """Load the first adapters, and learn the model's name if it is not configured."""
        try:
            await self._wait_for_model()
            await load_modules(self.client, self._modules)
        except LoradockError as error:
            kept = "; the server keeps what it has: leave this one out, and use `load --replace`"
            hint = kept if error.code is ErrorCode.CONFLICT else ""
            failed.set_exception(StartError(f"--lora-modules: {error}{hint}"))

    async def _wait_for_model(self) -> None:
        """Use the engine's name of the model, if no directory is configured."""
        if self.names.directory:
            return
        table, changed = self.table, self.follower.changed
        async with changed:
            model = await changed.wait_for(lambda: table.status.model if table.status else "")
        self.names.set_own_name(model)
        log.warning("chats are not served: --model is needed", model=model)


def _catalogue_of(config: GatewayConfig) -> "CatalogueResolver | None":
    if not config.fleet:
        return None
    # Its libraries are an extra.
    from loradock.fleet.resolver import CatalogueResolver  # noqa: PLC0415

    return CatalogueResolver(config.fleet)
