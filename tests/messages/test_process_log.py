"""Logs on stderr: no line waits for a reader, every line has the format, no value is shown."""

import contextlib
import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest
import structlog
from hypothesis import given
from hypothesis import strategies as st

from loradock.processes import process_log
from loradock.processes.process_log import LineWriter
from tests.support.plain_logs import reset_logs
from tests.support.waiting import HANG_S

ROOT = Path(__file__).parents[2]
F_SETPIPE_SZ = 1031


@pytest.fixture(autouse=True)
def _logs_as_before() -> Iterator[None]:
    yield
    reset_logs()


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_a_logged_error_shows_no_local_variables(
    log_format: str, capfd: pytest.CaptureFixture[str]
) -> None:
    process_log.configure(log_format)
    prompt = "a secret of a client"
    try:
        raise ValueError(f"{len(prompt)} characters")
    except ValueError:
        structlog.get_logger().exception("it failed")
    process_log.flush()
    shown = capfd.readouterr().err
    assert "it failed" in shown
    assert "Traceback" in shown
    assert "ValueError: 20 characters" in shown
    assert "a secret" not in shown
    assert "\x1b" not in shown, "no colours where stderr is not a terminal"


class Unprintable:
    def __repr__(self) -> str:
        return "line\nbreak"


VALUES = st.one_of(
    *(st.text(), st.binary(), st.integers(), st.floats(), st.none(), st.booleans()),
    *(st.lists(st.text()), st.dictionaries(st.text(), st.integers()), st.just(Unprintable())),
    *(st.just("\ud800"), st.just({(1, 2): 3}), st.just(2**80), st.just(Path("x"))),
)
NAMES = st.text("abcdefgh", min_size=1).filter(lambda name: name != "event")


@given(st.text(), st.dictionaries(NAMES, VALUES))
def test_every_line_in_json_is_one_object(event: str, values: dict[str, object]) -> None:
    lines: list[str] = []
    process_log.configure("json")
    structlog.configure(logger_factory=lambda *_: Collected(lines))
    structlog.get_logger("here").warning(event, **values)
    (line,) = lines
    assert "\n" not in line
    found = msgspec.json.decode(line)
    assert (found["event"], found["level"], found["logger"]) == (event, "warning", "here")
    assert found["timestamp"].endswith("Z")


class Collected:
    name = "here"

    def __init__(self, lines: list[str]) -> None:
        self.warning = lines.append


def full_pipe() -> tuple[int, int, int]:
    """Return both ends of a pipe without room for one more byte, and how many bytes it holds."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, F_SETPIPE_SZ, 4096)
    os.set_blocking(writer, False)
    size = 0
    # A write of up to a page is done wholly or not at all, so what is left is filled in bytes.
    for part in (b"x" * 4096, b"x"):
        with contextlib.suppress(BlockingIOError):
            while True:
                size += os.write(writer, part)
    os.set_blocking(writer, True)
    return reader, writer, size


def read_exactly(fd: int, size: int) -> bytes:
    """Read `size` bytes from a pipe."""
    found = b""
    while len(found) < size:
        found += os.read(fd, size - len(found))
    return found


def test_a_full_pipe_blocks_no_writer_and_dropped_lines_are_reported() -> None:
    reader, writer, size = full_pipe()
    lines = LineWriter(writer, lambda count: f"{count} dropped", bytes_max=1000)
    for number in range(1000):
        lines.write(f"line {number:04}")
    assert lines.dropped == 900
    assert not lines.flush(0.0)
    read_exactly(reader, size)
    assert lines.flush(HANG_S)
    lines.write("the end")
    assert lines.flush(HANG_S)
    expected = [*(f"line {number:04}" for number in range(100)), "900 dropped", "the end"]
    text = "".join(line + "\n" for line in expected)
    assert read_exactly(reader, len(text)).decode() == text


def test_a_closed_pipe_loses_lines_and_nothing_else() -> None:
    reader, writer = os.pipe()
    lines = LineWriter(writer, str)
    os.close(reader)
    for _ in range(3):
        lines.write("x")
    assert lines.flush(HANG_S)


PROGRAM = """
import sys, threading
import structlog
from loradock.processes import process_log
process_log.configure("json", "program")
structlog.get_logger().info("first")
thread = threading.Thread(target=lambda: 1 / 0)
thread.start()
thread.join()
raise ValueError("the last words")
"""


def test_uncaught_exceptions_are_lines_too() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=ROOT,
        capture_output=True,
        timeout=HANG_S,
        check=False,
    )
    assert ended.returncode == 1
    first, of_thread, last = map(json.loads, ended.stderr.splitlines())
    assert (first["event"], first["logger"]) == ("first", "program")
    assert "ZeroDivisionError" in of_thread["exception"]
    assert (last["level"], "the last words" in last["exception"]) == ("critical", True)


BLOCKED = """
import os, structlog
from loradock.processes import process_log
process_log.configure("console")
for number in range(20_000):
    structlog.get_logger().info("line", number=number)
os.write(1, b"done")
"""


def test_a_process_with_a_blocked_stderr_goes_on_and_ends() -> None:
    reader, writer, _ = full_pipe()
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=writer,
        timeout=HANG_S,
        check=True,
    )
    assert ended.stdout == b"done"
    os.close(writer)
    os.close(reader)


def test_an_unknown_format_is_refused() -> None:
    with pytest.raises(ValueError, match="console and json"):
        process_log.configure("xml")


def test_a_line_that_another_process_rendered_is_passed_on(
    capfd: pytest.CaptureFixture[str],
) -> None:
    process_log.configure("json")
    process_log.write_line('{"event": "elsewhere"}')
    process_log.flush()
    assert '{"event": "elsewhere"}\n' in capfd.readouterr().err


def test_a_level_excludes_less_important_lines(capfd: pytest.CaptureFixture[str]) -> None:
    try:
        process_log.configure("json", "test", "warning")
        structlog.get_logger().info("not written")
        structlog.get_logger().warning("written")
        process_log.flush()
    finally:
        reset_logs()
    assert '"written"' in capfd.readouterr().err
