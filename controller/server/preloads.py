"""Adapters that the server moves by itself: at its start, for requests with an image, ahead of use.

A request that contains an image and names no adapter runs with the default adapter. It is logged
with that adapter's name, so that the log specifies which adapter ran and a replay needs no options.
An adapter that the request names takes precedence. A default adapter's name is made from modality
and path: another path is another adapter, and after a restart with another path no request runs
with the old one.
"""

import hashlib
import secrets
from collections.abc import Collection, Container, Iterable, Mapping
from typing import Annotated, Final, Literal

from msgspec import Meta, Struct

from loradock.controller.core.use_history import UseHistory
from loradock.controller.core.world import World
from loradock.messages.control import PRELOAD
from loradock.messages.ids import AdapterName
from loradock.messages.prompts import MultimodalPrompt
from loradock.messages.records import InferenceRequested
from loradock.messages.requests import Generate, LoadAdapter, PrefetchAdapter, PrivateRequest

PRELOADS_MAX: Final = 10_000

_TIMEOUT_MS: Final = 3_600_000
"""The longest timeout of a request: an engine can load its model for many minutes first."""

_HALF_NS: Final = _TIMEOUT_MS * 1_000_000 // 2

_PREFETCH: Final = "prefetch-"
"""The ids of the server's own prefetches begin with this."""

Preload = tuple[str, str]
"""An adapter's name and path."""

Modality = Literal["image"]
"""A kind of content that a prompt can have in addition to text."""

DefaultPath = Annotated[str, Meta(min_length=1, max_length=4096)]

DefaultPaths = dict[Modality, DefaultPath]


def preload_requests(
    preloads: Iterable[Preload], waiting: Collection[Preload] = ()
) -> list[LoadAdapter]:
    """Return the requests that load them, except those that wait already.

    No client uses their ids.
    """
    start = secrets.token_hex(6)
    return [
        LoadAdapter(f"{PRELOAD}{start}-{number}", name, path, timeout_ms=_TIMEOUT_MS)
        for number, (name, path) in enumerate(preloads)
        if (name, path) not in waiting
    ]


def is_preload(message: object) -> bool:
    """Return whether an input is such a request, which no client repeats."""
    return isinstance(message, LoadAdapter) and message.request_id.startswith(PRELOAD)


def waiting_preloads(world: World) -> set[Preload]:
    """Return what the requests of earlier starts wait for.

    A server that is started again and again, and ends before its engine is ready, adds none. A
    request of which half of the time is over can end before the engine comes, so it is not counted.
    """
    latest_ns = world.time_ns + _HALF_NS
    adapters = [
        world.adapters[adapter_id]
        for request_id, pending in world.pending_requests.items()
        if request_id.startswith(PRELOAD) and pending.deadline_ns > latest_ns
        for adapter_id in pending.adapters
    ]
    # Without a path, the one is loaded under which the name is known.
    return {(one.name, path) for one in adapters for path in (one.path, "")}


class DefaultAdapter(Struct, frozen=True):
    """Name and path of a default adapter; it is loaded when a request first needs it."""

    name: AdapterName
    path: DefaultPath

    def load(self) -> LoadAdapter:
        """Return the request that loads it, with an id that no client uses."""
        return LoadAdapter(f"{self.name}-{secrets.token_hex(12)}", self.name, self.path)


class DefaultAdapters:
    """The default adapter of each modality."""

    def __init__(self, paths: Mapping[Modality, DefaultPath]) -> None:
        self.by_modality: Final = {m: _adapter(m, path) for m, path in paths.items()}

    def adapter_of(self, message: PrivateRequest) -> DefaultAdapter | None:
        """Return the default adapter that the request runs with; None if there is none."""
        match message:
            case Generate(adapter=None, prompt=MultimodalPrompt()):
                return self.by_modality.get("image")
        return None


def _adapter(modality: Modality, path: DefaultPath) -> DefaultAdapter:
    digest = hashlib.blake2b(path.encode(), digest_size=4).hexdigest()
    return DefaultAdapter(f"default-{modality}-{digest}", path)


class HistoryPrefetches:
    """The prefetches of `--prefetch-history`, which follow from the requests since this start."""

    def __init__(self) -> None:
        self._history = UseHistory()
        self._start: Final = secrets.token_hex(6)
        self._count = 0

    def record(self, message: InferenceRequested, time_ns: int) -> None:
        """Record a request at its recorded time."""
        if message.adapter:
            self._history.use(message.adapter, time_ns)

    def next_ns(self) -> int | None:
        """Return when a prefetch is due; None if none is."""
        return self._history.next_ns()

    def take_due(self, time_ns: int, known: Container[AdapterName]) -> list[PrefetchAdapter]:
        """Return the prefetches of known adapters that are due; no client uses their ids."""
        names = [name for name in self._history.take_due(time_ns) if name in known]
        first, self._count = self._count, self._count + len(names)
        return [
            PrefetchAdapter(f"{_PREFETCH}{self._start}-{number}", name)
            for number, name in enumerate(names, first)
        ]


def is_own_prefetch(message: object) -> bool:
    """Return whether an input is such a prefetch, for which no client waits."""
    return isinstance(message, PrefetchAdapter) and message.request_id.startswith(_PREFETCH)
