"""Registration under a lease: a record that is in the catalogue as long as its process runs."""

import asyncio
from typing import Final

import structlog

from loradock.fleet.catalogue import LEASE_S, Catalogue, CatalogueError, Dock, Front

_BEAT_S: Final = LEASE_S / 3
_RETRY_S: Final = 0.5

log = structlog.get_logger("fleet")


class Registration:
    """Keeps one record registered, under the name of its address."""

    def __init__(self, catalogue: Catalogue, record: Dock | Front) -> None:
        self._catalogue = catalogue
        self._record = record
        self._lease = 0
        self._is_registered = False
        self._is_reached = True

    async def run(self) -> None:
        """Register, and again whenever the lease was lost, until it is cancelled."""
        while True:
            try:
                if not self._is_registered:
                    await self._register()
                elif not await self._catalogue.keep_alive(self._lease):
                    log.warning("the lease was lost", address=self._record.address)
                    self._is_registered = False
                    continue
                self._is_reached = True
                await asyncio.sleep(_BEAT_S)
            except CatalogueError as error:
                if self._is_reached:
                    log.warning("can't register", address=self._record.address, error=str(error))
                self._is_reached = False
                await asyncio.sleep(_RETRY_S)

    async def _register(self) -> None:
        """Create the record: one of an earlier life with the same address is deleted before."""
        # Known before the record exists, so that `end` ends it at any time.
        self._lease = await self._catalogue.grant()
        name = self._record.address
        await self._catalogue.delete(type(self._record), name)
        self._is_registered = await self._catalogue.put(
            name, self._record, lease=self._lease, changed=0
        )
        if self._is_registered:
            log.info("registered", address=name)

    async def end(self) -> None:
        """Leave the fleet at once, instead of when the lease ends."""
        if self._lease:
            try:
                await self._catalogue.revoke(self._lease)
            except CatalogueError as error:
                log.warning("the lease ends by itself", error=str(error))
