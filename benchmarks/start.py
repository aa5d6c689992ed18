"""Start-up: the help text, and an engine on the tiny model until it is ready.

Both are processor seconds of a process, which other processes hardly change. A start is not
repeated in one process, because imports happen once.
"""

import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, interleave
from loradock.controller.server.keys import new_pair
from loradock.processes.key_files import share_key_pair
from loradock.processes.subprocesses import process_command

_ROOT: Final = Path(__file__).parents[1]
_TINY: Final = _ROOT / "examples" / "tiny"
_ROUNDS: Final = 5
_HELP: Final = "from loradock.cli.main import app; app()"
_LIBRARIES: Final = "import torch, transformers"


def run() -> Iterator[Figure]:
    """Yield the figures of the group `start`."""
    nothing, shown = interleave(_of("pass"), _of(_HELP, "--help"), _ROUNDS)
    yield Figure(
        "start.help",
        (shown - nothing) * 1000,
        "ms",
        f"python -c pass: {nothing * 1000:.0f} ms, which is subtracted",
        shown / nothing,
        "<= 150 ms",
        (shown - nothing) * 1000 <= 150,
    )
    libraries, engine = interleave(_of(_LIBRARIES), _engine_s, _ROUNDS)
    yield Figure(
        "start.engine",
        engine,
        "s",
        f"importing torch and transformers: {libraries:.2f} s",
        engine / libraries,
        "ratio <= 1.5",
        engine <= 1.5 * libraries,
    )


def _of(code: str, *arguments: str) -> Callable[[], float]:
    """Return a function that runs a program and returns its processor seconds."""
    command = [sys.executable, "-c", code, *arguments]

    def measure() -> float:
        before = _children_s()
        subprocess.run(
            command, cwd=_ROOT, env=_environment(), stdout=subprocess.DEVNULL, check=True
        )
        return _children_s() - before

    return measure


def _engine_s() -> float:
    """Return the processor seconds of an engine until it is ready to connect."""
    with tempfile.TemporaryDirectory(prefix="ld-") as name:
        server_key = Path(name) / "server.key.pub"
        server_key.write_text(new_pair().public)
        command = [*process_command("engine"), "--connect", f"ipc://{name}/none"]
        command += ["--model", str(_TINY / "model"), "--adapter-root", str(_TINY / "adapters")]
        command += ["--max-lora-rank", "64", "--key", share_key_pair(new_pair())]
        command += ["--server-key", str(server_key)]
        process = subprocess.Popen(command, env=_environment(), stderr=subprocess.PIPE, text=True)
        lines = []
        for line in process.stderr or ():
            lines.append(line)
            if " ready " in line:
                break
        ticks = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
        process.kill()
        if process.wait() > 0:
            raise RuntimeError("the engine did not start:\n" + "".join(lines))
        return sum(map(int, ticks[11:13])) / os.sysconf("SC_CLK_TCK")


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment() -> dict[str, str]:
    return os.environ | {"OMP_NUM_THREADS": "1"}
