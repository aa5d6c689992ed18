"""Start-up: the help text, and an engine on the tiny model until it is ready.

Both are processor seconds of a process, which other processes hardly change. A start is not
repeated in one process, because imports happen once.
"""

import os
import resource
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final

from benchmarks.figures import Figure, interleave
from loradock.controller.server.keys import new_pair
from loradock.messages.engine_options import EngineProcess, EngineStart, LoRAOptions
from loradock.processes.key_files import share_key_pair
from loradock.processes.subprocesses import engine_command

_ROOT: Final = Path(__file__).parents[1]
_TINY: Final = _ROOT / "examples" / "tiny"
_ROUNDS: Final = 5
_HELP: Final = "from loradock.cli.main import app; app()"
_CLIENT: Final = "from loradock import Client"
_SIZES: Final = """
import re, sys
from importlib.metadata import PackageNotFoundError, distribution

def add(line, found):
    name = re.match(r"[A-Za-z0-9_.-]+", line)[0].lower()
    if name in found or "extra ==" in line:
        return
    try:
        files = [file.locate() for file in distribution(name).files or ()]
    except PackageNotFoundError:
        return  # It is for another system.
    found[name] = sum(file.stat().st_size for file in files if file.exists())
    for required in distribution(name).requires or ():
        add(required, found)

found = {}
for line in sys.argv[1:]:
    add(line, found)
print(sum(found.values()))
"""
"""Prints the bytes of the distributions that the arguments require, as they are installed here."""

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
    nothing, client = interleave(_of("pass"), _of(_CLIENT), _ROUNDS)
    yield Figure(
        "start.client",
        (client - nothing) * 1000,
        "ms",
        f"python -c pass: {nothing * 1000:.0f} ms, which is subtracted",
        client / nothing,
        "<= 250 ms",
        (client - nothing) * 1000 <= 250,
    )
    light, whole = _installed_bytes()
    yield Figure(
        "start.size",
        light / 1e6,
        "MB of files without the extra `serve`",
        f"with it: {whole / 1e6:.0f} MB",
        light / whole,
        "ratio <= 0.15",
        light <= 0.15 * whole,
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


def _installed_bytes() -> tuple[int, int]:
    """Return the bytes of what is installed without and with the extra `serve`, and of our own."""
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
    own = sum(
        path.stat().st_size
        for name in ("messages", "controller", "engine", "loradock")
        for path in (_ROOT / name).rglob("*.py")
    )

    def size(lines: Sequence[str]) -> int:
        command = [sys.executable, "-c", _SIZES, *lines]
        found = subprocess.run(command, capture_output=True, text=True, check=True)
        return own + int(found.stdout)

    light = project["dependencies"]
    return size(light), size([*light, *project["optional-dependencies"]["serve"]])


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
        start = EngineStart(
            connect=f"ipc://{name}/none",
            model=str(_TINY / "model"),
            adapter_roots=(str(_TINY / "adapters"),),
            key=share_key_pair(new_pair()),
            server_key=str(server_key),
        )
        command = engine_command(EngineProcess(start=start, lora=LoRAOptions(max_lora_rank=64)))
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
