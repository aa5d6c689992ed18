"""Endpoints about models and adapters: LoRADock's own, and those of vLLM and SGLang that load them.

A change is noted in the table at once, so that a client reads its own writes.
"""

from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Annotated, Any, Final

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from loradock.client import AsyncClient, LoradockError, UnknownAdapter
from loradock.gateway.adapters.follower import Follower
from loradock.gateway.adapters.models import (
    AdapterCard,
    AdapterCards,
    ModelCard,
    ModelList,
    ModelNames,
    adapter_card,
    model_cards,
)
from loradock.gateway.adapters.sources import is_adapter_name
from loradock.gateway.http.endpoint import CHANGES, get, json_response, post
from loradock.gateway.http.errors import HttpError, error_of
from loradock.messages.errors import ErrorCode
from loradock.messages.requests import AdapterDone
from loradock.messages.views import AdapterView, PrefetchTarget

_UPDATE: Final[dict[str, Any]] = {"access": "updating", "errors": CHANGES}
_MOVES: Final = "/v1/lora_adapters/{name}"


class PrefetchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The tier that an adapter is moved to."""

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


LoraName = Annotated[str, Meta(description="The adapter's name.", max_length=128)]
LoraPath = Annotated[
    str,
    Meta(
        description="The adapter's directory: absolute below an adapter root of the engine, or "
        "relative to one.",
        max_length=4096,
    ),
]


class LoadRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's body. `load_inplace` replaces the content of a known name.

    The layout of experts is read from the files and names are unique, so `is_3d_lora_weight` and
    `lora_int_id` change nothing.
    """

    lora_name: LoraName = ""
    lora_path: LoraPath = ""
    load_inplace: bool = False
    is_3d_lora_weight: bool = False
    lora_int_id: int | None = None
    base_model_name: str | None = None


class UnloadRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """vLLM's body; `lora_int_id` changes nothing, because names are unique."""

    lora_name: LoraName = ""
    lora_int_id: int | None = None


class SglangLoadRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's body. A `pinned` adapter is held in its slot."""

    lora_name: LoraName
    lora_path: LoraPath
    pinned: bool = False
    lora_id: str | None = None


class SglangUnloadRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """SGLang's body."""

    lora_name: LoraName
    lora_id: str | None = None


class SglangAnswer(Struct, frozen=True):
    """SGLang's answer; `loaded_adapters` are the paths of all loaded adapters by name."""

    success: bool
    error_message: str
    loaded_adapters: dict[str, str]


class AdapterEndpoints:
    """The endpoints about models, about where adapters are, and those that load and unload them."""

    def __init__(
        self, client: AsyncClient, follower: Follower, names: ModelNames, context: int | None
    ) -> None:
        self._client = client
        self._follower = follower
        self._table = follower.table
        self._names = names
        self._context: Final = context

    @get("/v1/models")
    async def models(self) -> ModelList:
        """The base model and all adapters."""
        return model_cards(self._names, self._table, self._context)

    @get("/v1/models/{model:path}", errors=(404,))
    async def model(self, request: Request) -> ModelCard:
        """One model."""
        cards = model_cards(self._names, self._table, self._context).data
        name = request.path_params["model"]
        adapter = self._names.adapter_of(name)
        # The directory of the base model names it too, and is not listed.
        shown = name if name in self._names.listed else self._names.shown(adapter)
        for card in cards:
            if card.id == shown and (card.parent is None) == (adapter is None):
                return card
        code = ErrorCode.UNKNOWN_ADAPTER.value
        raise HttpError(404, f"{code}: the model {name!r} does not exist", "model", code)

    @get("/v1/lora_adapters", errors=(503,))
    async def adapters(self) -> AdapterCards:
        """State and counters of all adapters."""
        listed = await self._client.list()
        return AdapterCards([*map(adapter_card, listed.adapters)], listed.events_seq)

    @get("/v1/lora_adapters/{name}", errors=(404, 503))
    async def adapter(self, request: Request) -> AdapterCard:
        """State and counters of an adapter."""
        shown = await self._client.show(_name_of(request))
        return adapter_card(shown.adapter)

    @post(f"{_MOVES}/hold", **_UPDATE)
    async def hold(self, request: Request, body: NoFields) -> MoveAnswer:  # noqa: ARG002 - it is {}
        """Exempt from eviction."""
        return await self._move(request, self._client.hold)

    @post(f"{_MOVES}/release", **_UPDATE)
    async def release(self, request: Request, body: NoFields) -> MoveAnswer:  # noqa: ARG002
        """End a hold."""
        return await self._move(request, self._client.release)

    @post(f"{_MOVES}/evict", **_UPDATE)
    async def evict(self, request: Request, body: NoFields) -> MoveAnswer:  # noqa: ARG002
        """Drop the weights."""
        return await self._move(request, self._client.evict)

    @post(f"{_MOVES}/prefetch", **_UPDATE)
    async def prefetch(self, request: Request, body: PrefetchRequest) -> PrefetchAnswer:
        """Move towards a slot.

        The answer precedes the move.
        """
        name = _name_of(request)
        await self._client.show(name)
        accepted = await self._client.prefetch(name, target=body.to)
        return PrefetchAnswer(accepted.adapter, accepted.state, accepted.goal)

    async def _move(
        self, request: Request, move: Callable[[str], Awaitable[AdapterDone]]
    ) -> MoveAnswer:
        name = _name_of(request)
        # An unknown name is refused here: the controller would register it as a new adapter.
        await self._client.show(name)
        done = await move(name)
        slot = done.slot if done.slot >= 0 else None
        return MoveAnswer(done.adapter, done.state, slot, done.generation)

    @post("/v1/load_lora_adapter", **_UPDATE)
    async def load(self, body: LoadRequest) -> str:
        """Load an adapter."""
        if not body.lora_name or not body.lora_path:
            raise HttpError(400, "send both 'lora_name' and 'lora_path'")
        await self._load(body.lora_name, body.lora_path, replace=body.load_inplace)
        return f"Success: LoRA adapter '{body.lora_name}' added successfully."

    @post("/v1/unload_lora_adapter", **_UPDATE)
    async def unload(self, body: UnloadRequest) -> str:
        """Remove an adapter."""
        if not body.lora_name:
            raise HttpError(400, "send 'lora_name'", "lora_name")
        await self._unload(body.lora_name)
        return f"Success: LoRA adapter '{body.lora_name}' removed successfully."

    @post("/load_lora_adapter", answer=SglangAnswer, failure=SglangAnswer, **_UPDATE)
    async def sglang_load(self, body: SglangLoadRequest) -> Response:
        """Load an adapter, as in SGLang."""
        try:
            await self._load(body.lora_name, body.lora_path, replace=False)
            if body.pinned:
                await self._client.hold(body.lora_name)
                await self._reread(body.lora_name)
        except (HttpError, LoradockError) as error:
            return self._sglang_answer(error)
        return self._sglang_answer(None)

    @post("/unload_lora_adapter", answer=SglangAnswer, failure=SglangAnswer, **_UPDATE)
    async def sglang_unload(self, body: SglangUnloadRequest) -> Response:
        """Remove an adapter, as in SGLang."""
        try:
            await self._unload(body.lora_name)
        except (HttpError, LoradockError) as error:
            return self._sglang_answer(error)
        return self._sglang_answer(None)

    def _sglang_answer(self, error: HttpError | LoradockError | None) -> Response:
        views = self._table.views.values()
        loaded = {view.adapter: view.path for view in views if view.fingerprint}
        if error is None:
            return json_response(SglangAnswer(True, "", loaded))
        shown = error_of(error) if isinstance(error, LoradockError) else error
        return json_response(SglangAnswer(False, shown.message, loaded), max(400, shown.status))

    async def _load(self, name: str, path: str, *, replace: bool) -> None:
        if name in self._names.base_names:
            raise HttpError(400, f"{name!r} is the name of the base model", "lora_name")
        if not is_adapter_name(name):
            message = (
                "an adapter name must be 1 to 128 of A-Z a-z 0-9 . _ - without two dots in a row, "
                f"got {name!r}"
            )
            raise HttpError(400, message, "lora_name")
        known = await self._reread(name)
        if known is not None and known.fingerprint and not replace:
            code = ErrorCode.CONFLICT.value
            message = f"{code}: the LoRA adapter '{name}' has already been loaded"
            raise HttpError(400, message, "lora_name", code)
        try:
            # A failed load leaves its name with its path, so another path needs `replace`.
            await self._client.load(name, path, replace=replace)
            # The event that says so may arrive after the client's next request.
            self._table.acceptances[name] += 1
        except LoradockError as error:
            raise error_of(error, "lora_path") from error
        finally:
            await self._reread(name)

    async def _unload(self, name: str) -> None:
        if not is_adapter_name(name) or await self._reread(name) is None:
            code = ErrorCode.UNKNOWN_ADAPTER.value
            message = f"{code}: the LoRA adapter '{name}' cannot be found"
            raise HttpError(404, message, "lora_name", code)
        try:
            # Requests that run or wait end first: the name was valid when they came.
            await self._client.remove(name, force=True)
        except UnknownAdapter:
            pass
        except LoradockError as error:
            raise error_of(error, "lora_name") from error
        finally:
            await self._reread(name)

    async def _reread(self, name: str) -> AdapterView | None:
        """Return an adapter's view, None if it is unknown, so that a client reads its writes."""
        with suppress(UnknownAdapter):
            return await self._follower.reread(name)
        return None


def _name_of(request: Request) -> str:
    name = str(request.path_params["name"])
    if not is_adapter_name(name):
        code = ErrorCode.UNKNOWN_ADAPTER.value
        raise HttpError(404, f"{code}: no adapter is called {name!r}", "name", code)
    return name
