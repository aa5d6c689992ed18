"""The adapters of the catalogue as names that a dock's gateway can resolve."""

from loradock.fleet.catalogue import Catalogue, CatalogueError, WantedAdapter
from loradock.fleet.config import read_config
from loradock.gateway.http.errors import HttpError


class CatalogueResolver:
    """Finds the directory of an adapter that this dock has not loaded yet."""

    def __init__(self, file: str) -> None:
        """Raise `ConfigError` for a `fleet.toml` that can't be used."""
        self._config = read_config(file)

    async def resolve(self, base: str, name: str) -> str | None:
        """Return the directory of a wanted adapter; None if it is not wanted.

        Raises `HttpError` with status 503 if no member of etcd answers.
        """
        del base
        try:
            async with Catalogue(self._config) as catalogue:
                found = await catalogue.get(WantedAdapter, name)
        except CatalogueError as error:
            raise HttpError(503, f"the fleet's catalogue does not answer: {error}") from error
        return found.record.path if found else None
