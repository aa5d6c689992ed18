"""From the `model` of a request to an adapter that the controller knows."""

from typing import NamedTuple

from loradock.client import AsyncClient, UnknownAdapter
from loradock.gateway.adapters.names import ModelNames
from loradock.gateway.adapters.resolvers import Resolution
from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.http.errors import model_not_found
from loradock.messages.views import AdapterView


class Version(NamedTuple):
    """What identifies the files of an adapter, and `path`, where they are.

    `acceptances`: how often the engine has accepted files under the name, as far as events say:
    files without weights may change while the fingerprint stays.
    """

    adapter_id: int
    fingerprint: str
    path: str
    acceptances: int


class Models:
    """Finds adapters by name: in the table, at the controller, and with the resolvers."""

    def __init__(
        self, client: AsyncClient, table: AdapterTable, names: ModelNames, resolution: Resolution
    ) -> None:
        self._client = client
        self._table = table
        self._resolution = resolution
        self.names = names

    async def find(self, model: str | None) -> str | None:
        """Return the adapter that `model` names, or None for the base model.

        Raises `HttpError` with status 404 for an unknown name.
        """
        # The usual case first; a name of the base model is no adapter's.
        if model in self._table.views and model not in self.names.base_names:
            return model
        adapter = self.names.adapter_of(model)
        if adapter is None or adapter in self._table.views:
            return adapter
        try:
            # Another client may have loaded it a moment ago.
            await self._reread(adapter)
        except UnknownAdapter as error:
            if not await self._resolution.resolve(self.names.base, adapter):
                raise model_not_found(model or adapter) from error
        return adapter

    async def version_of(self, adapter: str) -> Version:
        """Return the current version of an adapter; raises `LoradockError`."""
        table = self._table
        view = table.views.get(adapter)
        if view is None or adapter in table.replaced:
            view = await self._reread(adapter)
        # Events that were lost may have been acceptances.
        count = table.acceptances[adapter] + table.totals.gaps
        return Version(view.adapter_id, view.fingerprint, view.path, count)

    async def _reread(self, adapter: str) -> AdapterView:
        view = (await self._client.show(adapter)).adapter
        self._table.update(adapter, view)
        return view
