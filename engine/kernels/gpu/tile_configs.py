"""Which launches and which tile sizes a batch gets, by its shape: one table a GPU architecture.

What it is: literal tables, and the rules that pick a row. What it is not: a search; `python -m
benchmarks.tune_kernels` measures on a device and writes the tables anew. One rule: a row is picked
by a batch's bounds alone, which a captured graph shares with every batch it is replayed for.

The regimes:
  few        so few rows that launches are the cost: one fused launch
  decode     adapters with few rows each: memory-bound on the weights
  many       the same with so many adapters that these alone fill the device
  prefill    long segments: tensor cores pay, A and B are read once for 64 rows
  alone      one adapter has all rows, and there are many
  invariant  one row for all batches, so that a row's sums have the same order in each
"""

from typing import Final, NamedTuple

from engine.kernels.operands import TILE_ROWS, GroupBounds

SHORT, LONG = TILE_ROWS


class ShrinkPlan(NamedTuple):
    """Tiles of `height` rows against blocks of A; the input is cut into `splits` parts.

    `block_k`, here and below, counts inputs of two bytes; of float32 it is half as many.
    """

    height: int
    block_r: int
    block_k: int
    splits: int
    warps: int
    stages: int


class ExpandPlan(NamedTuple):
    """Tiles of `height` rows against blocks of `block_n` outputs and `block_r` ranks."""

    height: int
    block_n: int
    block_r: int
    warps: int
    stages: int


class FusedPlan(NamedTuple):
    """Both products in one program for each block of `block_n` outputs."""

    height: int
    block_n: int
    block_r: int
    block_k: int
    warps: int
    stages: int


class LookupPlan(NamedTuple):
    """Rows of an embedding's A, copied `block_r` ranks at a time."""

    height: int
    block_r: int
    warps: int


class Plan(NamedTuple):
    """A regime's launches; `fused` None makes a linear layer's delta in two."""

    shrink: ShrinkPlan
    expand: ExpandPlan
    fused: FusedPlan | None = None


class ExpertsPlan(NamedTuple):
    """The launches over pairs of tokens and experts."""

    shrink: ShrinkPlan
    expand: ExpandPlan


class Plans(NamedTuple):
    """One architecture's rows, by regime: of all operations, and of those over experts."""

    linear: dict[str, Plan]
    experts: dict[str, ExpertsPlan]


REGIMES: Final = ("few", "decode", "many", "prefill", "alone", "invariant")
EXPERTS_REGIMES: Final = ("decode", "prefill", "invariant")

LOOKUP: Final = LookupPlan(SHORT, 32, 2)
"""An embedding's lookup, which is too small to be worth a choice."""

FEW_TOKENS: Final = 4
MANY_GROUPS: Final = 48
LONG_SEGMENT: Final = 32
"""From how many rows a group, on the average of the bounds, tiles of 64 rows pay."""

SOURCE: Final[dict[int, str]] = {
    80: "reasoned, not measured",
    90: "reasoned, not measured",
    100: "reasoned, not measured",
}
"""Where each architecture's rows come from."""

# The reasons, until a device is measured. Memory-bound rows keep about 32 KiB of loads in flight
# on each multiprocessor and cut the input until some 500 programs are there; where adapters alone
# make so many, fewer parts spare the second launch its reading. Long segments take blocks of A that
# are as high as the usual ranks together, and three stages, which also fit float32 on the smallest
# of these chips.
PLANS: Final[dict[int, dict[str, Plan]]] = {
    80: {
        "few": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
            FusedPlan(SHORT, 64, 16, 128, 4, 3),
        ),
        "decode": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
        "many": Plan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 256, 16, 4, 2),
        ),
        "prefill": Plan(
            ShrinkPlan(LONG, 32, 64, 4, 4, 3),
            ExpandPlan(LONG, 128, 16, 8, 2),
        ),
        "alone": Plan(
            ShrinkPlan(LONG, 64, 64, 4, 4, 3),
            ExpandPlan(LONG, 128, 16, 8, 2),
        ),
        "invariant": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
    },
    90: {
        "few": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
            FusedPlan(SHORT, 128, 16, 128, 8, 4),
        ),
        "decode": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
        "many": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 256, 16, 4, 2),
        ),
        "prefill": Plan(
            ShrinkPlan(LONG, 32, 64, 4, 4, 4),
            ExpandPlan(LONG, 128, 32, 8, 2),
        ),
        "alone": Plan(
            ShrinkPlan(LONG, 64, 64, 4, 4, 4),
            ExpandPlan(LONG, 128, 32, 8, 2),
        ),
        "invariant": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
    },
    100: {
        "few": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
            FusedPlan(SHORT, 128, 16, 128, 8, 4),
        ),
        "decode": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
        "many": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 256, 16, 4, 2),
        ),
        "prefill": Plan(
            ShrinkPlan(LONG, 32, 64, 4, 4, 4),
            ExpandPlan(LONG, 128, 32, 8, 2),
        ),
        "alone": Plan(
            ShrinkPlan(LONG, 64, 64, 4, 4, 4),
            ExpandPlan(LONG, 128, 32, 8, 2),
        ),
        "invariant": Plan(
            ShrinkPlan(SHORT, 16, 128, 8, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
    },
}


# A slot and an expert rarely share many pairs, so these are rows of few: short tiles, and the input
# cut in four because expert matrices are narrow. Long segments alone fill the device, and their
# scratch is the largest, so nothing is cut.
EXPERTS: Final[dict[int, dict[str, ExpertsPlan]]] = {
    80: {
        "decode": ExpertsPlan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
        "prefill": ExpertsPlan(
            ShrinkPlan(LONG, 16, 64, 1, 4, 3),
            ExpandPlan(LONG, 128, 16, 8, 2),
        ),
        "invariant": ExpertsPlan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
    },
    90: {
        "decode": ExpertsPlan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
        "prefill": ExpertsPlan(
            ShrinkPlan(LONG, 16, 64, 1, 4, 3),
            ExpandPlan(LONG, 128, 16, 8, 2),
        ),
        "invariant": ExpertsPlan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
    },
    100: {
        "decode": ExpertsPlan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
        "prefill": ExpertsPlan(
            ShrinkPlan(LONG, 16, 64, 1, 4, 3),
            ExpandPlan(LONG, 128, 16, 8, 2),
        ),
        "invariant": ExpertsPlan(
            ShrinkPlan(SHORT, 16, 128, 4, 4, 4),
            ExpandPlan(SHORT, 128, 16, 4, 2),
        ),
    },
}


def regime_of(bounds: GroupBounds, batch_invariant: bool = False) -> str:
    """The row that a batch of these bounds takes."""
    if batch_invariant:
        return "invariant"
    if bounds.tokens <= FEW_TOKENS:
        return "few"
    if bounds.groups == 1 and bounds.tokens >= LONG:
        return "alone"
    if bounds.tokens >= LONG_SEGMENT * bounds.groups:
        return "prefill"
    return "many" if bounds.groups >= MANY_GROUPS else "decode"


def experts_regime_of(bounds: GroupBounds, batch_invariant: bool = False) -> str:
    """The row that a batch of pairs takes; bounds: those of its groups by slot and expert."""
    if batch_invariant:
        return "invariant"
    return "prefill" if bounds.tokens >= LONG_SEGMENT * bounds.groups else "decode"


def plans_for(capability: tuple[int, int]) -> Plans:
    """The tables of the newest architecture that is not above a device's `capability`.

    Raises ValueError for a device that is older than all of them.
    """
    wanted = 10 * capability[0] + capability[1]
    known = [architecture for architecture in PLANS if architecture <= wanted]
    if not known:
        raise ValueError(
            f"a device of compute capability {capability[0]}.{capability[1]}; "
            f"kernels are planned from {min(PLANS) / 10:.1f} on"
        )
    return Plans(PLANS[max(known)], EXPERTS[max(known)])
