"""The demo: eight adapters in three slots, two crashes in mid-traffic, one replay.

What it is: `make demo`. It starts the real processes, sends real requests in parallel, checks every
output against the transformation that the adapter was trained for, kills the controller and then
the engine, and replays the log. What it is not: a benchmark. One rule: it exits with 0 only if
nothing was lost, nothing was wrong, and the replay's digest is the running controller's.
"""

import argparse
import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from msgspec import Struct, field
from rich.console import Console

from controller.client import AsyncClient, LoradockError
from controller.log.replay import ReplayResult, replay
from examples.demo_view import LifeCycle, closing, summary
from examples.transformations import TRANSFORMATIONS, answer_of, held_out_words, prompt_of
from messages.requests import AdaptersListed, StatusShown

TINY = Path(__file__).parent / "tiny"
SLOTS = 3
CLIENTS = 24
REQUESTS = 720
BASE = "(base)"
# A request that an engine's death ended is asked again, as often as an engine may die.
ATTEMPTS = 8
START_TIMEOUT_S = 120.0
OUTPUT_TOKENS_MAX = 32
# Words on which every adapter, served alone, is exact (one of them knows only 99.6 % of all words):
# what is wrong here was answered by other weights.
WORDS_SEED = 11


class Tally(Struct):
    """What the clients saw."""

    answered: int = 0
    lost: list[str] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    exact: Counter[str] = field(default_factory=Counter)
    asked: Counter[str] = field(default_factory=Counter)


def main() -> int:
    """Run the demo in a fresh directory; the exit status says whether all of it held."""
    parser = argparse.ArgumentParser(description="eight adapters, three slots, two crashes")
    parser.add_argument("--directory", type=Path, default=Path(".loradock-demo"))
    directory = parser.parse_args().directory
    shutil.rmtree(directory, ignore_errors=True)
    console = Console(width=None if sys.stdout.isatty() else 110)
    console.rule("LoRADock: eight adapters, three slots, two crashes, one replay")
    with _serve(directory):
        tally, adapters, status = asyncio.run(_play(directory, console))
    console.print("Served. Now the log is folded again, in this process, without an engine.")
    result = replay(directory / "log", until=status.seq)
    console.print(summary(adapters, tally.asked, tally.exact))
    return _verdict(console, tally, status, result)


@contextmanager
def _serve(directory: Path) -> Iterator[None]:
    command = [str(Path(sys.executable).parent / "loradock"), "--dir", str(directory), "serve"]
    command += ["--model", str(TINY / "model"), "--adapter-root", str(TINY / "adapters")]
    command += ["--slots", str(SLOTS), "--host-adapters", str(len(TRANSFORMATIONS) - 2)]
    command += ["--device-bytes", "8MiB", "--pinned-bytes", "16MiB", "--host-bytes", "16MiB"]
    # The widest adapter has rank 64; the engine refuses what is wider than it is told.
    command += ["--max-lora-rank", "64"]
    directory.mkdir(parents=True)
    with (directory / "serve.log").open("wb") as log:
        process = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            yield
        finally:
            process.terminate()
            process.wait(30)


async def _play(directory: Path, console: Console) -> tuple[Tally, AdaptersListed, StatusShown]:
    async with AsyncClient(directory, timeout_s=START_TIMEOUT_S) as client:
        life = LifeCycle(console)
        watching = asyncio.create_task(_watch(client, life))
        await asyncio.gather(*(client.load(name) for name in TRANSFORMATIONS))
        console.print(f"{len(TRANSFORMATIONS)} adapters are known, {SLOTS} slots are there.")
        tally = await _traffic(directory, client, life, console)
        adapters, status = await client.list(), await client.status()
        watching.cancel()
    return tally, adapters, status


async def _watch(client: AsyncClient, life: LifeCycle) -> None:
    async for published in await client.events(since=0):
        life.on_event(published)


async def _traffic(
    directory: Path, client: AsyncClient, life: LifeCycle, console: Console
) -> Tally:
    tally = Tally()
    work = _work()
    crashes = asyncio.create_task(_crash_twice(client, tally, console))
    showing = asyncio.create_task(_show(life, tally))
    # Half of the clients share one connection, as tasks do; half have their own.
    shared = [_client(client, work, tally) for _ in range(CLIENTS // 2)]
    own = [_own_client(directory, work, tally) for _ in range(CLIENTS - CLIENTS // 2)]
    await asyncio.gather(*shared, *own)
    await crashes
    showing.cancel()
    life.show(tally.answered)
    return tally


def _work() -> list[tuple[str, str]]:
    """(adapter, word) pairs: every adapter and the base equally often, in a mixed order."""
    names = [*TRANSFORMATIONS, BASE]
    words = held_out_words(REQUESTS // len(names), seed=WORDS_SEED)
    pairs = [(name, word) for name in names for word in words]
    random.Random(WORDS_SEED).shuffle(pairs)
    return pairs


async def _own_client(directory: Path, work: list[tuple[str, str]], tally: Tally) -> None:
    async with AsyncClient(directory, timeout_s=START_TIMEOUT_S) as client:
        await _client(client, work, tally)


async def _client(client: AsyncClient, work: list[tuple[str, str]], tally: Tally) -> None:
    while work:
        name, word = work.pop()
        tally.asked[name] += 1
        adapter = None if name == BASE else name
        try:
            generation = await client.generate(
                prompt_of(word), adapter, attempts=ATTEMPTS, max_tokens=OUTPUT_TOKENS_MAX
            )
            output = await generation.text()
        except LoradockError as error:
            tally.lost.append(f"{name}({word}): {error}")
            continue
        tally.answered += 1
        # Without an adapter, the base model copies the word.
        expected = word if adapter is None else answer_of(name, word)
        if output == expected:
            tally.exact[name] += 1
        else:
            tally.wrong.append(f"{name}({word}) = {output!r}, not {expected!r}")


async def _crash_twice(client: AsyncClient, tally: Tally, console: Console) -> None:
    await _until(tally, REQUESTS // 3)
    status = await client.status()
    os.kill(status.controller_pid, signal.SIGKILL)
    console.print(f"  [bold red]controller {status.controller_pid} killed[/] with SIGKILL")
    await _until(tally, 2 * REQUESTS // 3)
    status = await client.status()
    os.kill(status.engine_pid, signal.SIGKILL)
    console.print(f"  [bold red]engine {status.engine_pid} killed[/] with SIGKILL")


async def _until(tally: Tally, answered: int) -> None:
    while tally.answered + len(tally.lost) < answered:
        await asyncio.sleep(0.01)


async def _show(life: LifeCycle, tally: Tally) -> None:
    while True:
        life.show(tally.answered)
        await asyncio.sleep(1.0)


def _verdict(console: Console, tally: Tally, status: StatusShown, result: ReplayResult) -> int:
    same = result.divergence is None and result.digest == status.digest
    closing(console, (tally.answered, len(tally.lost), len(tally.wrong)), status, result)
    for line in (*tally.lost, *tally.wrong)[:10]:
        console.print(f"  [red]not so[/] {line}")
    complete = tally.answered == REQUESTS
    return 0 if same and complete and not tally.wrong else 1


if __name__ == "__main__":
    started = time.monotonic()
    code = main()
    Console().print(f"{time.monotonic() - started:.0f} seconds")
    sys.exit(code)
