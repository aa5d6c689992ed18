"""Damaged adapters: a valid adapter with one change each, and the expected error code."""

import json
import os
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from loradock.messages.errors import ErrorCode
from tests.support.parallel.processes import TINY

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
NAN, INFINITY = b"\x00\x00\xc0\x7f", b"\x00\x00\x80\xff"

Damage = Callable[[Path], None]


def copy_adapter(name: str, to: Path) -> Path:
    """Copy a valid adapter's files to another directory."""
    shutil.copytree(TINY / "adapters" / name, to)
    return to


def split(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Return a weights file's header and the bytes after it."""
    (length,) = struct.unpack_from("<Q", raw)
    return json.loads(raw[8 : 8 + length]), raw[8 + length :]


def with_config(**fields: Any) -> Damage:
    def change(adapter: Path) -> None:
        path = adapter / CONFIG
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return change


def without(name: str) -> Damage:
    return lambda adapter: (adapter / name).unlink()


def cut_to(size: Callable[[bytes], int]) -> Damage:
    def change(adapter: Path) -> None:
        raw = (adapter / WEIGHTS).read_bytes()
        (adapter / WEIGHTS).write_bytes(raw[: size(raw)])

    return change


def header_bytes(raw: bytes) -> int:
    return 8 + int.from_bytes(raw[:8], "little")


def with_header(change: Callable[[dict[str, Any]], None]) -> Damage:
    def rewrite(adapter: Path) -> None:
        header, data = split((adapter / WEIGHTS).read_bytes())
        change(header)
        raw = json.dumps(header).encode()
        (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + data)

    return rewrite


def some_tensor(header: dict[str, Any], matrix: str) -> str:
    return next(name for name in sorted(header) if f"lora_{matrix}" in name)


def _swap_sides(header: dict[str, Any]) -> None:
    header[some_tensor(header, "A")]["shape"].reverse()


def _halve_rank(header: dict[str, Any]) -> None:
    # The same bytes, declared as a tensor of half the rank and twice the width.
    entry = header[some_tensor(header, "A")]
    rank, width = entry["shape"]
    entry["shape"] = [rank // 2, 2 * width]


def _rename_module(header: dict[str, Any]) -> None:
    for matrix in "AB":
        name = some_tensor(header, matrix)
        header[name.replace("layers.0", "layers.77")] = header.pop(name)


def _rename_tensor(header: dict[str, Any]) -> None:
    name = some_tensor(header, "A")
    header[name.replace("lora_A.weight", "lora_Z.weight")] = header.pop(name)


def _integers(header: dict[str, Any]) -> None:
    header[some_tensor(header, "A")]["dtype"] = "I32"


def with_value(value: bytes) -> Damage:
    def change(adapter: Path) -> None:
        raw = bytearray((adapter / WEIGHTS).read_bytes())
        raw[-4:] = value
        (adapter / WEIGHTS).write_bytes(raw)

    return change


def over_rank(adapter: Path) -> None:
    """Write valid tensors of a rank above the engine's maximum."""
    header, _ = split((adapter / WEIGHTS).read_bytes())
    header.pop("__metadata__", None)
    end = 0
    for name, entry in header.items():
        side = 0 if "lora_A" in name else 1
        entry["shape"][side] = 128
        start, end = end, end + 4 * entry["shape"][0] * entry["shape"][1]
        entry["data_offsets"] = [start, end]
    raw = json.dumps(header).encode()
    (adapter / WEIGHTS).write_bytes(struct.pack("<Q", len(raw)) + raw + bytes(end))
    with_config(r=128)(adapter)


def _link_weights(adapter: Path) -> None:
    # The same bytes in a place that is not below a root.
    target = adapter.parent.parent / "elsewhere"
    target.write_bytes((adapter / WEIGHTS).read_bytes())
    (adapter / WEIGHTS).unlink()
    (adapter / WEIGHTS).symlink_to(target)


def _fifo(adapter: Path) -> None:
    (adapter / WEIGHTS).unlink()
    os.mkfifo(adapter / WEIGHTS)


FITS, CONFIGURED = ErrorCode.DOES_NOT_FIT, ErrorCode.CONFIG_REFUSED
FOUND, FINITE, PATH = ErrorCode.NOT_FOUND, ErrorCode.NOT_FINITE, ErrorCode.PATH_NOT_ALLOWED

DAMAGES: dict[str, tuple[Damage, ErrorCode]] = {
    "no directory": (shutil.rmtree, FOUND),
    "no weights": (without(WEIGHTS), FOUND),
    "no config": (without(CONFIG), FOUND),
    "cut to nothing": (cut_to(lambda raw: 0), FITS),
    "cut in the length": (cut_to(lambda raw: 7), FITS),
    "cut after the length": (cut_to(lambda raw: 8), FITS),
    "cut in the header": (cut_to(lambda raw: header_bytes(raw) // 2), FITS),
    "cut after the header": (cut_to(header_bytes), FITS),
    "cut in a tensor": (cut_to(lambda raw: (header_bytes(raw) + len(raw)) // 2), FITS),
    "cut by one byte": (cut_to(lambda raw: len(raw) - 1), FITS),
    "another rank than the config's": (with_header(_halve_rank), FITS),
    "rank over the maximum": (over_rank, FITS),
    "sides swapped": (with_header(_swap_sides), FITS),
    "a module that is not there": (with_header(_rename_module), FITS),
    "an unknown tensor": (with_header(_rename_tensor), FITS),
    "integers": (with_header(_integers), FITS),
    "not a number": (with_value(NAN), FINITE),
    "infinity": (with_value(INFINITY), FINITE),
    "DoRA without magnitudes": (with_config(use_dora=True), FITS),
    "repeated layers": (with_config(layer_replication=[[0, 2]]), CONFIGURED),
    "rank zero": (with_config(r=0), CONFIGURED),
    "a config that names code": (with_config(auto_map={"x": "os.system"}), CONFIGURED),
    "no config but an array": (lambda a: (a / CONFIG).write_text("[]") and None, CONFIGURED),
    "a config nested too deep": (
        lambda a: (a / CONFIG).write_text("[" * 100_000) and None,
        CONFIGURED,
    ),
    "weights as a link": (_link_weights, PATH),
    "weights that are a pipe": (_fifo, PATH),
}
