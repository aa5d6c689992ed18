"""What a directory was served with before: a start with another model or less room is a question.

Adapters of the directory would be evicted, or refused by the other model.
"""

from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from loradock.controller.core.limits import Limits, limits_to
from loradock.controller.server.startup.sizes import format_size

FILE: Final = "served.json"

_CAPACITIES: Final = (
    *("slots_max", "host_adapters_max", "host_bytes_max", "pinned_bytes_max"),
    *("device_bytes_max", "known_adapters_max"),
)


class Served(Struct, frozen=True):
    """The content of the file; `model` is empty for an engine that is started elsewhere."""

    model: str
    limits: dict[str, int]
    policy: str


def served(model: str, limits: Limits, policy: str) -> Served:
    """Return what a server is started with."""
    return Served(str(Path(model).resolve()) if model else "", limits_to(limits), policy)


def read_served(directory: Path) -> Served | None:
    """Return what the directory was served with; None if that is not known."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=Served)
    except (OSError, msgspec.DecodeError):
        return None


def write_served(directory: Path, now: Served) -> None:
    """Note what the directory is served with; raises `OSError`."""
    draft = directory / f"{FILE}.new"
    draft.write_bytes(msgspec.json.encode(now))
    draft.replace(directory / FILE)


def changes(before: Served | None, now: Served) -> list[str]:
    """Return what is different and evicts or excludes adapters of the directory."""
    if before is None:
        return []
    found = []
    if before.model and now.model and before.model != now.model:
        found.append(f"the model is {now.model} instead of {before.model}")
    for name in _CAPACITIES:
        old, new = before.limits.get(name, 0), now.limits[name]
        if new < old:
            found.append(f"{_option(name)} is {_value(name, new)} instead of {_value(name, old)}")
    return found


def _option(limit: str) -> str:
    """Return the option of `serve` that sets a limit."""
    return "--" + limit.removesuffix("_max").replace("_", "-")


def _value(limit: str, value: int) -> str:
    return format_size(value) if limit.endswith("_bytes_max") else str(value)
