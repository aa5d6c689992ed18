"""The stderr of children in JSON: every line is one object, from every process."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.cli.exit_codes import ExitCode
from loradock.cli.serve.children import ChildOutput, is_json
from loradock.client import Client
from loradock.controller.server.config import ServerConfig
from loradock.processes import process_log
from tests.messages.test_process_log import full_pipe
from tests.support.engine.serve_process import serve, status_once
from tests.support.parallel.processes import ROOT
from tests.support.plain_logs import reset_logs
from tests.support.waiting import HANG_S, wait_until


def objects(text: str) -> list[dict[str, object]]:
    """Return the objects of the lines; fails for a line that is none."""
    found = [msgspec.json.decode(line) for line in text.splitlines()]
    assert all(isinstance(one, dict) for one in found)
    return found


def test_lines_that_are_not_json_become_events(capfd: pytest.CaptureFixture[str]) -> None:
    process_log.configure("json", "serve")
    try:
        output = ChildOutput("engine")
        written = b'{"event": "ours"}\nWarning: a library\n[1]\n\n\xff\xfe\n' + b"x" * 300_000
        for start in range(0, len(written), 50_000):
            os.write(output.write_fd, written[start : start + 50_000])
        output.close()
        output.join(HANG_S)
        process_log.flush(HANG_S)
    finally:
        reset_logs()
    found = objects(capfd.readouterr().err)
    assert found[0] == {"event": "ours"}
    texts = [one["event"] for one in found[1:]]
    assert texts[:3] == ["Warning: a library", "[1]", "\\xff\\xfe"]
    assert {*"".join(map(str, texts[3:]))} == {"x"}
    assert {one.get("child") for one in found[1:]} == {"engine"}


@given(st.binary(max_size=50))
def test_only_an_object_counts_as_a_line_in_json(data: bytes) -> None:
    if is_json(data):
        assert isinstance(msgspec.json.decode(data), dict)


def test_all_processes_log_in_one_format(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    with serve(directory, "--log-format", "json") as process:
        status_once(directory, lambda status: bool(status.engine_id))
        # Its last words are not its own: the supervisor forwards them.
        os.kill(status_once(directory, lambda s: bool(s.engine_id)).engine_pid, signal.SIGKILL)
        wait_until(lambda: "child ended" in directory.with_suffix(".log").read_text())
        process.terminate()
        assert process.wait(HANG_S) == 0
    found = objects(directory.with_suffix(".log").read_text())
    assert {"serve", "controller", "engine"} <= {str(one.get("logger")) for one in found}
    assert {"event", "level", "timestamp", "logger"} <= set.intersection(*map(set, found))


def test_an_end_with_an_error_is_one_format_too(tmp_path: Path) -> None:
    with serve(tmp_path / "d", "--log-format", "json", model=Path("/nowhere")) as process:
        assert process.wait(HANG_S) == ExitCode.USAGE
    *_, last = objects((tmp_path / "d.log").read_text())
    assert "--model /nowhere is not a directory" in str(last["error"])


def test_a_blocked_stderr_does_not_block_the_controller(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    reader, writer, _ = full_pipe()
    config = msgspec.json.encode(ServerConfig(str(directory))).decode()
    command = [sys.executable, "-m", "loradock.controller.server.process", config]
    process = subprocess.Popen(command, cwd=ROOT, stderr=writer)
    os.close(writer)
    try:
        with Client(directory, timeout_s=HANG_S) as client:
            before = client.status().seq
            for number in range(20):
                client.status()
                # Each start of an engine that never attaches, and each request, may log.
                with pytest.raises(Exception, match="L006"):
                    client.release(f"nobody-{number}")
            with pytest.raises(Exception, match="L011"):
                client.load("nobody", timeout_s=0.1)
            assert client.status().seq > before
        process.terminate()
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
