"""Figures of an adapter's way into a slot: `serve.activation` and `serve.cold_load`.

The files are in the page cache, so no disk is measured. Times are wall times, because
copies run on a thread of their own. The yardsticks move the same bytes with nothing else to do, and
all works of a figure are timed alternately.
"""

import tempfile
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Final, NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks.adapters import write_adapter
from benchmarks.figures import Figure
from benchmarks.rounds import Rounds, interleave
from loradock.engine.adapters import LoadedAdapter, read_adapter
from loradock.engine.adapters.reader import KnownFiles
from loradock.engine.adapters.target import AdapterTarget
from loradock.engine.config import LoRAConfig
from loradock.engine.layout import ModuleShape
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import Blob, stage

RANKS: Final = {"84": 16, "640": 122}
"""Ranks of a bfloat16 adapter of an 8-billion-parameter Llama, by its size in MB."""

SECONDS: Final = 12.0
ACTIVATION_MAX: Final = 1.3
COLD_LOAD_MAX: Final = 2.5


def activation() -> Iterator[Figure]:
    """From staged to a complete slot, against one copy of the same bytes, for two sizes."""
    for size, rank in RANKS.items():
        with tempfile.TemporaryDirectory(prefix="ld-") as name:
            place = _Place.of(Path(name), rank)
            blob = place.stage(place.read())
            arena, target = place.arena(blob), torch.empty_like(blob.data)
            rounds = _timed(
                {"ours": partial(_activate, arena, blob), "copy": partial(target.copy_, blob.data)}
            )
            arena.close()
        yield _figure(f"serve.activation_{size}mb", rounds, "one copy", "copy", ACTIVATION_MAX)


def cold_load() -> Iterator[Figure]:
    """From the files to a complete slot, as the first request of an adapter causes it.

    That includes the check that precedes a first load, which takes what the check has read.
    `serve.reload` is without it, as for an adapter that was evicted, and reads the files again.
    """
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        place = _Place.of(Path(name), RANKS["84"])
        weights = place.root / "adapter" / "adapter_model.safetensors"
        blob = place.stage(place.read())
        arena, target = place.arena(blob), torch.empty_like(blob.data)

        def load(known: KnownFiles) -> None:
            _activate(arena, place.stage(place.read(known)))

        def first_load() -> None:
            load(KnownFiles())

        known = KnownFiles()
        place.read(known)

        def bare() -> None:
            offset = 0
            # A file that is only mapped was not read.
            read = {key: tensor.clone() for key, tensor in load_file(weights).items()}
            for tensor in read.values():
                target[offset : offset + tensor.numel()].view(tensor.shape).copy_(tensor)
                offset += tensor.numel()

        rounds = _timed({"first": first_load, "again": partial(load, known), "bare": bare})
        arena.close()
    text = "reading and copying"
    yield _figure("serve.cold_load", rounds, text, "bare", COLD_LOAD_MAX, "first")
    yield _figure("serve.reload", rounds, text, "bare", COLD_LOAD_MAX, "again")


class _Place(NamedTuple):
    """An adapter's directory below `root`, and the modules of the model that it is for."""

    root: Path
    modules: dict[str, ModuleShape]
    lora_config: LoRAConfig

    @classmethod
    def of(cls, root: Path, rank: int) -> "_Place":
        rank_max = min(allowed for allowed in (16, 128) if allowed >= rank)
        config = LoRAConfig(max_lora_rank=rank_max, lora_dtype="bfloat16")
        return cls(root, write_adapter(root / "adapter", rank), config)

    def read(self, known: KnownFiles | None = None) -> LoadedAdapter:
        target = AdapterTarget(self.modules, self.lora_config)
        return read_adapter("adapter", [self.root], target, known_files=known)

    def stage(self, loaded: LoadedAdapter) -> Blob:
        shapes = tuple(self.modules.values())
        return stage(loaded.model, shapes, torch.bfloat16)

    def arena(self, blob: Blob) -> Arena:
        shapes = tuple(self.modules.values())
        return Arena(1, shapes, blob.size_bytes, torch.bfloat16, "cpu")


def _activate(arena: Arena, blob: Blob) -> None:
    """Write the slot, wait until the copy is complete, and clear the slot for the next round."""
    generation = arena.generations[0] + 1
    arena.begin_write(0, generation, blob)
    arena.finish_write(0)
    arena.reset(0, generation)


def _timed(works: Mapping[str, Callable[[], object]]) -> Rounds:
    return interleave(works, SECONDS)


def _figure(
    name: str, rounds: Rounds, yardstick: str, other: str, ratio_max: float, own: str = "ours"
) -> Figure:
    ratio = rounds.wall_ratio(own, other)
    return Figure(
        name,
        ratio,
        "x",
        f"{yardstick}: {rounds.microseconds(other) / 1e3:.1f} ms of process time",
        ratio,
        f"ratio <= {ratio_max:g}",
        ratio <= ratio_max,
    )
