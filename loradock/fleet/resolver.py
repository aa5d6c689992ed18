"""The adapters of the catalogue for a dock's gateway: where they are, and their fingerprints."""

import asyncio
from collections.abc import Mapping
from typing import Final

from loradock.fleet.catalogue import Catalogue, CatalogueError, Entry, WantedAdapter
from loradock.fleet.config import read_config
from loradock.gateway.http.errors import HttpError

_FOLLOWED_S: Final = 2.0
"""How long a request waits for a change of the catalogue that a member of etcd has already."""


class CatalogueResolver:
    """Follows the catalogue, as long as `run` does."""

    def __init__(self, file: str) -> None:
        """Raise `ConfigError` for a `fleet.toml` that can't be used."""
        self._catalogue = Catalogue(read_config(file))
        self._wanted: Mapping[str, Entry[WantedAdapter]] | None = None
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Follow the catalogue until cancelled."""
        async with self._catalogue as catalogue:
            async for wanted in catalogue.follow(WantedAdapter):
                self._wanted = wanted
                async with self._changed:
                    self._changed.notify_all()

    async def resolve(self, base: str, name: str) -> str | None:
        """Return the directory of a wanted adapter; None if it is not wanted.

        Raises `HttpError` with status 503 if no member of etcd answers.
        """
        del base
        if (entry := self._followed().get(name)) is not None:
            return entry.record.path
        try:
            # It can be wanted since a moment ago.
            found = await self._catalogue.get(WantedAdapter, name)
            if found is None:
                return None
            async with asyncio.timeout(_FOLLOWED_S), self._changed:
                await self._changed.wait_for(lambda: name in self._followed())
        except (CatalogueError, TimeoutError) as error:
            raise _unknown(str(error) or "its changes are late") from error
        return found.record.path

    def fingerprint_of(self, name: str) -> str:
        """Return the fingerprint that an adapter's files must have; empty for any.

        Raises `HttpError` with status 503 before the catalogue was read.
        """
        entry = self._followed().get(name)
        return entry.record.fingerprint if entry else ""

    def _followed(self) -> Mapping[str, Entry[WantedAdapter]]:
        if self._wanted is None:
            raise _unknown("it was not read yet")
        return self._wanted


def _unknown(reason: str) -> HttpError:
    return HttpError(503, f"the fleet's catalogue does not answer: {reason}")
