"""Logs on stderr show a traceback and never the values that were in its frames."""

import pytest
import structlog

from controller.shell import stderr_logging
from engine.worker import process
from tests.support.plain_logs import reset_logs


@pytest.mark.parametrize("configure", [stderr_logging.configure, process._log_to_stderr])
def test_a_logged_error_shows_no_local_variables(configure, capsys: pytest.CaptureFixture) -> None:
    configure()
    try:
        prompt = "a secret of a client"
        try:
            raise ValueError(f"{len(prompt)} characters")
        except ValueError:
            structlog.get_logger().exception("it failed")
    finally:
        reset_logs()
    shown = capsys.readouterr().err
    assert "it failed" in shown
    assert "Traceback" in shown
    assert "ValueError: 20 characters" in shown
    assert "a secret" not in shown
    assert "\x1b" not in shown, "no colours where stderr is not a terminal"
