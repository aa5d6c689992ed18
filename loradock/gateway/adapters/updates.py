"""Loading and unloading over HTTP: the endpoints of vLLM, and those of SGLang."""

from typing import Annotated, Final

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from loradock.client import AsyncClient, LoradockError, UnknownAdapter
from loradock.gateway.adapters.names import ModelNames, is_adapter_name
from loradock.gateway.adapters.table import AdapterTable
from loradock.gateway.http.errors import HttpError, error_of
from loradock.gateway.http.streams import json_response
from loradock.messages.errors import ErrorCode
from loradock.messages.views import AdapterView

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


class AdapterUpdates:
    """The endpoints that load and unload adapters."""

    def __init__(self, client: AsyncClient, table: AdapterTable, names: ModelNames) -> None:
        self._client = client
        self._table = table
        self._names: Final = names

    async def load(self, _: Request, body: LoadRequest) -> Response:
        """Answer vLLM's `POST /v1/load_lora_adapter`."""
        if not body.lora_name or not body.lora_path:
            raise HttpError(400, "both 'lora_name' and 'lora_path' are needed")
        await self._load(body.lora_name, body.lora_path, replace=body.load_inplace)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    async def unload(self, _: Request, body: UnloadRequest) -> Response:
        """Answer vLLM's `POST /v1/unload_lora_adapter`."""
        if not body.lora_name:
            raise HttpError(400, "'lora_name' is needed", "lora_name")
        await self._unload(body.lora_name)
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")

    async def sglang_load(self, _: Request, body: SglangLoadRequest) -> Response:
        """Answer SGLang's `POST /load_lora_adapter`."""
        try:
            await self._load(body.lora_name, body.lora_path, replace=False)
            if body.pinned:
                await self._client.hold(body.lora_name)
                await self._reread(body.lora_name)
        except (HttpError, LoradockError) as error:
            return self._sglang_answer(error)
        return self._sglang_answer(None)

    async def sglang_unload(self, _: Request, body: SglangUnloadRequest) -> Response:
        """Answer SGLang's `POST /unload_lora_adapter`."""
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
            raise HttpError(
                400,
                f"{name!r} is not a valid adapter name; 1 to 128 of A-Z a-z 0-9 . _ - are needed, "
                "without two dots in a row",
                "lora_name",
            )
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
        """Return an adapter's view, and note it so that a client reads its own writes."""
        try:
            view = (await self._client.show(name)).adapter
        except UnknownAdapter:
            self._table.update(name, None)
            return None
        self._table.update(name, view)
        return view
