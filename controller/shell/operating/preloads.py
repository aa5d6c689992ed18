"""Adapters that a server loads when it starts."""

import secrets
from collections.abc import Iterable
from typing import Final

from messages.control import PRELOAD
from messages.requests import LoadAdapter

PRELOADS_MAX: Final = 10_000


def preload_requests(preloads: Iterable[tuple[str, str]]) -> list[LoadAdapter]:
    """Return the requests that load them, with ids that no client uses."""
    start = secrets.token_hex(6)
    return [
        LoadAdapter(f"{PRELOAD}{start}-{number}", name, path)
        for number, (name, path) in enumerate(preloads)
    ]
