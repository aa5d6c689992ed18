"""Models as HTTP clients name and see them, and the adapters that names stand for.

A name is the base model's, an adapter's, or both with a colon between them.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

import structlog
from msgspec import Struct, convert, structs

from loradock.client import UnknownAdapter
from loradock.gateway.adapters.follower import AdapterTable, Follower
from loradock.gateway.adapters.sources import Resolution, is_adapter_name
from loradock.gateway.http.errors import HttpError, model_not_found
from loradock.gateway.recorder import unix_seconds
from loradock.messages.errors import ErrorCode
from loradock.messages.views import AdapterView

BASE_NAME_DEFAULT: Final = "base"

log = structlog.get_logger("gateway")


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model of `GET /v1/models`; `parent` is the base model of an adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = "loradock"
    root: str
    parent: str | None
    max_model_len: int | None


class ModelList(Struct, frozen=True):
    """All models, the base model first."""

    data: list[ModelCard]
    object: str = "list"


class AdapterCard(Struct, frozen=True, kw_only=True):
    """State and counters of an adapter; sizes in bytes, `last_used` in Unix seconds.

    `slot` is null outside `gpu-slot`. `bytes` has the sizes per tier. `warnings` are findings about
    the files that do not prevent its use.
    """

    id: str
    object: str = "lora_adapter"
    state: str
    goal: str
    slot: int | None
    generation: int
    path: str
    fingerprint: str
    rank: int
    held: bool
    retired: bool
    leases: int
    waiting: int
    bytes: dict[str, int]
    uses: int
    loads: int
    hits: int
    evictions: int
    failures: int
    last_used: float
    counters: dict[str, int]
    warnings: list[str]


class AdapterCards(Struct, frozen=True):
    """All adapters as of event `events_seq`."""

    data: list[AdapterCard]
    events_seq: int
    object: str = "list"


def adapter_card(view: AdapterView) -> AdapterCard:
    """Return one adapter as HTTP clients see it."""
    own = {
        "id": view.adapter,
        "slot": view.slot if view.slot >= 0 else None,
        "bytes": {tier: getattr(view, f"{tier}_bytes") for tier in ("host", "pinned", "device")},
        "last_used": view.last_used_ns / 1e9,
        "counters": structs.asdict(view.counters),
    }
    return convert(structs.asdict(view) | own, AdapterCard)


def model_card(name: str, root: str, parent: str | None, context: int | None) -> ModelCard:
    """Return the card of one model."""
    return ModelCard(
        id=name, created=unix_seconds(), root=root, parent=parent, max_model_len=context
    )


class ModelNames:
    """The names of the base model; the first one is in answers."""

    def __init__(self, served: Sequence[str], directory: str = "") -> None:
        """`directory`: the base model's, which also names it; empty if it is not known."""
        self._served: Final = tuple(served)
        self.directory: Final = directory
        self.base_names: tuple[str, ...] = self._served or (BASE_NAME_DEFAULT,)
        """All names of the base model."""
        if directory and not served:
            self.base_names = (Path(directory).resolve().name or BASE_NAME_DEFAULT, directory)

    def set_own_name(self, name: str) -> None:
        """Set the name that the engine reports, if the directory is not known."""
        self.base_names = self._served or (name,)

    @property
    def listed(self) -> tuple[str, ...]:
        """The names of the base model in lists: all that are configured, else its own."""
        return self._served or self.base_names[:1]

    @property
    def base(self) -> str:
        """The name of the base model in answers."""
        return self.base_names[0]

    def adapter_of(self, model: str | None) -> str | None:
        """Return the adapter that a request names; None for the base model.

        Raises `HttpError` for a name that no adapter can have.
        """
        if not model or model in self.base_names:
            return None
        for base in self.base_names:
            if model.startswith(f"{base}:"):
                model = model[len(base) + 1 :]
                break
        if not is_adapter_name(model):
            raise model_not_found(model)
        return model

    def shown(self, adapter: str | None) -> str:
        """Return the name of the model in answers."""
        return self.base if adapter is None else adapter


def context_tokens(directory: str) -> int | None:
    """Return the context length in a model's config.json; None if it has none."""
    try:
        config = json.loads((Path(directory) / "config.json").read_text())
    except (OSError, ValueError):
        return None
    for part in (config, config.get("text_config")) if isinstance(config, dict) else ():
        found = part.get("max_position_embeddings") if isinstance(part, dict) else None
        if isinstance(found, int) and found > 0:
            return found
    return None


def model_cards(names: ModelNames, table: AdapterTable, context: int | None) -> ModelList:
    """Return a card per name of the base model, and per adapter that was loaded at least once."""
    bases = (model_card(one, names.directory or one, None, context) for one in names.listed)
    adapters = (
        model_card(view.adapter, view.path, names.base, context)
        for _, view in sorted(table.views.items())
        if view.fingerprint
    )
    return ModelList([*bases, *adapters])


class Version(NamedTuple):
    """The identity of an adapter's files, and their `path`.

    `acceptances`: how often the engine has accepted files under the name, as far as events say:
    files without weights can change while the fingerprint stays.
    """

    adapter_id: int
    fingerprint: str
    path: str
    acceptances: int


class Fingerprints(Protocol):
    """What the adapters of a fleet are, by its catalogue."""

    def fingerprint_of(self, name: str) -> str:
        """Return the fingerprint that an adapter's files must have; empty for any."""


class Models:
    """Finds adapters by name: in the table, at the controller, and with the resolvers.

    In a fleet, an adapter whose files are not those of the catalogue is found by no request.
    """

    def __init__(
        self,
        follower: Follower,
        names: ModelNames,
        resolution: Resolution,
        fingerprints: Fingerprints | None = None,
    ) -> None:
        self._follower = follower
        self._table = follower.table
        self._resolution = resolution
        self._fingerprints = fingerprints
        # Why adapters are refused, as the log has it.
        self._refused: dict[str, str] = {}
        self.names = names

    async def find(self, model: str | None) -> str | None:
        """Return the adapter that `model` names, or None for the base model.

        Raises `HttpError` with status 404 for an unknown name, and with 503 for an adapter that
        another dock of the fleet must serve.
        """
        # The usual case first; a name of the base model is no adapter's.
        if model in self._table.views and model not in self.names.base_names:
            adapter: str | None = model
        else:
            adapter = await self._find(model)
        if adapter is not None and self._fingerprints is not None:
            await self._check(adapter, self._fingerprints.fingerprint_of(adapter))
        return adapter

    async def _find(self, model: str | None) -> str | None:
        adapter = self.names.adapter_of(model)
        if adapter is None or adapter in self._table.views:
            return adapter
        try:
            # Another client may have loaded it a moment ago.
            await self._follower.reread(adapter)
        except UnknownAdapter as error:
            if not await self._resolution.resolve(self.names.base, adapter):
                raise model_not_found(model or adapter) from error
        return adapter

    async def _check(self, adapter: str, fingerprint: str) -> None:
        """Raise `HttpError` for an adapter whose files have another fingerprint."""
        if not fingerprint:
            return
        found = await self._current(adapter)
        if not found.fingerprint:
            # Its first load is running.
            await self._resolution.resolve(self.names.base, adapter)
            found = await self._follower.reread(adapter)
        if found.fingerprint == fingerprint:
            self._refused.pop(adapter, None)
            return
        reason = (
            f"{ErrorCode.CONFLICT}: adapter {adapter!r}: the files here have the fingerprint "
            f"{found.fingerprint}, and the fleet's catalogue has {fingerprint}; copy the right "
            f"files here, and load them with `loradock load {adapter} --replace`"
        )
        if self._refused.get(adapter) != reason:
            self._refused[adapter] = reason
            log.error("an adapter of the fleet is refused", adapter=adapter, reason=reason)
        raise HttpError(503, reason, "model", ErrorCode.CONFLICT.value)

    async def version_of(self, adapter: str) -> Version:
        """Return the current version of an adapter; raises `LoradockError`."""
        view, table = await self._current(adapter), self._table
        # Events that were lost may have been acceptances.
        count = table.acceptances[adapter] + table.totals.gaps
        return Version(view.adapter_id, view.fingerprint, view.path, count)

    async def _current(self, adapter: str) -> AdapterView:
        view = self._table.views.get(adapter)
        if view is None or adapter in self._table.replaced:
            view = await self._follower.reread(adapter)
        return view
