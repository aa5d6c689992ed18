"""The command lines of our own processes.

The interpreter's option -P and an entry file that is named by its path keep the working directory
off `sys.path`: a user's `random.py` or `loradock/` is neither run nor in the way.
"""

import sys
from pathlib import Path
from typing import Final, Literal

ProcessName = Literal["controller", "engine", "ranks", "gateway", "templates", "snapshotter"]
"""The entry points in `ENTRY_FILE`."""

ENTRY_FILE: Final = Path(__file__).resolve().with_name("__main__.py")
"""It imports `loradock` from its own root, even if another copy is installed."""


def python_arguments(name: ProcessName) -> tuple[str, ...]:
    """Return the arguments of Python that start a process; its own arguments follow them."""
    return ("-P", str(ENTRY_FILE), name)


def process_command(name: ProcessName) -> list[str]:
    """Return the command that starts a process; its own arguments follow it."""
    return [sys.executable, *python_arguments(name)]
