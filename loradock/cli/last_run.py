"""Model and limits of a directory's last run: another model or lower limits are confirmed.

Adapters of the directory would be evicted, or refused by the other model.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

from loradock.controller.core.limits import Limits, limits_to
from loradock.messages.options import options_of

FILE: Final = "served.json"

_CAPACITIES: Final = (
    *("max_loras", "max_cpu_loras", "host_bytes_max", "pinned_bytes_max"),
    *("device_bytes_max", "known_adapters_max"),
)


class LastRun(Struct, frozen=True):
    """The content of the file; `model` is empty for an engine that is started elsewhere.

    `adapter_roots` and `max_lora_rank` are for commands that look at adapters before they are
    loaded; empty and 0 if not known.
    """

    model: str
    limits: dict[str, int]
    adapter_roots: tuple[str, ...] = ()
    max_lora_rank: int = 0


def run_of(
    model: str, limits: Limits, roots: Sequence[str] = (), max_lora_rank: int = 0
) -> LastRun:
    """Return what a server is started with."""
    return LastRun(
        str(Path(model).resolve()) if model else "",
        limits_to(limits),
        tuple(str(Path(root).resolve()) for root in roots),
        max_lora_rank,
    )


def read_last_run(directory: Path) -> LastRun | None:
    """Return what the directory was served with; None if that is not known."""
    try:
        return msgspec.json.decode((directory / FILE).read_bytes(), type=LastRun)
    except (OSError, msgspec.DecodeError):
        return None


def write_last_run(directory: Path, run: LastRun) -> None:
    """Record what the directory is served with; raises `OSError`."""
    draft = directory / f"{FILE}.new"
    draft.write_bytes(msgspec.json.encode(run))
    draft.replace(directory / FILE)


def changes(before: LastRun | None, now: LastRun) -> list[str]:
    """Return what is different and evicts or excludes adapters of the directory."""
    if before is None:
        return []
    found = []
    if before.model and now.model and before.model != now.model:
        found.append(f"the model is {now.model} instead of {before.model}")
    for option in options_of(Limits):
        if option.field in _CAPACITIES:
            old, new = before.limits.get(option.encoded, 0), now.limits[option.encoded]
            if new < old:
                found.append(f"{option.flag} is {option.shown(new)} instead of {option.shown(old)}")
    return found
