"""Adapters that a server loads when it starts."""

import secrets
from collections.abc import Collection, Iterable
from typing import Final

from loradock.controller.core.world import World
from loradock.messages.control import PRELOAD
from loradock.messages.requests import LoadAdapter

PRELOADS_MAX: Final = 10_000

_TIMEOUT_MS: Final = 3_600_000
"""The longest that a request may have: an engine may load its model for many minutes first."""

_HALF_NS: Final = _TIMEOUT_MS * 1_000_000 // 2

Preload = tuple[str, str]
"""An adapter's name and path."""


def preload_requests(
    preloads: Iterable[Preload], waiting: Collection[Preload] = ()
) -> list[LoadAdapter]:
    """Return the requests that load them, except those that wait already.

    Their ids are ones that no client uses.
    """
    start = secrets.token_hex(6)
    return [
        LoadAdapter(f"{PRELOAD}{start}-{number}", name, path, timeout_ms=_TIMEOUT_MS)
        for number, (name, path) in enumerate(preloads)
        if (name, path) not in waiting
    ]


def is_preload(message: object) -> bool:
    """Whether an input is such a request, which no client repeats."""
    return isinstance(message, LoadAdapter) and message.request_id.startswith(PRELOAD)


def waiting_preloads(world: World) -> set[Preload]:
    """Return what the requests of earlier starts wait for.

    A server that is started again and again, and ends before its engine is ready, adds none. A
    request of which half of the time is over may end before the engine comes, so it is not counted.
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
