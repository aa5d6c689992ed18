"""Requests that Schemathesis makes from the OpenAPI document: no failures, answers conform.

`make fuzz` installs what it needs in an environment of its own, because the plugin that comes with
it slows every test run down. Otherwise the test is skipped.
"""

import os
import subprocess
from pathlib import Path

import pytest

from tests.support.gateway.served import Served

COMMAND = os.environ.get("SCHEMATHESIS", "")
CHECKS = (
    *("not_a_server_error", "status_code_conformance", "content_type_conformance"),
    "response_schema_conformance",
)


@pytest.mark.skipif(not COMMAND, reason="schemathesis is not installed; see `make fuzz`")
def test_every_answer_conforms_to_the_document(served: Served, tmp_path: Path) -> None:
    options = ["--phases", "coverage,fuzzing", "--max-examples", "3", "--checks", ",".join(CHECKS)]
    # The stream of events has no end.
    options += ["--exclude-path", "/events", "--seed", "1", "--no-color"]
    result = subprocess.run(
        [Path(COMMAND).absolute(), "run", f"{served.url}/openapi.json", *options],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stdout[-5000:]
