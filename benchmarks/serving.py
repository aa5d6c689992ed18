"""Processes for measurements: a controller with its supervisor, or any other command."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from loradock.cli.serve.config import ServeConfig

_SERVE = (
    "import sys, msgspec; from loradock.cli.serve.config import ServeConfig; "
    "from loradock.cli.serve.supervisor import serve; "
    "sys.exit(serve(msgspec.json.decode(sys.argv[1], type=ServeConfig)).status)"
)


@contextmanager
def serving(config: ServeConfig) -> Iterator[None]:
    """Serve as `loradock serve` does; it may still be starting."""
    command = [sys.executable, "-c", _SERVE, msgspec.json.encode(config).decode()]
    directory = Path(config.server.directory)
    make_run(directory)
    with running(command, directory / "serve.log"):
        yield


def make_run(directory: Path) -> None:
    """Make a server's directory, for whose start clients then wait as long as it takes."""
    (directory / "run").mkdir(mode=0o700, parents=True, exist_ok=True)


@contextmanager
def running(command: list[str], output: Path) -> Iterator[int]:
    """Run a command whose output is appended to a file; yield its process id."""
    with output.open("ab") as sink:
        process = subprocess.Popen(command, stdout=sink, stderr=sink)
        try:
            yield process.pid
        finally:
            process.terminate()
            process.wait(30)
