"""The command lines of our own processes, and their exit statuses.

The interpreter's option -P and an entry file that is named by its path keep the working directory
off `sys.path`: a user's `random.py` or `loradock/` is neither run nor in the way.
"""

import sys
from pathlib import Path
from typing import Final, Literal

import msgspec
from msgspec import Struct

from loradock.messages.engine_options import EngineProcess

EXIT_FAILED: Final = 1
"""The disk failed: a restart reads what it holds."""
EXIT_CONFIG: Final = 2
"""No process can be started with these options."""
EXIT_SOCKET: Final = 6
"""A socket can't be opened."""
EXIT_LOG: Final = 7
"""The log is damaged, foreign, in use or diverges: a restart does not help."""

ProcessName = Literal[
    "controller",
    "engine",
    "ranks",
    "gateway",
    "templates",
    "snapshotter",
    "member",
    "picker",
    "envoy",
]
"""The entry points in `ENTRY_FILE`."""

ENTRY_FILE: Final = Path(__file__).resolve().with_name("__main__.py")
"""It imports `loradock` from its own root, even if another copy is installed."""


def process_command(name: ProcessName, config: Struct | None = None) -> list[str]:
    """Return the command that starts a process; its configuration is one argument, as JSON.

    The processes without a configuration have arguments that follow the command.
    """
    arguments = [] if config is None else [msgspec.json.encode(config).decode()]
    return [sys.executable, "-P", str(ENTRY_FILE), name, *arguments]


def engine_command(process: EngineProcess) -> list[str]:
    """Return the command that starts an engine: one process, or `torchrun` with its ranks."""
    command, ranks = process_command("engine", process), process.start.tensor_parallel_size
    if ranks == 1:
        return command
    options = ("--standalone", "--nproc-per-node", str(ranks), "--no-python")
    # The ranks are started by the same kind of command, not by torchrun's own `python -m`.
    return [*process_command("ranks"), *options, *command]
