"""The weights of an adapter in several files, as one file.

Each tensor is in one shard. The fingerprint is that of all shards' fingerprints, in the order of
their names.
"""

from collections.abc import Mapping, Sequence
from typing import Final, TypeVar

import xxhash

from loradock.engine.adapters.files.problems import shown
from loradock.engine.adapters.files.weights_file import (
    NO_VISITORS,
    HasShape,
    ReadTensors,
    Visitors,
    Wanted,
    WeightsFile,
)
from loradock.engine.errors import AdapterUnsound

T = TypeVar("T")


class ShardedFile:
    """Weights files whose tensors are read as those of one; `names` are theirs, for error texts.

    Raises `AdapterUnsound` for a tensor that is in two shards.
    """

    def __init__(self, shards: Sequence[WeightsFile], names: Sequence[str]) -> None:
        self._shards: Final = tuple(shards)
        tensors: dict[str, HasShape] = {}
        for shard, name in zip(shards, names, strict=True):
            twice = next((one for one in shard.tensors if one in tensors), None)
            if twice is not None:
                raise AdapterUnsound(f"{shown(twice)} is in {name} and in another shard")
            tensors |= shard.tensors
        self.tensors: Mapping[str, HasShape] = tensors

    def read(
        self, wanted: Wanted, *, is_checked: bool = False, visitors: Visitors = NO_VISITORS
    ) -> ReadTensors:
        """Return the wanted parts; unless the values are checked already, with their ranges."""
        return _merged(
            [
                shard.read(
                    _within(wanted, shard),
                    is_checked=is_checked,
                    visitors=_within(visitors, shard),
                )
                for shard in self._shards
            ]
        )

    def read_all(
        self, wanted: Wanted, config: bytes, visitors: Visitors = NO_VISITORS
    ) -> tuple[ReadTensors, str]:
        """Return the wanted parts with the whole tensors' value ranges, and the fingerprint."""
        found = [
            shard.read_all(_within(wanted, shard), config, _within(visitors, shard))
            for shard in self._shards
        ]
        digest = xxhash.xxh3_128("".join(fingerprint for _, fingerprint in found).encode())
        return _merged([read for read, _ in found]), digest.hexdigest()


def _within(named: Mapping[str, T], shard: WeightsFile) -> dict[str, T]:
    return {name: one for name, one in named.items() if name in shard.tensors}


def _merged(found: Sequence[ReadTensors]) -> ReadTensors:
    merged = ReadTensors({}, {})
    for one in found:
        merged.tensors.update(one.tensors)
        merged.ranges.update(one.ranges)
    return merged
