"""The figures `gateway.*`: what HTTP adds to the client library, and what a gateway costs.

`tokens` and `first_token` use the real processes on the tiny model; the others use a stand-in for
the controller, because the speed of the engine is not measured.
"""

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import msgspec

from benchmarks.figures import Figure
from benchmarks.http_load import (
    Connection,
    connections,
    free_port,
    get,
    once,
    post,
    rate,
    seconds,
    wait_until_served,
)
from benchmarks.serving import make_run, running, serving
from benchmarks.standin_controller import IDLE
from loradock.cli.serve.config import ServeConfig, ServeOptions
from loradock.client import AsyncClient
from loradock.controller.core.limits import Limits
from loradock.controller.server.config import ServerConfig
from loradock.gateway.options import GatewayConfig
from loradock.processes.subprocesses import process_command

TINY: Final = Path(__file__).parent.parent / "examples" / "tiny"
PATH: Final = "/v1/completions"
ADAPTER: Final = "upper"
STREAMS: Final = 32
TOKENS: Final = 64
ROUNDS: Final = 5
FIRST_TOKENS: Final = 60
REQUESTS: Final = 3000
ADAPTERS: Final = 10_000
IDLE_STREAMS: Final = 1000
START_S: Final = 120.0


def run() -> Iterator[Figure]:
    """Measure every figure of the group."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name, _served(Path(name)) as port:
        yield from asyncio.run(_streams(Path(name), port))
    with tempfile.TemporaryDirectory(prefix="ld-") as name, stand_in(Path(name), 10) as gateway:
        yield asyncio.run(_requests(gateway.port))
        yield asyncio.run(_memory(gateway))
    with tempfile.TemporaryDirectory(prefix="ld-") as name:  # noqa: SIM117 - too long for a line
        with stand_in(Path(name), ADAPTERS) as gateway:
            yield asyncio.run(_scrape(gateway.port))


class _Gateway(msgspec.Struct, frozen=True):
    """A gateway process."""

    port: int
    pid: int

    def resident_mb(self) -> float:
        """Return its resident memory in MB."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * 4096 / 1e6


@contextmanager
def _served(directory: Path) -> Iterator[int]:
    """Run the real processes with a gateway, until it has answered once."""
    port = free_port()
    gateway = GatewayConfig(directory=str(directory), port=port, model=str(TINY / "model"))
    limits = Limits(max_loras=3, max_cpu_loras=8, device_bytes_max=1 << 26)
    config = ServeConfig(
        ServerConfig(str(directory), limits),
        ServeOptions(model=str(TINY / "model"), adapter_roots=(str(TINY / "adapters"),)),
        gateway=gateway,
    )
    with serving(config):
        asyncio.run(_load_adapter(directory))
        wait_until_served(port, START_S)
        yield port


async def _load_adapter(directory: Path) -> None:
    async with AsyncClient(directory, timeout_s=START_S) as client:
        await client.activate(ADAPTER)


@contextmanager
def stand_in(directory: Path, adapters: int) -> Iterator[_Gateway]:
    """Run a gateway in front of a stand-in."""
    make_run(directory)
    port = free_port()
    config = GatewayConfig(directory=str(directory), port=port, model=str(TINY / "model"))
    standin = [sys.executable, "-m", "benchmarks.standin_controller", str(directory)]
    command = process_command("gateway", config)
    with (
        running([*standin, str(adapters)], directory / "stand-in.err"),
        running(command, directory / "gateway.err") as pid,
    ):
        wait_until_served(port, START_S)
        yield _Gateway(port, pid)


def _body(prompt: str, **more: object) -> bytes:
    return msgspec.json.encode({"model": ADAPTER, "prompt": prompt, "temperature": 1.0, **more})


async def _streams(directory: Path, port: int) -> list[Figure]:
    # A text that the adapter continues without an end.
    prompt = "a" * 40
    opened = await connections(port, STREAMS)
    streamed = {"stream": True, "stream_options": {"include_usage": True}}
    request = post(PATH, _body(prompt, max_tokens=TOKENS, **streamed))
    one = post(PATH, _body(prompt, max_tokens=1, **streamed))
    async with AsyncClient(directory) as client:

        async def direct(max_tokens: int) -> tuple[float, int]:
            began, first_s, tokens = time.perf_counter(), 0.0, 0
            generation = await client.generate(
                prompt, ADAPTER, max_tokens=max_tokens, temperature=1.0
            )
            async for chunk in generation:
                if chunk.text:
                    first_s = first_s or time.perf_counter() - began
                tokens += len(chunk.tokens)
            return first_s, tokens

        rates: dict[str, list[float]] = {"http": [], "direct": []}
        for _ in range(ROUNDS):
            rates["http"].append(await _tokens_per_s([c.stream(request) for c in opened]))
            rates["direct"].append(await _tokens_per_s([direct(TOKENS) for _ in opened]))
        firsts: dict[str, list[float]] = {"http": [], "direct": []}
        for _ in range(FIRST_TOKENS):
            firsts["http"].append((await opened[0].stream(one))[0])
            firsts["direct"].append((await direct(1))[0])
    return [_tokens_figure(rates), _first_token_figure(firsts)]


async def _tokens_per_s(streams: list) -> float:  # type: ignore[type-arg]
    began = time.perf_counter()
    results = await asyncio.gather(*streams)
    return sum(tokens for _, tokens in results) / (time.perf_counter() - began)


def _tokens_figure(rates: dict[str, list[float]]) -> Figure:
    http, direct = _median(rates["http"]), _median(rates["direct"])
    return Figure(
        "gateway.tokens",
        http,
        "tokens/s",
        f"the same {STREAMS} generations through AsyncClient: {direct:,.0f}/s",
        http / direct,
        "ratio >= 0.8",
        http / direct >= 0.8,
    )


def _first_token_figure(firsts: dict[str, list[float]]) -> Figure:
    http, direct = _median(firsts["http"]), _median(firsts["direct"])
    added_ms, ratio = 1000 * (http - direct), http / direct
    return Figure(
        "gateway.first_token",
        added_ms,
        "ms added",
        f"the first token through AsyncClient: {1000 * direct:.1f} ms",
        ratio,
        "<= 5 ms and ratio <= 1.1",
        added_ms <= 5 and ratio <= 1.1,
    )


async def _requests(port: int) -> Figure:
    bare_port = free_port()
    with tempfile.TemporaryDirectory() as name:
        command = [sys.executable, "-m", "benchmarks.bare_endpoint", str(bare_port)]
        with running(command, Path(name) / "bare.err"):
            request = post(PATH, _body_ofstand_in())
            await _wait_until_open(bare_port)
            served, bare = await connections(port, STREAMS), await connections(bare_port, STREAMS)
            pairs = [
                (await rate(served, request, REQUESTS), await rate(bare, request, REQUESTS))
                for _ in range(ROUNDS)
            ]
    found, yardstick = (_median(list(column)) for column in zip(*pairs, strict=True))
    return Figure(
        "gateway.requests",
        found,
        "requests/s",
        f"a bare Starlette endpoint that echoes the same body: {yardstick:,.0f}/s",
        found / yardstick,
        "ratio >= 0.3",
        found / yardstick >= 0.3,
    )


def _body_ofstand_in() -> bytes:
    return msgspec.json.encode({"model": "adapter-000001", "prompt": "hello", "max_tokens": 4})


async def _wait_until_open(port: int) -> None:
    for _ in range(600):
        try:
            (await Connection(port).open()).close()
        except OSError:
            await asyncio.sleep(0.1)
        else:
            return


async def _memory(gateway: _Gateway) -> Figure:
    before = gateway.resident_mb()
    opened = await connections(gateway.port, IDLE_STREAMS)
    request = post(PATH, msgspec.json.encode({"prompt": IDLE, "stream": True}))
    for connection in opened:
        await connection.start(request)
    expected = msgspec.json.encode({"server_load": IDLE_STREAMS})
    while await once(gateway.port, get("/load")) != expected:
        await asyncio.sleep(0.05)
    added = gateway.resident_mb() - before
    for connection in opened:
        connection.close()
    return Figure(
        "gateway.memory",
        added,
        "MB more",
        f"the gateway without streams: {before:,.0f} MB",
        (before + added) / before,
        f"<= 50 MB for {IDLE_STREAMS:,} streams",
        added <= 50,
    )


async def _scrape(port: int) -> Figure:
    scraper, other = await connections(port, 2)
    request = post(PATH, _body_ofstand_in())
    quiet = await seconds(other, request, REQUESTS // 3)
    task = asyncio.create_task(_scrape_repeatedly(scraper))
    busy = await seconds(other, request, REQUESTS // 3)
    task.cancel()
    found = await seconds(await Connection(port).open(), get("/metrics"), 20)
    median_ms = 1000 * _median(found)
    ratio = _p99(busy) / _p99(quiet)
    return Figure(
        "gateway.scrape",
        median_ms,
        "ms",
        f"p99 of requests while scraped each second, without: {1000 * _p99(quiet):.1f} ms",
        ratio,
        f"<= 50 ms with {ADAPTERS:,} adapters and ratio <= 1.5",
        median_ms <= 50 and ratio <= 1.5,
    )


async def _scrape_repeatedly(connection: Connection) -> None:
    while True:
        await connection.answer(get("/metrics"))
        await asyncio.sleep(1.0)


def _median(values: list[float]) -> float:
    return sorted(values)[len(values) // 2]


def _p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * len(values))]
