"""Damaged adapters: a valid adapter with one change for each error code.

What the reader refuses is tested in `tests/engine/adapters`.
"""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loradock.messages.errors import ErrorCode
from tests.support.parallel.processes import TINY

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAN = b"\x00\x00\xc0\x7f"

Damage = Callable[[Path], None]


def copy_adapter(name: str, to: Path) -> Path:
    """Copy a valid adapter's files to another directory."""
    shutil.copytree(TINY / "adapters" / name, to)
    return to


def with_config(**fields: Any) -> Damage:
    def change(adapter: Path) -> None:
        path = adapter / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def with_value(value: bytes) -> Damage:
    def change(adapter: Path) -> None:
        raw = (adapter / WEIGHTS).read_bytes()
        (adapter / WEIGHTS).write_bytes(raw[:-4] + value)

    return change


def _remove(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()


def _cut(adapter: Path) -> None:
    os.truncate(adapter / WEIGHTS, (adapter / WEIGHTS).stat().st_size - 1000)


def _link(adapter: Path) -> None:
    # The same bytes in a place that is not below a root.
    target = adapter.parent.parent / "elsewhere"
    (adapter / WEIGHTS).rename(target)
    (adapter / WEIGHTS).symlink_to(target)


def _fifo(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)


DAMAGES: dict[str, tuple[Damage, ErrorCode]] = {
    "no weights": (_remove, ErrorCode.NOT_FOUND),
    "cut in a tensor": (_cut, ErrorCode.DOES_NOT_FIT),
    "not a number": (with_value(NAN), ErrorCode.NOT_FINITE),
    "rank zero": (with_config(r=0), ErrorCode.CONFIG_REFUSED),
    "weights as a link": (_link, ErrorCode.PATH_NOT_ALLOWED),
    "weights that are a pipe": (_fifo, ErrorCode.PATH_NOT_ALLOWED),
}
