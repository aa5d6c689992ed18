"""HTTP connections as bare as possible, so that the load costs less than what it measures."""

import asyncio
import re
import socket
import time
from collections.abc import Sequence
from typing import Final

_HEAD_END: Final = b"\r\n\r\n"
_DONE: Final = b"data: [DONE]"
_TEXT: Final = b'"text":"'
_TOKENS: Final = re.compile(rb'"completion_tokens": ?(\d+)')


def post(path: str, body: bytes) -> bytes:
    """Return a request on a connection that stays open."""
    head = (
        f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n"
        f"content-length: {len(body)}\r\n\r\n"
    )
    return head.encode() + body


def get(path: str) -> bytes:
    """Return a request on a connection that stays open."""
    return f"GET {path} HTTP/1.1\r\nhost: localhost\r\n\r\n".encode()


class Connection:
    """One connection, on which requests follow one another."""

    def __init__(self, port: int) -> None:
        self._port = port

    async def open(self) -> "Connection":
        """Connect."""
        self._reader, self._writer = await asyncio.open_connection("127.0.0.1", self._port)
        return self

    async def answer(self, request: bytes) -> bytes:
        """Send a request and return the body of its answer, which has a declared length."""
        self._writer.write(request)
        head = await self._reader.readuntil(_HEAD_END)
        if b" 200 " not in head[:16]:
            raise RuntimeError(f"the gateway answered {head[:200]!r}")
        length = int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0])
        return await self._reader.readexactly(length)

    async def start(self, request: bytes) -> None:
        """Send a request whose answer is read later or never."""
        self._writer.write(request)
        await self._writer.drain()

    async def stream(self, request: bytes) -> tuple[float, int]:
        """Read a stream of texts to its end; return seconds to its first text, and its tokens.

        The request includes the usage, which the last chunk has.
        """
        began, first_s, last = time.perf_counter(), 0.0, b""
        await self.start(request)
        while True:
            line = await self._reader.readuntil(b"\n")
            if line.startswith(_DONE):
                await self._reader.readuntil(b"0\r\n\r\n")
                used = _TOKENS.search(last)
                if used is None:
                    raise RuntimeError(f"the last chunk has no usage: {last[:200]!r}")
                return first_s, int(used[1])
            if line.startswith(b"data: "):
                if not first_s and _has_text(line):
                    first_s = time.perf_counter() - began
                last = line

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


def _has_text(line: bytes) -> bool:
    """Whether a chunk has a text that is not empty."""
    return line.partition(_TEXT)[2][:1] not in (b"", b'"')


def free_port() -> int:
    """Return a port of this host on which nothing listens now."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def wait_until_served(port: int, timeout_s: float) -> None:
    """Wait until a gateway and its controller answer; raises RuntimeError if they don't."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        try:
            if b"loradock_synced 1.0" in asyncio.run(once(port, get("/metrics"))):
                return
        except OSError:
            pass
        time.sleep(0.1)
    raise RuntimeError("the gateway does not answer")


async def once(port: int, request: bytes) -> bytes:
    """Return the answer to a request on a connection of its own."""
    connection = await Connection(port).open()
    try:
        return await connection.answer(request)
    finally:
        connection.close()


async def connections(port: int, count: int) -> list[Connection]:
    """Open several connections."""
    return [await Connection(port).open() for _ in range(count)]


async def rate(opened: Sequence[Connection], request: bytes, requests: int) -> float:
    """Return answers per second over these connections."""
    left = requests

    async def work(connection: Connection) -> None:
        nonlocal left
        while left > 0:
            left -= 1
            await connection.answer(request)

    began = time.perf_counter()
    await asyncio.gather(*map(work, opened))
    return requests / (time.perf_counter() - began)


async def seconds(connection: Connection, request: bytes, rounds: int) -> list[float]:
    """Return the seconds of each of several requests, one after another."""
    found = []
    for _ in range(rounds):
        began = time.perf_counter()
        await connection.answer(request)
        found.append(time.perf_counter() - began)
    return found
