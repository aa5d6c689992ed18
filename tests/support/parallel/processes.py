"""Real processes for tests: a controller and an engine on the tiny model.

A process ends with the context that started it.
"""

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec

from loradock.controller.core.limits import Limits
from loradock.controller.server.config import ServerConfig, Supervision
from loradock.messages.addresses import endpoint
from loradock.messages.engine_options import (
    EngineOptions,
    EngineProcess,
    EngineStart,
    LoRAOptions,
)
from loradock.processes.subprocesses import engine_command
from tests.support.parallel.forked_processes import ROOT, ForkedProcess, forker
from tests.support.simulation.key_examples import engine_keys
from tests.support.waiting import HANG_S

TINY = ROOT / "examples" / "tiny"
ADAPTERS = tuple(sorted(path.name for path in (TINY / "adapters").iterdir()))

LIMITS = Limits(
    max_loras=3,
    max_cpu_loras=6,
    host_bytes_max=32 << 20,
    pinned_bytes_max=32 << 20,
    device_bytes_max=8 << 20,
    # An engine may take long to start.
    request_timeout_ms=int(1000 * HANG_S),
    digest_interval=50,
)


CONTROLLER = "loradock.controller.server.process"
STEPPED_CONTROLLER = "tests.support.parallel.stepped_controller"

_HASH_SEEDS = 3
"""A controller that starts again has another seed of hashes than before."""


class ControllerProcess:
    """A controller that can be killed and started again over the same directory."""

    def __init__(self, directory: Path, limits: Limits = LIMITS, **options: Any) -> None:
        self._config = ServerConfig(str(directory), limits, **options)
        self._module = CONTROLLER
        self._arguments: tuple[str, ...] = ()
        self._errors = directory.with_suffix(".controller.log")
        self._process: ForkedProcess | None = None
        self._starts = 0
        self.launch_id = ""
        """The run of a supervisor to which the next processes belong; empty for none."""

    def use_clock(self, offset: Path) -> None:
        """Run the next processes with the wall clock whose error is in the file `offset`."""
        self._module, self._arguments = STEPPED_CONTROLLER, (str(offset),)

    @property
    def _running(self) -> ForkedProcess:
        assert self._process is not None
        return self._process

    @property
    def pid(self) -> int:
        return self._running.pid

    def start(self) -> None:
        supervision = Supervision(launch_id=self.launch_id)
        started = msgspec.structs.replace(self._config, supervision=supervision)
        config = msgspec.json.encode(started).decode()
        parent = forker(self._starts % _HASH_SEEDS, CONTROLLER, STEPPED_CONTROLLER)
        arguments = (*self._arguments, config)
        self._process = parent.start(self._module, arguments, self._errors)
        self._starts += 1

    def kill(self) -> None:
        self._running.send_signal(signal.SIGKILL)
        self._running.wait()

    def stop(self) -> int:
        self._running.terminate()
        return self._running.wait(HANG_S)

    def wait(self) -> int:
        return self._running.wait(HANG_S)

    def output(self) -> str:
        return self._errors.read_text()


@contextmanager
def controller(
    directory: Path, clock_offset: Path | None = None, **options: Any
) -> Iterator[ControllerProcess]:
    process = ControllerProcess(directory, **options)
    if clock_offset is not None:
        process.use_clock(clock_offset)
    process.start()
    try:
        yield process
    finally:
        if process._running.poll() is None:
            process.kill()


@contextmanager
def engine(
    directory: Path,
    roots: tuple[Path, ...] = (TINY / "adapters",),
    limits: Limits = LIMITS,
    model: Path = TINY / "model",
    **options: Any,
) -> Iterator["subprocess.Popen[bytes]"]:
    """Run an engine that no supervisor watches; `options` are fields of `EngineOptions`."""
    keys: dict[str, Any] = engine_keys(directory)
    start = EngineStart(
        connect=endpoint(directory, "engine.sock"),
        model=str(model),
        adapter_roots=tuple(map(str, roots)),
        max_loras=limits.max_loras,
        device_bytes_max=limits.device_bytes_max,
        **keys,
    )
    lora, engine_options = LoRAOptions(max_lora_rank=64), EngineOptions(**options)
    command = engine_command(EngineProcess(start=start, lora=lora, engine=engine_options))
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with directory.with_suffix(".engine.log").open("ab") as errors:
        process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=errors, stderr=errors)
    try:
        yield process
    finally:
        process.kill()
        process.wait()
