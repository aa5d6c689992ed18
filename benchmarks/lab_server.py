"""Runs of a server under a workload of the lab, and the simulations that predict them.

The engine serves the tiny model with 24 adapters, copies of the examples', in four slots. What
leaves its slot leaves memory, so that its return reads files. Requests are sent at the workload's
times, however long earlier ones take.
"""

import asyncio
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Final

from msgspec import Struct

from benchmarks.serving import make_run, running
from loradock.client import AsyncClient
from loradock.lab.outcome import Outcome, Percentiles, percentiles
from loradock.lab.traffic import Traffic, read_traffic
from loradock.lab.workloads import Workload

ADAPTERS: Final = 24
SLOTS: Final = 4
RATE_FACTOR: Final = 0.5
"""Requests arrive half as fast as the ten per second of the workload: adapters have idle times."""

_TINY: Final = Path(__file__).parent.parent / "examples" / "tiny"
_TOKENS: Final = 24
_START_TIMEOUT_S: Final = 120.0


class ServedRun(Struct, frozen=True):
    """A run: its log's traffic, whose `logged` has loads and waits; first tokens as clients saw."""

    traffic: Traffic
    first_token_s: Percentiles

    @property
    def logged(self) -> Outcome:
        """Return what the log says about the run."""
        assert self.traffic.logged is not None
        return self.traffic.logged


def served(workload: Workload, policy: str) -> ServedRun:
    """Return a run of a server with a policy."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        root, directory = Path(name), Path(name) / "server"
        make_run(directory)
        with running(_command(root, directory, policy), root / "serve.log"):
            first_tokens_ns = asyncio.run(_send(directory, workload))
        return ServedRun(read_traffic(directory / "log"), percentiles(first_tokens_ns))


def _command(root: Path, directory: Path, policy: str) -> list[str]:
    trained = sorted((_TINY / "adapters").iterdir())
    for number in range(ADAPTERS):
        shutil.copytree(trained[number % len(trained)], root / "adapters" / f"a{number}")
    command = [str(Path(sys.executable).parent / "loradock"), "--dir", str(directory), "serve"]
    command += ["--model", str(_TINY / "model"), "--adapter-root", str(root / "adapters")]
    command += ["--max-loras", str(SLOTS), "--max-cpu-loras", str(SLOTS), "--policy", policy]
    return [*command, "--max-lora-rank", "64"]


async def _send(directory: Path, workload: Workload) -> list[int]:
    async with AsyncClient(directory, timeout_s=_START_TIMEOUT_S) as client:
        for adapter in range(ADAPTERS):
            await client.load(f"a{adapter}")
        started_s = time.monotonic()

        async def send(adapter: int, at_s: float) -> int:
            await asyncio.sleep(started_s + at_s - time.monotonic())
            sent_ns = time.monotonic_ns()
            # The end of a text ends no generation, so that all have as many tokens in each run.
            generation = await client.generate(
                "loradock>", f"a{adapter}", max_tokens=_TOKENS, ignore_eos=True
            )
            first_ns = 0
            async for _ in generation:
                first_ns = first_ns or time.monotonic_ns()
            return first_ns - sent_ns

        found = [send(one.adapter, one.time_s / RATE_FACTOR) for one in workload.requests]
        return await asyncio.gather(*found)
