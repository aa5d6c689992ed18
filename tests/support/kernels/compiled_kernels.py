"""Ahead-of-time compilation of the Triton kernels, with the resources of the result.

Every launch of the checked-in configurations is a job for Triton's compiler; no device is needed. A
job's constants must be those of the kernel's launcher, else it fails.
"""

import re
import subprocess
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from loradock.engine.kernels.gpu.attention import (
    DECODE,
    MERGED_HEADS,
    PREFILL,
    SHARED_ROWS,
    AttentionConfig,
    attend_kernel,
    attention_constants,
    merge_kernel,
    write_kernel,
)
from loradock.engine.kernels.gpu.embedding import lookup_kernel
from loradock.engine.kernels.gpu.experts import (
    experts_expand_kernel,
    experts_shrink_kernel,
    experts_sum_kernel,
)
from loradock.engine.kernels.gpu.fused import (
    add_norm_kernel,
    gate_kernel,
    rms_norm_kernel,
    rotate_kernel,
)
from loradock.engine.kernels.gpu.linear import fused_kernel
from loradock.engine.kernels.gpu.shrink_expand import (
    expand_kernel,
    shrink_kernel,
    sum_splits_kernel,
)
from loradock.engine.kernels.gpu.tile_configs import (
    LOOKUP,
    ExpandConfig,
    ExpertsConfig,
    configs_for,
)

CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

SHARED_BYTES_MAX = {80: 163 << 10, 90: 227 << 10, 100: 227 << 10}
"""The shared memory that is available to one block, by architecture."""

SHARED_BYTES = {80: 164 << 10, 90: 228 << 10, 100: 228 << 10}
"""The shared memory of a multiprocessor; each block takes 1 KiB more than it asks for."""

REGISTERS = 65536
WARPS_MAX, BLOCKS_MAX = 64, 32
"""The registers, warps and blocks of a multiprocessor, on each of these architectures."""

ITEM_BYTES = {"bf16": 2, "fp16": 2, "fp32": 4}
SLICES = 3

TABLES = {
    "offsets": "*i64",
    "ranks": "*i32",
    "slice_table": "*i64",
    "tiles": "*i64",
    "rows": "*i64",
}
PAIRS = {"tile_starts": "*i64", "keys": "*i64", "pairs": "*i64"}
NOT_ALIGNED = {
    *("directory_stride", "experts", "pair_count", "heads", "table_stride"),
    *("row_count", "part_rows", "part_count", "window", "chunk"),
    *("tokens", "query_heads", "key_heads"),
}
"""Arguments without a promised alignment; others are multiples of 16 in every model."""


class Job(NamedTuple):
    """One kernel with one set of constants; `pointers` are the types of its other arguments."""

    kernel: Any
    pointers: dict[str, str]
    constants: dict[str, float]
    warps: int
    stages: int

    @property
    def name(self) -> str:
        return f"{self.kernel.__name__} {tuple(self.constants.values())}"


class Compiled(NamedTuple):
    """The result of a job: its resources, and the number of occurrences of each instruction."""

    registers: int
    spilled_bytes: int
    shared_bytes: int
    instructions: dict[str, int]

    def resident_warps(self, warps: int, architecture: int) -> int:
        """Return the warps that run at once on a multiprocessor, for blocks of `warps`."""
        # A warp's registers are allocated in units of 256.
        registers = -(-self.registers * 32 // 256) * 256
        blocks = min(
            REGISTERS // (registers * warps),
            SHARED_BYTES[architecture] // (self.shared_bytes + 1024),
            WARPS_MAX // warps,
            BLOCKS_MAX,
        )
        return blocks * warps

    def count(self, pattern: str) -> int:
        return sum(n for name, n in self.instructions.items() if re.fullmatch(pattern, name))


def jobs(architecture: int, dtype: str) -> list[Job]:
    """Return every distinct launch of an architecture, for activations and weights of one dtype."""
    found = {(job.name, *job.pointers.values()): job for job in _jobs(architecture, dtype)}
    return list(found.values())


def _jobs(architecture: int, dtype: str) -> Iterator[Job]:
    unit, halved = 128 // ITEM_BYTES[dtype], ITEM_BYTES[dtype] // 2
    own, floats = f"*{dtype}", "*fp32"
    weights = {**TABLES, "data": own}
    configs = configs_for(divmod(architecture, 10))
    for shrink, expand, fused in configs.linear.values():
        blocks = {"BLOCK_M": shrink.block_m, "BLOCK_R": shrink.block_r}
        split = {"UNIT": unit, "SPLITS": shrink.splits}
        yield Job(
            shrink_kernel,
            {**weights, "y": floats, "x": own},
            {**split, **blocks, "BLOCK_K": shrink.block_k // halved},
            *(shrink.warps, shrink.stages),
        )
        yield Job(
            sum_splits_kernel,
            {**TABLES, "y": floats, "parts": floats},
            {**split, **blocks},
            *(shrink.warps, 3),
        )
        yield from _expand_jobs(shrink.splits, expand, dtype)
        if fused is not None:
            yield Job(
                fused_kernel,
                {**weights, "y": own, "x": own},
                {
                    "UNIT": unit,
                    "SLICES": SLICES,
                    "OUT_UNIT": 16,
                    "BLOCK_M": fused.block_m,
                    "BLOCK_N": fused.block_n,
                    "BLOCK_R": fused.block_r,
                    "BLOCK_K": fused.block_k // halved,
                },
                *(fused.warps, fused.stages),
            )
    yield Job(
        lookup_kernel,
        {**weights, "y": floats, "token_ids": "*i64", "scale": "fp32"},
        {"UNIT": unit, "BLOCK_M": LOOKUP.block_m, "BLOCK_R": LOOKUP.block_r},
        *(LOOKUP.warps, 3),
    )
    for config in configs.experts.values():
        yield from _experts_jobs(config, dtype)
    yield from _attention_jobs(dtype)
    # A layer of 4096 with 32 heads of 128.
    yield Job(
        rms_norm_kernel,
        {"y": own, "x": own, "weight": own, "eps": "fp32"},
        {"OFFSET": 0.0, "BLOCK": 4096},
        *(8, 3),
    )
    yield Job(
        add_norm_kernel,
        {**dict.fromkeys(("total", "y", "x", "added", "weight"), own), "eps": "fp32"},
        {"OFFSET": 0.0, "BLOCK": 4096},
        *(8, 3),
    )
    yield Job(
        gate_kernel,
        dict.fromkeys(("y", "gates", "ups"), own),
        {"KIND": "silu", "BLOCK": 2048},
        *(4, 3),
    )
    yield Job(
        rotate_kernel,
        dict.fromkeys(("query_out", "key_out", "query", "keys", "cos", "sin"), own),
        {"HALF": 64, "BLOCK_H": 32, "BLOCK": 64},
        *(4, 3),
    )


def _expand_jobs(splits: int, config: ExpandConfig, dtype: str) -> Iterator[Job]:
    """Yield the expand after a shrink with splits, after one without, and into a separate delta."""
    own = f"*{dtype}"
    for parts, out in ((splits, own), (1, own), (1, "*fp32")):
        yield Job(
            expand_kernel,
            {**TABLES, "data": own, "y": out, "x": "*fp32"},
            {
                "UNIT": 128 // ITEM_BYTES[dtype],
                "SPLITS": parts,
                "SLICES": SLICES,
                "OUT_UNIT": 16,
                "BLOCK_M": config.block_m,
                "BLOCK_N": config.block_n,
                "BLOCK_R": config.block_r,
            },
            *(config.warps, config.stages),
        )


def _experts_jobs(config: ExpertsConfig, dtype: str) -> Iterator[Job]:
    own, shrink, expand = f"*{dtype}", config.shrink, config.expand
    split = {"UNIT": 128 // ITEM_BYTES[dtype], "SPLITS": shrink.splits}
    blocks = {"BLOCK_M": shrink.block_m, "BLOCK_R": shrink.block_r}
    tables = {**TABLES, **PAIRS, "data": own, "parts": "*fp32"}
    yield Job(
        experts_shrink_kernel,
        {**tables, "x": own},
        {**split, **blocks, "BLOCK_K": shrink.block_k // (ITEM_BYTES[dtype] // 2)},
        *(shrink.warps, shrink.stages),
    )
    yield Job(experts_sum_kernel, {**tables, "y": "*fp32"}, {**split, **blocks}, *(shrink.warps, 3))
    for splits in (shrink.splits, 1):
        yield Job(
            experts_expand_kernel,
            {**tables, "y": own},
            {
                **split,
                "SPLITS": splits,
                "COLUMN_STEP": 1,
                "OUT_UNIT": 16,
                "BLOCK_M": expand.block_m,
                "BLOCK_N": expand.block_n,
                "BLOCK_R": expand.block_r,
            },
            *(expand.warps, expand.stages),
        )


def _attention_jobs(dtype: str) -> Iterator[Job]:
    """Yield a decode step with all options in parts, a prefill, a merge and a write; width 128."""
    yield _attention_job(dtype, DECODE, has_options=True)
    if dtype != "fp32":
        yield _attention_job(dtype, PREFILL, has_options=False)
    own = f"*{dtype}"
    yield Job(
        merge_kernel,
        {"y": own, "parts": "*fp32", "sums": "*fp32", "sinks": own, "shared": "*i64"},
        {
            "V_WIDTH": 128,
            "HAS_SINKS": True,
            "SHARED_ROWS": SHARED_ROWS,
            "BLOCK_H": MERGED_HEADS,
            "BLOCK_V": 128,
        },
        *(1, 3),
    )
    yield Job(
        write_kernel,
        {**dict.fromkeys(("keys", "values", "new_keys", "new_values"), own), "places": "*i64"},
        {"WIDTH": 128, "V_WIDTH": 128, "BLOCK_H": 8, "BLOCK": 128},
        *(2, 3),
    )


def _attention_job(dtype: str, config: AttentionConfig, has_options: bool) -> Job:
    own = f"*{dtype}"
    tables = {**dict.fromkeys(("begins", "firsts", "rows", "shared"), "*i64"), "table": "*i32"}
    constants = attention_constants(config, 4, 128, 128, ITEM_BYTES[dtype])
    warps, stages = constants.pop("num_warps"), constants.pop("num_stages")
    return Job(
        attend_kernel,
        {
            **tables,
            **dict.fromkeys(("q", "k", "v", "sinks"), own),
            "y": "*fp32" if has_options else own,
            "sums": "*fp32",
            "scale": "fp32",
            "softcap": "fp32",
        },
        {
            **constants,
            "BLOCK_TOKENS": 16,
            "PART_TOKENS": 0,
            "HAS_CAP": has_options,
            "HAS_SINKS": has_options,
            "IS_WHOLE": not has_options,
            "SHARED_ROWS": SHARED_ROWS if has_options else 0,
            "IS_DECODE": has_options,
        },
        *(warps, stages),
    )


def build(job: Job, architecture: int, folder: Path) -> Compiled:
    """Compile a job, and read resources and instructions from its machine code."""
    signature, hints = {}, {}
    for index, name in enumerate(job.kernel.arg_names):
        signature[name] = "constexpr" if name in job.constants else job.pointers.get(name, "i32")
        if signature[name][0] in "*i" and name not in NOT_ALIGNED:
            hints[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(job.kernel, signature, job.constants, hints)
    options = {"num_warps": job.warps, "num_stages": job.stages}
    made = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=options)
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(made.asm["cubin"])
    use = _cuobjdump(cubin, "--dump-resource-usage").rpartition("Function")[2]
    registers, stack, local = (
        int(re.search(rf"{name}:(\d+)", use)[1]) for name in ("REG", "STACK", "LOCAL")
    )
    names = re.findall(
        r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z]\S*)", _cuobjdump(cubin, "-sass"), re.M
    )
    counts = {name: names.count(name) for name in set(names)}
    return Compiled(registers, stack + local, made.metadata.shared, counts)


def _cuobjdump(cubin: Path, option: str) -> str:
    command = [str(_tool()), option, str(cubin)]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout


@cache
def _tool() -> Path:
    if not CUOBJDUMP.exists():
        raise FileNotFoundError(f"{CUOBJDUMP} is missing; it is part of Triton's NVIDIA backend")
    return CUOBJDUMP
