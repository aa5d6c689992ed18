"""The figures `peers.*`: LoRADock and vLLM as servers, side by side on one model.

Both servers run during a measurement, and each cell is measured with them in turn, so that the
machine's drift cancels. A server's time is the processor time of all of its processes, HTTP
included. Tokens are counted by the servers' own usage, and no prompt is sent twice, so that no
cache of prefixes has an effect.
"""

import asyncio
import json
import random
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Final, NamedTuple

import msgspec
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.figures import Figure
from benchmarks.http_load import post
from benchmarks.peer_servers import SLOTS, Server, both, install
from benchmarks.serve_load import SHAPE, adapter_name, write_adapter
from benchmarks.tables import rounded

ROWS: Final = (1, 8, 32)
PROMPT_TOKENS: Final = 32
OUTPUT_TOKENS: Final = 48
PREFILL_TOKENS: Final = 256
ROUNDS: Final = 3
RANK: Final = 16
MIXED: Final = (8, 64)
STREAMS: Final = 4
"""The streams that run while an adapter is loaded."""
TURNS: Final = 3
"""The requests that each client sends one after another in a rotation."""
IDLE_S: Final = 5.0
DTYPES: Final = ("float32", "bfloat16")
SERVED: Final = "bfloat16"
"""The data type in which more than rates is measured."""
_COLD: Final = "cold"
_MIXED_NAMES: Final = tuple(f"mixed-{number}" for number in range(SLOTS))
_SHORT: Final = {"float32": "f32", "bfloat16": "bf16"}


class Used(NamedTuple):
    """The processor seconds, wall seconds, tokens and first tokens (s) of a load."""

    cpu_s: float
    wall_s: float
    tokens: int
    first_s: tuple[float, ...] = ()

    @property
    def rate(self) -> float:
        """Tokens per second of processor time."""
        return self.tokens / self.cpu_s


class Pair(NamedTuple):
    """Values of a cell, ours and vLLM's, with the median of the rounds' ratios (ours / vLLM's)."""

    ours: float
    theirs: float
    ratio: float

    @classmethod
    def of(cls, rounds: Sequence[tuple[float, float]]) -> "Pair":
        """Return the medians of the rounds."""
        ours, theirs = zip(*rounds, strict=True)
        return cls(median(ours), median(theirs), median(a / b for a, b in rounds))


Work = Callable[[Server], Coroutine[None, None, Used]]


def run() -> Iterator[Figure]:
    """Measure every figure of the group; vLLM is installed first, if it is not yet."""
    install()
    with _files() as root:
        tables = {dtype: _Rates(root, dtype) for dtype in DTYPES if dtype != SERVED}
        bf16 = tables[SERVED] = _Measured(root, SERVED)
    for dtype, measured in tables.items():
        yield _least(f"peers.base_{_SHORT[dtype]}", measured.base, 1.0)
    rows = {f"{_SHORT[d]} {k}": v for d, one in tables.items() for k, v in one.adapters.items()}
    yield _least("peers.adapters", rows, 1.3)
    mixed = {f"{_SHORT[d]} {k}": v for d, one in tables.items() for k, v in one.mixed.items()}
    yield _least("peers.mixed_ranks", mixed, 1.6)
    yield _most("peers.load", bf16.load, "ms until a load is answered, 4 streams running", 1.5)
    text = "ms to a cold adapter's first token after its load"
    yield _most("peers.cold_first_token", bf16.first, text, 0.7)
    yield _most("peers.rotation", bf16.rotation, f"ms to the first token (p50), {_TURN}", 0.5)
    kept = bf16.kept
    yield Figure(
        "peers.rotation_kept", kept.ours, "of the rate of 8 adapters on 8 slots",
        f"vLLM: {kept.theirs:.2f}; 8 clients without turns: ours {bf16.halved.ours:.2f}, "
        f"vLLM {bf16.halved.theirs:.2f}", kept.ratio, "value >= 0.8", kept.ours >= 0.8,
    )  # fmt: skip
    yield _most("peers.prefill", bf16.prefill, "ms of processor time for a prompt token", 1.1)
    yield _reported("peers.start", bf16.start, "s of processor time until the first answer")
    yield _reported("peers.memory", bf16.memory, "MB of all processes")
    yield _reported("peers.idle", bf16.idle, "% of a processor without requests")


_TURN: Final = "16 adapters on 8 slots"


class _Rates:
    """The rates of one data type; both servers are started for each bound of the ranks."""

    def __init__(self, root: Path, dtype: str) -> None:
        adapters = [adapter_name(number) for number in range(2 * SLOTS)]
        with both(root, dtype, max(MIXED)) as self._servers:
            self._load(root, _MIXED_NAMES)
            self.mixed = self._rates(_MIXED_NAMES, (SLOTS,))
        with both(root, dtype, RANK) as self._servers:
            self.start = self._pair(lambda server: server.start_cpu_s)
            self.base = self._rates(["base"])
            self._load(root, adapters[:SLOTS])
            self.adapters = self._rates(adapters[:SLOTS])
            self._measure_others(root, adapters)
            self.memory = self._pair(Server.memory_mb)
            self.idle = self._pair(_idle_percent)

    def _measure_others(self, root: Path, adapters: Sequence[str]) -> None:
        """Measure what a subclass adds; `SLOTS` of the adapters are loaded."""

    def _pair(self, value: Callable[[Server], float]) -> Pair:
        ours, theirs = map(value, self._servers)
        return Pair(ours, theirs, ours / theirs)

    def _load(self, root: Path, names: Sequence[str]) -> None:
        """Load adapters on both servers."""
        for server in self._servers:
            for name in names:
                asyncio.run(server.load(name, root / name))

    def _rates(self, models: Sequence[str], counts: Sequence[int] = ROWS) -> dict[str, Pair]:
        """Return tokens per processor second at each number of rows over these models."""
        found = {}
        for rows in counts:
            names = [models[row % len(models)] for row in range(rows)]
            rounds = self._rounds(partial(_together, names=names))
            found[f"{rows} rows"] = Pair.of([(a.rate, b.rate) for a, b in rounds])
        return found

    def _rounds(self, work: Work, rounds: int = ROUNDS) -> list[tuple[Used, Used]]:
        """Run a work on both servers in turn; the first round is not counted."""
        found = []
        for number in range(rounds + 1):
            order = self._servers if number % 2 else self._servers[::-1]
            used = {server.name: asyncio.run(work(server)) for server in order}
            found.append((used[self._servers[0].name], used[self._servers[1].name]))
        return found[1:]


class _Measured(_Rates):
    """The rates, and all that is measured in one data type alone."""

    def _measure_others(self, root: Path, adapters: Sequence[str]) -> None:
        self.prefill = self._prefill()
        self.load, self.first = self._cold(root)
        self.rotation, self.kept, self.halved = self._rotation(root, adapters)

    def _prefill(self) -> Pair:
        async def work(server: Server) -> Used:
            return await _together(server, ["base"] * 4, PREFILL_TOKENS, output=1)

        rounds = self._rounds(work)
        tokens = 4 * PREFILL_TOKENS
        return Pair.of([(1e3 * a.cpu_s / tokens, 1e3 * b.cpu_s / tokens) for a, b in rounds])

    def _cold(self, root: Path) -> tuple[Pair, Pair]:
        """Return ms until a load is answered, and to the first token after it."""
        rounds = self._rounds(lambda server: _cold_load(server, root))
        loads = [(1e3 * a.wall_s, 1e3 * b.wall_s) for a, b in rounds]
        firsts = [(1e3 * a.first_s[0], 1e3 * b.first_s[0]) for a, b in rounds]
        return Pair.of(loads), Pair.of(firsts)

    def _rotation(self, root: Path, adapters: Sequence[str]) -> tuple[Pair, Pair, Pair]:
        """Return ms to the first token, the share of the rate that is kept, and its bound.

        The bound is the share that `SLOTS` clients have who need no turns: as many rows run at
        once as adapters are in slots.
        """
        halves = self._rounds(lambda server: _turns(server, adapters[:SLOTS]), 2)
        rounds_8 = self._rounds(lambda server: _turns(server, [*adapters[:SLOTS]] * 2), 2)
        self._load(root, adapters[SLOTS:])
        rounds_16 = self._rounds(lambda server: _turns(server, adapters), 2)
        firsts = [(1e3 * median(a.first_s), 1e3 * median(b.first_s)) for a, b in rounds_16]
        half, few, many = (
            Pair.of([(a.rate, b.rate) for a, b in rounds])
            for rounds in (halves, rounds_8, rounds_16)
        )
        return Pair.of(firsts), _share(many, few), _share(half, few)


def _share(rate: Pair, whole: Pair) -> Pair:
    ours, theirs = rate.ours / whole.ours, rate.theirs / whole.theirs
    return Pair(ours, theirs, ours / theirs)


async def _together(
    server: Server, names: Sequence[str], prompt: int = PROMPT_TOKENS, output: int = OUTPUT_TOKENS
) -> Used:
    """Run one stream for each name, all at once."""
    connections = [await server.connect() for _ in names]
    cpu, wall = server.cpu_s(), time.perf_counter()
    found = await asyncio.gather(
        *(
            connection.stream(_request(name, prompt, output))
            for connection, name in zip(connections, names, strict=True)
        )
    )
    used = Used(
        server.cpu_s() - cpu,
        time.perf_counter() - wall,
        sum(tokens for _, tokens in found),
        tuple(first for first, _ in found),
    )
    for connection in connections:
        connection.close()
    return used


async def _turns(server: Server, names: Sequence[str]) -> Used:
    """Run one client for each name, with `TURNS` requests one after another."""

    async def client(name: str) -> list[Used]:
        return [await _together(server, [name], output=OUTPUT_TOKENS // 2) for _ in range(TURNS)]

    cpu, wall = server.cpu_s(), time.perf_counter()
    found = [used for one in await asyncio.gather(*map(client, names)) for used in one]
    return Used(
        server.cpu_s() - cpu,
        time.perf_counter() - wall,
        sum(used.tokens for used in found),
        tuple(used.first_s[0] for used in found),
    )


async def _cold_load(server: Server, root: Path) -> Used:
    """Load an adapter next to `STREAMS` streams, and time the load and the first token after it."""
    running = asyncio.create_task(_together(server, ["base"] * STREAMS, output=6 * OUTPUT_TOKENS))
    await asyncio.sleep(0.5)
    began = time.perf_counter()
    await server.load(_COLD, root / _COLD)
    wall_s = time.perf_counter() - began
    used = await _together(server, [_COLD], output=1)
    await running
    await server.unload(_COLD)
    return Used(used.cpu_s, wall_s, used.tokens, used.first_s)


def _idle_percent(server: Server) -> float:
    """Return the share of a processor that a server without requests uses."""
    before = server.cpu_s()
    time.sleep(IDLE_S)
    return 100 * (server.cpu_s() - before) / IDLE_S


_TOKENS: Final = random.Random(3)  # noqa: S311


def _request(model: str, prompt: int, output: int) -> bytes:
    body = {
        "model": model,
        "prompt": [_TOKENS.randrange(3, SHAPE.vocabulary) for _ in range(prompt)],
        "max_tokens": output,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return post("/v1/completions", msgspec.json.encode(body))


@contextmanager
def _files() -> Iterator[Path]:
    """Write the model with a tokenizer, and the adapters next to it."""
    with tempfile.TemporaryDirectory(prefix="loradock-peers-") as directory:
        root = Path(directory)
        torch.manual_seed(0)
        LlamaForCausalLM(SHAPE.config()).save_pretrained(root / "model")
        _write_tokenizer(root / "model")
        for name in (*map(adapter_name, range(2 * SLOTS)), _COLD):
            write_adapter(root / name, SHAPE, RANK)
        for number, name in enumerate(_MIXED_NAMES):
            write_adapter(root / name, SHAPE, MIXED[number % len(MIXED)])
        yield root


def _write_tokenizer(model: Path) -> None:
    """Write a tokenizer with one word for each token of the vocabulary."""
    words = {f"w{number}": number for number in range(SHAPE.vocabulary)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(model)
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"eos_token_id": None}))


def _least(name: str, cells: dict[str, Pair], target: float) -> Figure:
    """Return the figure of rates, whose worst cell counts."""
    worst = min(cells.values(), key=lambda pair: pair.ratio)
    text = "; ".join(f"{cell} {p.ours:.0f} : {p.theirs:.0f}" for cell, p in cells.items())
    return Figure(
        name, worst.ratio, "of vLLM's tokens per processor second, worst cell",
        f"ours : vLLM {text}", worst.ratio, f"ratio >= {target:g}", worst.ratio >= target,
    )  # fmt: skip


def _most(name: str, pair: Pair, unit: str, target: float) -> Figure:
    return Figure(
        name, pair.ours, unit, f"vLLM: {rounded(pair.theirs)}", pair.ratio, f"ratio <= {target:g}",
        pair.ratio <= target,
    )  # fmt: skip


def _reported(name: str, pair: Pair, unit: str) -> Figure:
    return Figure(
        name,
        pair.ours,
        unit,
        f"vLLM: {rounded(pair.theirs)}",
        pair.ratio,
        "reported, no target",
        True,
    )
