"""The demo (`make demo`): eight adapters in three slots, two crashes under load, one replay.

It starts the real processes, sends requests concurrently, compares every output with the
transformation for which the adapter was trained, kills the controller and then the engine, and
replays the log. It exits with 0 only if no request was lost, no output was wrong, and the digest of
the replay is that of the running controller.
"""

import argparse
import asyncio
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from urllib.request import Request, urlopen

from msgspec import Struct, field
from rich.console import Console

from examples.demo_arrival import show_arrivals
from examples.demo_view import LifeCycle, print_totals, print_what_if, summary
from examples.transformations import TRANSFORMATIONS, answer_of, held_out_words, prompt_of
from loradock.client import AsyncClient, LoradockError
from loradock.controller.log.replay import ReplayResult, replay
from loradock.messages.requests import AdaptersListed, StatusShown

TINY = Path(__file__).parent / "tiny"
SLOTS = 3
CLIENTS = 24
REQUESTS = 720
BASE = "(base)"
# A request that ends with its engine is sent again; an engine may die several times.
ATTEMPTS = 8
START_TIMEOUT_S = 120.0
OUTPUT_TOKENS_MAX = 32
# With this seed, every adapter that is served alone is right for all words (one of the adapters is
# right for only 99.6 % of all words in general). So a wrong output comes from other weights.
WORDS_SEED = 11

Answer = Callable[[str | None, str], Awaitable[str]]
"""Makes a request: the output of an adapter, or of the base model for None, for a prompt."""


class Tally(Struct):
    """The outcomes of all requests."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    exact: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Run the demo in a new directory; returns 0 if all checks passed, else 1."""
    parser = argparse.ArgumentParser(description="eight adapters, three slots, two crashes")
    parser.add_argument("--directory", type=Path, default=Path(".loradock-demo"))
    parser.add_argument("--keep", action="store_true", help="continue to serve until Ctrl-C")
    arguments = parser.parse_args()
    directory, port = arguments.directory, _free_port()
    shutil.rmtree(directory, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.rule("LoRADock: eight adapters, three slots, two crashes, one replay")
    with _serve(directory, port):
        page = f"http://127.0.0.1:{port}/"
        # The page is served before the model is loaded.
        _fetch(f"{page}live")
        console.print(f"Open the page, which shows all of it: {page}")
        tally, adapters, status = asyncio.run(_run(directory, page, console))
        console.print("Served. Now the log is replayed in this process, without an engine.")
        result = replay(directory / "log", until=status.seq)
        console.print(summary(adapters, tally.requests, tally.exact))
        code = _report(console, tally, status, result)
        print_what_if(console, directory / "log", SLOTS + 1)
        if arguments.keep:
            _keep_serving(console, page)
    return code


def _keep_serving(console: Console, page: str) -> None:
    console.print(f"The server continues, with {page} and {page}v1. Ctrl-C ends it.")
    with suppress(KeyboardInterrupt):
        signal.pause()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return int(listener.getsockname()[1])


def _fetch(url: str, data: bytes | None = None) -> bytes:
    """Return the body of an answer; what fails is sent again, as clients of HTTP do."""
    request = Request(url, data, {"content-type": "application/json"})  # noqa: S310 - our address
    end = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            with urlopen(request) as response:  # noqa: S310
                return bytes(response.read())
        except OSError:
            if time.monotonic() > end:
                raise
            time.sleep(0.2)


@contextmanager
def _serve(directory: Path, port: int) -> Iterator[None]:
    command = [str(Path(sys.executable).parent / "loradock"), "--dir", str(directory), "serve"]
    command += ["--model", str(TINY / "model"), "--adapter-root", str(TINY / "adapters")]
    command += ["--max-loras", str(SLOTS), "--max-cpu-loras", str(len(TRANSFORMATIONS) - 2)]
    command += ["--device-bytes", "8MiB", "--pinned-bytes", "16MiB", "--host-bytes", "16MiB"]
    # The largest rank of the adapters is 64; the engine refuses adapters above its maximum.
    command += ["--max-lora-rank", "64"]
    command += ["--http", f"127.0.0.1:{port}", "--allow-runtime-lora-updating"]
    directory.mkdir(parents=True)
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


async def _run(
    directory: Path, page: str, console: Console
) -> tuple[Tally, AdaptersListed, StatusShown]:
    async with AsyncClient(directory, timeout_s=START_TIMEOUT_S) as client:
        life_cycle = LifeCycle(console)
        watching = asyncio.create_task(_watch(client, life_cycle))
        await asyncio.gather(*(client.load(name) for name in TRANSFORMATIONS))
        console.print(f"{len(TRANSFORMATIONS)} adapters are known, {SLOTS} slots are available.")
        tally = Tally()
        crashes = asyncio.create_task(_crash_twice(client, tally, console))
        showing = asyncio.create_task(_show(life_cycle, tally))
        await _traffic(directory, page, client, tally)
        await crashes
        showing.cancel()
        life_cycle.show(tally.answered)
        tally.wrong += await show_arrivals(client, console)
        adapters, status = await client.list(), await client.status()
        watching.cancel()
    return tally, adapters, status


async def _watch(client: AsyncClient, life_cycle: LifeCycle) -> None:
    async for published in await client.events(since=0):
        life_cycle.on_event(published)


async def _traffic(directory: Path, page: str, client: AsyncClient, tally: Tally) -> None:
    """Send all requests: a third by tasks with one connection, others with theirs, or by HTTP."""
    work, third = _all_work(), CLIENTS // 3
    # A thread for each HTTP client.
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(third))
    shared = [_send_requests(partial(_generate, client), work, tally) for _ in range(third)]
    separate = [_connect_and_send(directory, work, tally) for _ in range(third)]
    by_http = [_send_requests(partial(_complete, page), work, tally) for _ in range(third)]
    await asyncio.gather(*shared, *separate, *by_http)


def _all_work() -> list[tuple[str, str]]:
    """Return (adapter, word) pairs: each adapter and the base equally often, shuffled."""
    names = [*TRANSFORMATIONS, BASE]
    words = held_out_words(REQUESTS // len(names), seed=WORDS_SEED)
    pairs = [(name, word) for name in names for word in words]
    random.Random(WORDS_SEED).shuffle(pairs)
    return pairs


async def _connect_and_send(directory: Path, work: list[tuple[str, str]], tally: Tally) -> None:
    async with AsyncClient(directory, timeout_s=START_TIMEOUT_S) as client:
        await _send_requests(partial(_generate, client), work, tally)


async def _generate(client: AsyncClient, adapter: str | None, prompt: str) -> str:
    generation = await client.generate(
        prompt, adapter, attempts=ATTEMPTS, max_tokens=OUTPUT_TOKENS_MAX
    )
    return await generation.text()


async def _complete(page: str, adapter: str | None, prompt: str) -> str:
    """Return an output of the OpenAI protocol, which answers 503 while no engine serves."""
    body = {"model": adapter or "", "prompt": prompt, "temperature": 0}
    data = json.dumps({**body, "max_tokens": OUTPUT_TOKENS_MAX}).encode()
    answer = await asyncio.to_thread(_fetch, f"{page}v1/completions", data)
    return str(json.loads(answer)["choices"][0]["text"])


async def _send_requests(answer: Answer, work: list[tuple[str, str]], tally: Tally) -> None:
    while work:
        name, word = work.pop()
        tally.requests[name] += 1
        adapter = None if name == BASE else name
        try:
            output = await answer(adapter, prompt_of(word))
        except (LoradockError, OSError) as error:
            tally.lost.append(f"{name}({word}): {error}")
            continue
        tally.answered += 1
        # Without an adapter the base model copies the word.
        expected = word if adapter is None else answer_of(name, word)
        if output == expected:
            tally.exact[name] += 1
        else:
            tally.wrong.append(f"{name}({word}) = {output!r}, not {expected!r}")


async def _crash_twice(client: AsyncClient, tally: Tally, console: Console) -> None:
    await _wait_until_answered(tally, REQUESTS // 3)
    status = await client.status()
    os.kill(status.controller_pid, signal.SIGKILL)
    console.print(f"  [bold red]controller {status.controller_pid} killed[/] with SIGKILL")
    await _wait_until_answered(tally, 2 * REQUESTS // 3)
    status = await client.status()
    os.kill(status.engine_pid, signal.SIGKILL)
    console.print(f"  [bold red]engine {status.engine_pid} killed[/] with SIGKILL")


async def _wait_until_answered(tally: Tally, answered: int) -> None:
    while tally.answered + len(tally.lost) < answered:
        await asyncio.sleep(0.01)


async def _show(life_cycle: LifeCycle, tally: Tally) -> None:
    while True:
        life_cycle.show(tally.answered)
        await asyncio.sleep(1.0)


def _report(console: Console, tally: Tally, status: StatusShown, result: ReplayResult) -> int:
    same = result.divergence is None and result.digest == status.digest
    print_totals(console, (tally.answered, len(tally.lost), len(tally.wrong)), status, result)
    for line in (*tally.lost, *tally.wrong)[:10]:
        console.print(f"  [red]failed[/] {line}")
    complete = tally.answered == REQUESTS
    return 0 if same and complete and not tally.wrong else 1


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    Console().print(f"{time.monotonic() - started:.0f} seconds")
    sys.exit(code)
