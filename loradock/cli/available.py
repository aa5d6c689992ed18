"""The adapters below the roots of a server: their names, ranks and sizes, read from this machine.

Only configs and sizes are read: whether the tensors fit the model is checked by the engine when an
adapter is loaded.
"""

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec

from loradock.cli.exit_codes import CommandError, ExitCode
from loradock.messages.engine_options import LORA_RANKS, LoRAOptions
from loradock.messages.ids import NAME_PATTERN
from loradock.messages.options import AUTOMATIC

_CONFIG: Final = "adapter_config.json"
_CONFIG_BYTES_MAX: Final = 1 << 20
_WEIGHTS_SUFFIXES: Final = (".safetensors", ".tensors", ".bin", ".pt")
_DEPTH_MAX: Final = 4
_PATTERN: Final = re.compile(r"[*?\[]")


class Available(NamedTuple):
    """An adapter below a root: `path` is relative to it, `size_bytes` that of its weights' files.

    `rank`: 0 if it is not known. `problem`: why it can't be loaded; empty if nothing is known.
    """

    name: str
    path: str
    rank: int
    size_bytes: int
    problem: str


def available(roots: Iterable[str | Path], rank_max: int = 0) -> list[Available]:
    """Return the adapters below the roots by name; `rank_max`: of the server, 0 if unknown.

    The name of a nested directory has dots for its slashes. Of one path below several roots, the
    first root's is loaded, so it is listed once.
    """
    found: dict[str, Available] = {}
    for root in roots:
        for directory in _directories(Path(root), _DEPTH_MAX):
            path = str(directory.relative_to(root))
            if path not in found:
                found[path] = _read(directory, path, rank_max)
    return sorted(found.values())


def _directories(directory: Path, depth: int) -> Iterator[Path]:
    """Yield the directories with an adapter's config; none is looked for below another."""
    try:
        with os.scandir(directory) as entries:
            names = sorted(one.name for one in entries if one.is_dir())
    except OSError as error:
        raise CommandError(
            ExitCode.NOT_FOUND, f"--adapter-root {directory} can't be read: {error.strerror}"
        ) from error
    for name in names:
        below = directory / name
        if (below / _CONFIG).is_file():
            yield below
        elif depth > 1 and os.access(below, os.R_OK | os.X_OK):
            yield from _directories(below, depth - 1)


def _read(directory: Path, path: str, rank_max: int) -> Available:
    name = path.replace("/", ".")
    config, problem = _config_of(directory / _CONFIG)
    weights = [one for one in directory.iterdir() if one.suffix in _WEIGHTS_SUFFIXES]
    rank = _rank_of(config)
    if not problem and config.get("peft_type", "LORA") != "LORA":
        problem = f"its peft_type is {config['peft_type']}, not LORA"
    if not problem and not weights:
        problem = "it has no weights"
    if not problem and rank_max and rank > rank_max:
        problem = f"rank {rank} exceeds --max-lora-rank {rank_max}"
    if not problem and not re.search(NAME_PATTERN, name):
        problem = "its directory's name is no adapter name: load NAME --path DIRECTORY"
    return Available(name, path, rank, sum(one.stat().st_size for one in weights), problem)


def _config_of(file: Path) -> tuple[dict[str, Any], str]:
    """Return the config, and why it can't be read."""
    try:
        with file.open("rb") as opened:
            raw = opened.read(_CONFIG_BYTES_MAX)
        return msgspec.json.decode(raw, type=dict[str, Any]), ""
    except (OSError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        return {}, f"its {_CONFIG} can't be read: {error}"


def _rank_of(config: dict[str, Any]) -> int:
    """Return the largest rank that a config names."""
    pattern = config.get("rank_pattern")
    ranks = [config.get("r"), *(pattern.values() if isinstance(pattern, dict) else ())]
    return max((rank for rank in ranks if type(rank) is int and rank > 0), default=0)


def automatic_rank(roots: Sequence[str | Path]) -> int:
    """Return the smallest `--max-lora-rank` that admits all adapters; raises `CommandError`."""
    rank = max((one.rank for one in available(roots)), default=0)
    if not rank:
        raise CommandError(
            ExitCode.USAGE,
            "--max-lora-rank auto found no adapter below --adapter-root",
            "name a rank, for example --max-lora-rank 64",
        )
    return min((one for one in LORA_RANKS if one >= rank), default=LORA_RANKS[-1])


def with_rank(lora: LoRAOptions, roots: Sequence[str | Path]) -> LoRAOptions:
    """Return the options with a number for `--max-lora-rank auto`."""
    if lora.max_lora_rank != AUTOMATIC:
        return lora
    return replace(lora, max_lora_rank=automatic_rank(roots))


def is_pattern(name: str) -> bool:
    """Return whether a name is a pattern of names: `acme-*`."""
    return _PATTERN.search(name) is not None


def matching(names: Sequence[str], found: Sequence[Available]) -> dict[str, str]:
    """Return the path of each adapter that is named or that a pattern matches; a name's is empty.

    Raises `CommandError` for a pattern that no adapter matches.
    """
    chosen: dict[str, str] = {}
    for name in names:
        if not is_pattern(name):
            chosen[name] = ""
            continue
        matches = {one.name: one.path for one in found if fnmatchcase(one.name, name)}
        if not matches:
            raise CommandError(
                ExitCode.NOT_FOUND,
                f"no adapter below the server's roots matches {name!r}",
                "`loradock adapters --available` lists them",
            )
        chosen |= matches
    return chosen
