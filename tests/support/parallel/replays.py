"""Checks of a real server's log after disturbances."""

import os
import subprocess
import sys
from pathlib import Path

from loradock.controller.log.replay import replay
from loradock.controller.log.segments import verify
from loradock.messages.requests import StatusShown
from tests.support.sources import ROOT


def assert_replays_equal(directory: Path, status: StatusShown) -> None:
    """Check that replays from the first record and from a snapshot lead to the status' digest."""
    verdict = verify(directory / "log")
    assert verdict.corruption is None
    # After the newest snapshot there may be no recorded digest to compare with.
    result = replay(directory / "log", until=status.seq, from_start=True)
    assert result.divergence is None
    assert result.digests_compared > 0
    assert result.digest == status.digest
    assert _replay_elsewhere(directory, status.seq) == status.digest


def _replay_elsewhere(directory: Path, until: int) -> str:
    """Return what another process with another hash seed computes from the newest snapshot."""
    code = (
        "import sys; from pathlib import Path; from loradock.controller.log.replay import replay; "
        "print(replay(Path(sys.argv[1]), int(sys.argv[2])).digest)"
    )
    environment = os.environ | {"PYTHONHASHSEED": "4711"}
    done = subprocess.run(
        [sys.executable, "-c", code, str(directory / "log"), str(until)],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.strip()
