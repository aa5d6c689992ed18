"""`make hostile-load`: the milliseconds by which hostile HTTP clients delay others.

A gateway process in front of a stand-in for the controller is asked for `/health` every 5 ms:
alone, and while clients send each of `ATTACKS` again and again. Every stream waits for the same
event loop, so its gaps grow by as much. The figures are the median, the 99th percentile and the
longest of the answers; the last line is all attacks at once. Figures of a busy machine say little.
"""

import argparse
import socket
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from itertools import cycle
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from benchmarks.gateway import stand_in
from benchmarks.http_load import get, post

INTERVAL_S: Final = 0.005
LONG: Final = "hello world " * 83_000
_TEXTS: Final = [f"text {number}" for number in range(512)]
_RERANKED: Final = {"query": "text", "documents": _TEXTS}
_ANSWER_S: Final = 120.0


def _completion(**fields: Any) -> bytes:
    return post("/v1/completions", msgspec.json.encode({"max_tokens": 1, **fields}))


def _raw(text: bytes) -> bytes:
    return post("/v1/completions", b'{"prompt": [' + text + b"]}")


def _image(url: str) -> bytes:
    part = {"type": "image_url", "image_url": {"url": url}}
    body = {"messages": [{"role": "user", "content": [part]}]}
    return post("/v1/chat/completions", msgspec.json.encode(body))


ATTACKS: Final[dict[str, Callable[[], bytes]]] = {
    "echo of 4 MB": lambda: _completion(prompt=[LONG] * 4, echo=True, logprobs=1),
    "truncated text": lambda: _completion(prompt=LONG, truncate_prompt_tokens=5),
    "2,048 texts": lambda: _completion(prompt=["hello " * 300] * 2048, return_token_ids=True),
    "/tokenize": lambda: post("/tokenize", msgspec.json.encode({"prompt": LONG})),
    "/detokenize": lambda: post("/detokenize", msgspec.json.encode({"tokens": [300] * 262_144})),
    "512 vectors": lambda: post("/v1/embeddings", msgspec.json.encode({"input": _TEXTS})),
    "512 documents": lambda: post("/rerank", msgspec.json.encode(_RERANKED)),
    "8 MB of empty lists": lambda: _raw(b"[]," * 2_700_000 + b"[]"),
    "130,000 empty lists": lambda: _raw(b"[]," * 130_000 + b"[]"),
    "1,000,000 token ids": lambda: _raw(b"31234," * 1_000_000 + b"1"),
    "percent-encoded image": lambda: _image("data:image/png," + "%41" * (20 << 20)),
    "image of 8 MB": lambda: _image("data:image/png;base64," + "A" * (11 << 20)),
    "body of 60 MB": lambda: _image("data:image/png;base64," + "A" * (60 << 20)),
}


@contextmanager
def _attacked(port: int, requests: list[bytes]) -> Iterator[None]:
    """Send the requests one after another on new connections, until the context ends."""
    ended = threading.Event()

    def attack() -> None:
        for request in cycle(requests):
            if ended.is_set():
                return
            with suppress(OSError), socket.create_connection(("127.0.0.1", port), _ANSWER_S) as own:
                own.sendall(request)
                own.recv(65536)

    threads = [threading.Thread(target=attack, daemon=True) for _ in range(3 if requests else 0)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        ended.set()
        for thread in threads:
            thread.join(_ANSWER_S)


def _delays_ms(port: int, seconds: float) -> list[float]:
    """Return the time of each answer of `/health`, sorted."""
    found, until = [], time.perf_counter() + seconds
    with socket.create_connection(("127.0.0.1", port), _ANSWER_S) as own:
        while time.perf_counter() < until:
            began = time.perf_counter()
            own.sendall(get("/health"))
            own.recv(65536)
            found.append(1000 * (time.perf_counter() - began))
            time.sleep(INTERVAL_S)
    return sorted(found)


def main() -> None:
    """Print the delays without and with each attack."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.hostile")
    parser.add_argument("--seconds", type=float, default=5.0, help="duration of each attack")
    arguments = parser.parse_args()
    columns = ("attack", "median ms", "99 % ms", "longest ms")
    table = Table(*columns, title="answers of /health")
    with tempfile.TemporaryDirectory(prefix="ld-") as name, stand_in(Path(name), 10) as gateway:
        built = {name: [make()] for name, make in ATTACKS.items()}
        everything = [request for requests in built.values() for request in requests]
        for attack, requests in {"none": [], **built, "all": everything}.items():
            with _attacked(gateway.port, requests):
                delays = _delays_ms(gateway.port, arguments.seconds)
            shown = (delays[len(delays) // 2], delays[len(delays) * 99 // 100], delays[-1])
            table.add_row(attack, *(f"{delay:.1f}" for delay in shown))
        table.caption = f"memory of the gateway afterwards: {gateway.resident_mb():.0f} MB"
    Console().print(table)


if __name__ == "__main__":
    main()
