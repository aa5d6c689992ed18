"""LoRADock's own endpoints: models, adapters with their counters, and moves between the tiers."""

from collections.abc import Awaitable, Callable
from typing import Final

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from loradock.client import AsyncClient
from loradock.gateway.adapters.names import ModelNames, is_adapter_name, model_cards
from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.adapters.views import AdapterCards, adapter_card
from loradock.gateway.http.errors import HttpError
from loradock.gateway.http.streams import json_response
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import AdapterDone
from loradock.messages.views import PrefetchTarget


class PrefetchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """How far an adapter is moved towards its use."""

    to: PrefetchTarget = "gpu-slot"


class NoFields(Struct, frozen=True, forbid_unknown_fields=True):
    """A body without fields: `{}`."""


class MoveAnswer(Struct, frozen=True):
    """The state that an adapter has reached; `slot` is null outside `gpu-slot`."""

    id: str
    state: str
    slot: int | None
    generation: int


class PrefetchAnswer(Struct, frozen=True):
    """The state that an adapter is in, and the one that it moves to."""

    id: str
    state: str
    goal: str


class Residency:
    """The endpoints about models and about where adapters are."""

    def __init__(
        self,
        client: AsyncClient,
        table: AdapterTable,
        names: ModelNames,
        context: int | None,
    ) -> None:
        self._client = client
        self._table = table
        self._names = names
        self._context: Final = context

    async def models(self, _: Request) -> Response:
        """Answer `GET /v1/models`."""
        return json_response(model_cards(self._names, self._table, self._context))

    async def model(self, request: Request) -> Response:
        """Answer `GET /v1/models/{model}`."""
        cards = model_cards(self._names, self._table, self._context).data
        name = request.path_params["model"]
        adapter = self._names.adapter_of(name)
        # The directory of the base model names it too, and is not listed.
        shown = name if name in self._names.listed else self._names.shown(adapter)
        for card in cards:
            if card.id == shown and (card.parent is None) == (adapter is None):
                return json_response(card)
        code = ErrorCode.UNKNOWN_ADAPTER.value
        raise HttpError(404, f"{code}: the model {name!r} does not exist", "model", code)

    async def adapters(self, _: Request) -> Response:
        """Answer `GET /v1/lora_adapters`."""
        listed = await self._client.list()
        return json_response(AdapterCards([*map(adapter_card, listed.adapters)], listed.events_seq))

    async def adapter(self, request: Request) -> Response:
        """Answer `GET /v1/lora_adapters/{name}`."""
        shown = await self._client.show(_name_of(request))
        return json_response(adapter_card(shown.adapter))

    async def hold(self, request: Request, _: NoFields) -> Response:
        """Answer `POST /v1/lora_adapters/{name}/hold`."""
        return await self._move(request, self._client.hold)

    async def release(self, request: Request, _: NoFields) -> Response:
        """Answer `POST /v1/lora_adapters/{name}/release`."""
        return await self._move(request, self._client.release)

    async def evict(self, request: Request, _: NoFields) -> Response:
        """Answer `POST /v1/lora_adapters/{name}/evict`."""
        return await self._move(request, self._client.evict)

    async def prefetch(self, request: Request, body: PrefetchRequest) -> Response:
        """Answer `POST /v1/lora_adapters/{name}/prefetch`, before the adapter moves."""
        name = _name_of(request)
        await self._client.show(name)
        accepted = await self._client.prefetch(name, target=body.to)
        return json_response(PrefetchAnswer(accepted.adapter, accepted.state, accepted.goal))

    async def _move(
        self, request: Request, move: Callable[[str], Awaitable[AdapterDone]]
    ) -> Response:
        name = _name_of(request)
        # An unknown name is refused here: the controller would register it as a new adapter.
        await self._client.show(name)
        done = await move(name)
        slot = done.slot if done.slot >= 0 else None
        return json_response(MoveAnswer(done.adapter, done.state, slot, done.generation))


def _name_of(request: Request) -> str:
    name = str(request.path_params["name"])
    if not is_adapter_name(name):
        code = ErrorCode.UNKNOWN_ADAPTER.value
        raise HttpError(404, f"{code}: no adapter is called {name!r}", "name", code)
    return name
