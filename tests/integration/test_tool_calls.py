"""Calls of tools by a trained adapter and a real engine, used through the `openai` client."""

import os
import subprocess
import sys

import pytest

from tests.support.engine.serve_process import serve, wait_for_gateway
from tests.support.parallel.processes import ROOT, TINY

PROGRAM = ROOT / "tests" / "clients" / "programs" / "openai_tools.py"
TOOLS = TINY / "tools"
KEY = "secret"
OPTIONS = (
    *("--http", "127.0.0.1:0", "--api-key", KEY, "--adapter-root", str(TOOLS)),
    *("--lora-modules", "caller=caller", "--max-lora-rank", "8", "--max-loras", "1"),
    *("--chat-template", str(TOOLS / "chat_template.jinja")),
)


def test_an_adapter_calls_tools_in_chats_and_responses(tmp_path):
    pytest.importorskip("llguidance")
    directory = tmp_path / "d"
    with serve(directory, *OPTIONS):
        url = wait_for_gateway(directory)
        result = subprocess.run(
            [sys.executable, PROGRAM],
            env=os.environ | {"TOOLS_BASE_URL": f"{url}v1", "API_KEY": KEY},
            capture_output=True,
            text=True,
            check=False,
        )
    assert result.returncode == 0, result.stderr[-3000:]
