"""A start with another model or less room than before is a question, and not silent."""

from pathlib import Path

import pytest

from loradock.cli.exit_codes import ExitCode
from loradock.cli.last_run import (
    changes,
    read_last_run,
    run_of,
    write_last_run,
)
from loradock.cli.serve import supervisor
from loradock.cli.serve.supervisor import Ended
from loradock.controller.core.limits import Limits
from tests.support.parallel.processes import TINY
from tests.support.plain_logs import reset_logs
from tests.support.simulation.command_runs import run


def test_only_what_evicts_or_excludes_adapters_is_a_change(tmp_path: Path) -> None:
    before = run_of("/m", Limits())
    assert read_last_run(tmp_path) is None
    write_last_run(tmp_path, before)
    assert read_last_run(tmp_path) == before
    assert changes(None, before) == []
    assert changes(before, before) == []
    assert changes(before, run_of("/m", Limits(max_loras=9, retry_backoff_ms=1))) == []
    assert changes(before, run_of("", Limits())) == []
    assert changes(before, run_of("/n", Limits(max_loras=2, host_bytes_max=1 << 30))) == [
        "the model is /n instead of /m",
        "--max-loras is 2 instead of 8",
        "--host-bytes is 1 GiB instead of 4 GiB",
    ]


def test_a_changed_start_needs_an_option(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    started: list[int] = []

    def serve(config):
        started.append(config.server.limits.max_loras)
        return Ended(0)

    monkeypatch.setattr(supervisor, "serve", serve)
    words = ["serve", "--model", str(TINY / "model")]
    try:
        assert run(*words, directory=tmp_path).exit_code == 0
        refused = run(*words, "--max-loras", "2", directory=tmp_path)
        assert refused.exit_code == ExitCode.REFUSED
        line, hint = refused.stderr.splitlines()
        assert line.endswith("was served differently before: --max-loras is 2 instead of 8")
        assert "--accept-changes" in hint
        accepted = run(*words, "--max-loras", "2", "--accept-changes", directory=tmp_path)
        assert accepted.exit_code == 0
        assert run(*words, "--max-loras", "2", directory=tmp_path).exit_code == 0
    finally:
        reset_logs()
    assert started == [8, 2, 2]
