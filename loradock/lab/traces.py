"""Public traces of requests, in the formats in which they are published.

- Azure LLM inference (2023 and later): CSV with `TIMESTAMP,ContextTokens,GeneratedTokens`.
- BurstGPT: CSV with `Timestamp,Model,Request tokens,Response tokens,...`; failed requests, which
  have no response, are left out.
- Mooncake: JSON lines with `timestamp`, `input_length`, `output_length` and `hash_ids`.
- ServeGen: a directory with a `chunk-N-trace.csv` per client, each with the rate and the
  distribution of gaps of every ten minutes; the requests are drawn from them.

Excerpts of two Azure traces are shipped; the others are read from files that a user has.
"""

import csv
import random
from collections.abc import Iterator
from datetime import datetime
from heapq import merge
from itertools import islice, pairwise
from pathlib import Path
from typing import Final

import msgspec
from msgspec import Struct

SHIPPED: Final = ("azure-code", "azure-conversation")
"""The traces of which an excerpt is part of the package; see `traces/README.md`."""

_WINDOW_S: Final = 600
_SERVEGEN_TOKENS: Final = (512, 128)


class TraceError(ValueError):
    """A file that is none of the formats, or contradicts its own."""


class TracedRequest(Struct, frozen=True, gc=False):
    """One request of a trace; `time_s` counts from its first.

    `client` is the name of the client who sent it, `session` that of its conversation; both are ""
    if the trace does not say.
    """

    time_s: float
    prompt_tokens: int
    output_tokens: int
    session: str = ""
    client: str = ""


def shipped_trace(name: str) -> list[TracedRequest]:
    """Return the requests of a shipped excerpt."""
    text = (Path(__file__).with_name("traces") / f"{name}.csv").read_text(encoding="utf-8")
    return list(_azure(csv.DictReader(text.splitlines())))


def read_trace(path: Path, count_max: int, seed: int) -> list[TracedRequest]:
    """Read up to `count_max` requests of a trace; raises `TraceError`.

    `seed` draws the requests of ServeGen's clients.
    """
    try:
        found = list(islice(_requests_of(path, seed), count_max))
    except (KeyError, ValueError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise TraceError(f"{path} is no trace in a known format: {error}") from error
    if not found:
        raise TraceError(f"{path} has no requests")
    if any(later.time_s < earlier.time_s for earlier, later in pairwise(found)):
        raise TraceError(f"{path}: the requests must be in the order of time")
    return found


def _requests_of(path: Path, seed: int) -> Iterator[TracedRequest]:
    if path.is_dir():
        yield from _servegen(path, seed)
        return
    with path.open(encoding="utf-8", newline="") as lines:
        if path.suffix == ".jsonl":
            yield from _mooncake(lines)
            return
        rows = csv.DictReader(lines)
        yield from (_azure if "ContextTokens" in (rows.fieldnames or ()) else _burstgpt)(rows)


def _azure(rows: Iterator[dict[str, str]]) -> Iterator[TracedRequest]:
    first = None
    for row in rows:
        # Seven digits after the point: Python reads six.
        time = datetime.fromisoformat(row["TIMESTAMP"][:26])
        first = first or time
        sizes = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        yield TracedRequest((time - first).total_seconds(), *sizes)


def _burstgpt(rows: Iterator[dict[str, str]]) -> Iterator[TracedRequest]:
    first_s = None
    for row in rows:
        time_s, output_tokens = float(row["Timestamp"]), int(row["Response tokens"])
        first_s = time_s if first_s is None else first_s
        if output_tokens:
            yield TracedRequest(time_s - first_s, int(row["Request tokens"]), output_tokens)


class _MooncakeRow(Struct, frozen=True):
    timestamp: int
    input_length: int
    output_length: int
    hash_ids: list[int]


def _mooncake(lines: Iterator[str]) -> Iterator[TracedRequest]:
    """Read requests; those with the same second block are of a session, as all share the first."""
    first_ms = None
    decoder = msgspec.json.Decoder(_MooncakeRow)
    for line in lines:
        row = decoder.decode(line)
        first_ms = row.timestamp if first_ms is None else first_ms
        session = f"block {row.hash_ids[1]}" if len(row.hash_ids) > 1 else ""
        time_s = (row.timestamp - first_ms) / 1000
        yield TracedRequest(time_s, row.input_length, row.output_length, session)


def _servegen(directory: Path, seed: int) -> Iterator[TracedRequest]:
    """Draw the requests of all clients, in the order of time."""
    clients = sorted(directory.glob("chunk-*-trace.csv"))
    found = merge(*(_servegen_client(path, seed) for path in clients), key=_time_of)
    first_s = None
    for request in found:
        first_s = request.time_s if first_s is None else first_s
        yield msgspec.structs.replace(request, time_s=request.time_s - first_s)


def _time_of(request: TracedRequest) -> float:
    return request.time_s


def _servegen_client(path: Path, seed: int) -> Iterator[TracedRequest]:
    name = path.name.removesuffix("-trace.csv")
    generator = random.Random(f"{seed} {name}")  # noqa: S311 - a simulation

    def gap_s(kind: str, shape: float, scale: float) -> float:
        if kind == "Gamma":
            return generator.gammavariate(shape, scale)
        if kind == "Weibull":
            return generator.weibullvariate(scale, shape)
        raise ValueError(f"there is no distribution {kind!r}")

    for line in path.read_text(encoding="utf-8").splitlines():
        start, rate, _, kind, shape, scale = line.split(",")
        time_s = float(start)
        end_s = time_s + _WINDOW_S
        while float(rate):
            time_s += gap_s(kind, float(shape), float(scale))
            if time_s >= end_s:
                break
            yield TracedRequest(time_s, *_SERVEGEN_TOKENS, client=name)
