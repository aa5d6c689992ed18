"""Adapters and models in the answers of the gateway."""

import msgspec
from msgspec import Struct

from loradock.gateway.timestamps import unix_seconds
from loradock.messages.views import AdapterView

OWNER = "loradock"


class ModelCard(Struct, frozen=True, kw_only=True):
    """A model of `GET /v1/models`; `parent` is the base model of an adapter."""

    id: str
    object: str = "model"
    created: int
    owned_by: str = OWNER
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
    return AdapterCard(
        id=view.adapter,
        state=view.state,
        goal=view.goal,
        slot=view.slot if view.slot >= 0 else None,
        generation=view.generation,
        path=view.path,
        fingerprint=view.fingerprint,
        rank=view.rank,
        held=view.held,
        retired=view.retired,
        leases=view.leases,
        waiting=view.waiting,
        bytes={
            "host": view.host_bytes,
            "pinned": view.pinned_bytes,
            "device": view.device_bytes,
        },
        uses=view.uses,
        loads=view.loads,
        hits=view.hits,
        evictions=view.evictions,
        failures=view.failures,
        last_used=view.last_used_ns / 1e9,
        counters=msgspec.structs.asdict(view.counters),
        warnings=list(view.warnings),
    )


def model_card(name: str, root: str, parent: str | None, context: int | None) -> ModelCard:
    """Return the card of one model."""
    return ModelCard(
        id=name, created=unix_seconds(), root=root, parent=parent, max_model_len=context
    )
