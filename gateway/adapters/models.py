"""From the `model` of a request to an adapter that the controller knows."""

from controller.client import AsyncClient, UnknownAdapter
from gateway.adapters.names import ModelNames
from gateway.adapters.resolvers import Resolution
from gateway.adapters.table import AdapterTable
from gateway.http.errors import model_not_found


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
            await self._client.show(adapter)
        except UnknownAdapter as error:
            if not await self._resolution.resolve(self.names.base, adapter):
                raise model_not_found(model or adapter) from error
        return adapter
