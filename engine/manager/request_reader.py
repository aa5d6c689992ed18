"""Adapters by request: which files have to be read, and reading them.

What it is: `LoRARequest`s turned into checked adapters. What it is not: a keeper of adapters; it
only remembers what the files of those that are kept were. One rule: a request means the files of
its path, so an id that stands for others is a conflict and never answered with them.
"""

import os
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from engine.adapters.compatibility import ModelSide
from engine.adapters.files.problems import shown
from engine.adapters.lora_model import LoRARequest
from engine.adapters.reader import LoadedAdapter, read_adapter
from engine.config import AdapterBounds
from engine.errors import AdapterNotFound, Conflict, NotResident
from engine.manager.metrics import Clock, Durations
from engine.punica.mapping import BASE, LoRAMapping

Marks = tuple[tuple[str, int, int, int, int], ...]
"""What tells an adapter's files from others under the same names, without reading them."""


class Source(NamedTuple):
    """Where an adapter that is kept came from; `path` is its id where that was memory."""

    path: str
    fingerprint: str


class ReadAdapter(NamedTuple):
    """An adapter as its files gave it."""

    loaded: LoadedAdapter
    path: str


class RequestReader:
    """Reads what requests ask for.

    `roots`: the directories that adapters may lie under; None takes any path. Links below a root
    (or, without roots, in the adapter's own directory) are refused either way. `allow_pickled`: see
    `adapter_files.open_adapter`.
    """

    def __init__(
        self,
        side: ModelSide,
        roots: Sequence[Path] | None,
        bounds: AdapterBounds,
        allow_pickled: bool,
    ) -> None:
        self._side = side
        self._roots = roots
        self._bounds = bounds
        self._allow_pickled = allow_pickled
        # By source, so that what was read says nothing of an adapter that came another way.
        self._marks: dict[Source, Marks] = {}

    def is_stale(self, request: LoRARequest, source: Source | None) -> bool:
        """Whether a request needs its files read; raises `Conflict` where its id means others.

        `load_inplace` does where the files are not those that were read, however often it is asked.
        """
        if source is None:
            return True
        asked = path_of(request)
        if request.load_inplace:
            return asked != source.path or self._marks.get(source) != _marks_of(asked)
        if asked not in ("", source.path):
            raise Conflict(
                f"adapter {request.lora_int_id} ({request.lora_name!r}) was loaded from "
                f"{source.path!r}, not {asked!r}; use another lora_int_id, or load_inplace to "
                "replace it"
            )
        return False

    def read(self, request: LoRARequest, loads: Durations, clock: Clock) -> ReadAdapter:
        """Read and check a request's files; raises what `read_adapter` raises."""
        path = path_of(request)
        if not path:
            raise AdapterNotFound(
                f"adapter {request.lora_int_id} ({request.lora_name!r}) is not on the host and "
                "its request has no lora_path"
            )
        roots = [Path(path)] if self._roots is None else self._roots
        # Taken first: what changes while it is read is found changed at the next request.
        marks = _marks_of(path)
        with loads.measure(clock):
            loaded = read_adapter(
                path,
                roots,
                self._side,
                self._bounds,
                request.lora_name,
                allow_pickled=self._allow_pickled,
            )
        self._marks[Source(path, loaded.fingerprint)] = marks
        return ReadAdapter(loaded, path)

    def forget_all_but(self, sources: Collection[Source | None]) -> None:
        """Forget the files of adapters that are not kept."""
        self._marks = {source: m for source, m in self._marks.items() if source in sources}


def by_id(lora_requests: Iterable[LoRARequest]) -> dict[int, LoRARequest]:
    """A batch's requests, each id once; raises `Conflict` for one id with two paths."""
    wanted: dict[int, LoRARequest] = {}
    for request in lora_requests:
        other = wanted.setdefault(request.lora_int_id, request)
        if path_of(other) != path_of(request):
            raise Conflict(
                f"lora_int_id {request.lora_int_id} is {other.lora_path!r} and "
                f"{request.lora_path!r} in one batch; give each adapter an id of its own"
            )
    return wanted


def check_named(mapping: LoRAMapping, wanted: Collection[int]) -> None:
    """Raise `NotResident` for a mapping that names adapters beside `wanted` and the base model."""
    rows = (*mapping.index_mapping.tolist(), *mapping.prompt_mapping.tolist())
    others = sorted(set(rows).difference(wanted, {BASE}))
    if others:
        raise NotResident(
            f"the mapping names adapters {others} that the batch does not ask for; it asks for "
            f"{sorted(wanted)}"
        )


def path_of(request: LoRARequest) -> str:
    """A request's path, absolute; empty where it has none."""
    return os.path.abspath(request.lora_path) if request.lora_path else ""


def _marks_of(path: str) -> Marks:
    try:
        with os.scandir(path) as entries:
            found = [(entry.name, entry.stat(follow_symlinks=False)) for entry in entries]
    except (OSError, ValueError) as error:
        raise AdapterNotFound(f"{shown(path)} can't be looked at: {error}") from error
    return tuple(
        sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in found)
    )
