"""HTTP connections as bare as possible, so that the load costs less than what it measures."""

import asyncio
import time
from collections.abc import Sequence
from typing import Final

_HEAD_END: Final = b"\r\n\r\n"


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
        """Read a stream to its end; return seconds to its first event, and its tokens."""
        began, first_s, tokens = time.perf_counter(), 0.0, 0
        await self.start(request)
        while True:
            line = await self._reader.readuntil(b"\n")
            if line.startswith(b"data: [DONE]"):
                await self._reader.readuntil(b"0\r\n\r\n")
                return first_s, tokens
            # The last chunk has the end instead of a token.
            if line.startswith(b"data: ") and b'"finish_reason":null' in line:
                first_s = first_s or time.perf_counter() - began
                tokens += 1

    def close(self) -> None:
        """End the connection."""
        self._writer.close()


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
