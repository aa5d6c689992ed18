"""Tile sizes of every launch, by the shape of a batch: one table per GPU architecture.

`python -m benchmarks.tune_kernels` measures on a device and rewrites the tables; nothing is tuned
while serving. A regime is chosen by a batch's bounds alone, which a captured graph shares with
every batch that it is replayed for.

The regimes:
  few        so few rows that launches dominate: one fused launch
  decode     adapters with few rows each: memory-bound on the weights
  many       the same with enough adapters to fill the device
  prefill    long groups: tensor cores pay, A and B are read once for 64 rows
  alone      one adapter has all rows, and there are many
  invariant  the same for all batches, so that a row's sums always have the same order
"""

from typing import Final, NamedTuple

from loradock.engine.kernels.operands import TILE_ROWS, GroupBounds

SHORT, LONG = TILE_ROWS


class ShrinkConfig(NamedTuple):
    """Tiles of `block_m` rows by `block_r` rows of A; the input is divided into `splits` parts.

    `block_k`, here and below, counts inputs of two bytes; for float32 half of it is used.
    """

    block_m: int
    block_r: int
    block_k: int
    splits: int
    warps: int
    stages: int


class ExpandConfig(NamedTuple):
    """Tiles of `block_m` rows by `block_n` outputs, `block_r` ranks at a time."""

    block_m: int
    block_n: int
    block_r: int
    warps: int
    stages: int


class FusedConfig(NamedTuple):
    """Both products in one program per block of `block_n` outputs."""

    block_m: int
    block_n: int
    block_r: int
    block_k: int
    warps: int
    stages: int


class LookupConfig(NamedTuple):
    """Rows of an embedding's A, copied `block_r` ranks at a time."""

    block_m: int
    block_r: int
    warps: int


class LinearConfig(NamedTuple):
    """A regime's launches; without `fused` a linear layer's delta takes two."""

    shrink: ShrinkConfig
    expand: ExpandConfig
    fused: FusedConfig | None = None


class ExpertsConfig(NamedTuple):
    """A regime's launches over pairs of tokens and experts."""

    shrink: ShrinkConfig
    expand: ExpandConfig


class TileConfigs(NamedTuple):
    """One architecture's tables, by regime: for operations on rows, and on experts."""

    linear: dict[str, LinearConfig]
    experts: dict[str, ExpertsConfig]


REGIMES: Final = ("few", "decode", "many", "prefill", "alone", "invariant")
EXPERTS_REGIMES: Final = ("decode", "prefill", "invariant")

LOOKUP: Final = LookupConfig(SHORT, 32, 2)
"""The lookup of an embedding, whose cost is too small for a choice."""

FEW_TOKENS_MAX: Final = 4
MANY_GROUPS_MIN: Final = 48
LONG_GROUP_ROWS: Final = 32
"""The least rows per group, on average over the bounds, for which tiles of 64 rows pay."""

SOURCE: Final[dict[int, str]] = {
    80: "reasoned, not measured",
    90: "reasoned, not measured",
}
"""The source of each architecture's tables, which newer ones without their own use too."""

# The reasoning, until a device is measured. Memory-bound configurations keep about 32 KiB of loads
# in flight per multiprocessor and split the input until about 500 programs run; where adapters
# alone make that many programs, fewer splits save reads of the second launch. Long groups use
# blocks of A as high as the usual ranks, and three stages, which also fit float32 on the smallest
# of these chips. Their expand has 64 outputs and 4 warps: blocks of 128 outputs and 8 warps need so
# many registers that one block fills a multiprocessor, and of these four to six run on one.
LINEAR_CONFIGS: Final[dict[int, dict[str, LinearConfig]]] = {
    80: {
        "few": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
            FusedConfig(SHORT, 64, 16, 128, 4, 3),
        ),
        "decode": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
        "many": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 4, 4, 4),
            ExpandConfig(SHORT, 256, 16, 4, 2),
        ),
        "prefill": LinearConfig(
            ShrinkConfig(LONG, 32, 64, 4, 4, 3),
            ExpandConfig(LONG, 64, 16, 4, 2),
        ),
        "alone": LinearConfig(
            ShrinkConfig(LONG, 64, 64, 4, 4, 3),
            ExpandConfig(LONG, 64, 16, 4, 2),
        ),
        "invariant": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
    },
    90: {
        "few": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
            FusedConfig(SHORT, 128, 16, 128, 8, 4),
        ),
        "decode": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
        "many": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 256, 16, 4, 2),
        ),
        "prefill": LinearConfig(
            ShrinkConfig(LONG, 32, 64, 4, 4, 4),
            ExpandConfig(LONG, 64, 16, 4, 2),
        ),
        "alone": LinearConfig(
            ShrinkConfig(LONG, 64, 64, 4, 4, 4),
            ExpandConfig(LONG, 64, 16, 4, 2),
        ),
        "invariant": LinearConfig(
            ShrinkConfig(SHORT, 16, 128, 8, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
    },
}


# A slot and an expert rarely share many pairs, so tiles are short, and the input is split in four
# because expert matrices are narrow. Long groups fill the device by themselves, and their scratch
# memory is the largest, so their input is not split.
EXPERTS_CONFIGS: Final[dict[int, dict[str, ExpertsConfig]]] = {
    80: {
        "decode": ExpertsConfig(
            ShrinkConfig(SHORT, 16, 128, 4, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
        "prefill": ExpertsConfig(
            ShrinkConfig(LONG, 16, 64, 1, 4, 3),
            ExpandConfig(LONG, 64, 16, 4, 2),
        ),
        "invariant": ExpertsConfig(
            ShrinkConfig(SHORT, 16, 128, 4, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
    },
    90: {
        "decode": ExpertsConfig(
            ShrinkConfig(SHORT, 16, 128, 4, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
        "prefill": ExpertsConfig(
            ShrinkConfig(LONG, 16, 64, 1, 4, 3),
            ExpandConfig(LONG, 64, 16, 4, 2),
        ),
        "invariant": ExpertsConfig(
            ShrinkConfig(SHORT, 16, 128, 4, 4, 4),
            ExpandConfig(SHORT, 128, 16, 4, 2),
        ),
    },
}


def regime_of(bounds: GroupBounds, batch_invariant: bool = False) -> str:
    """Return the regime of a batch with these bounds."""
    if batch_invariant:
        return "invariant"
    if bounds.tokens <= FEW_TOKENS_MAX:
        return "few"
    if bounds.groups == 1 and bounds.tokens >= LONG:
        return "alone"
    if bounds.tokens >= LONG_GROUP_ROWS * bounds.groups:
        return "prefill"
    return "many" if bounds.groups >= MANY_GROUPS_MIN else "decode"


def experts_regime_of(bounds: GroupBounds, batch_invariant: bool = False) -> str:
    """Return the regime of a batch of pairs; bounds: of its groups by slot and expert."""
    if batch_invariant:
        return "invariant"
    return "prefill" if bounds.tokens >= LONG_GROUP_ROWS * bounds.groups else "decode"


def configs_for(capability: tuple[int, int]) -> TileConfigs:
    """Return the tables of the newest architecture that is not above a device's `capability`.

    Raises ValueError for a device that is older than all of them.
    """
    device = 10 * capability[0] + capability[1]
    supported = [architecture for architecture in LINEAR_CONFIGS if architecture <= device]
    if not supported:
        raise ValueError(
            f"compute capability {capability[0]}.{capability[1]} is not supported; "
            f"the Triton kernels need at least {min(LINEAR_CONFIGS) / 10:.1f}"
        )
    return TileConfigs(LINEAR_CONFIGS[max(supported)], EXPERTS_CONFIGS[max(supported)])
