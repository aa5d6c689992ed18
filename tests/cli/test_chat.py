"""Chats: what is sent for typed lines, and token texts of `generate --logprobs`."""

import json
import os
import pty
import select
import shutil
import subprocess
import sys

import pytest

from loradock.cli.exit_codes import ExitCode
from loradock.messages import requests as rq
from tests.support.parallel.processes import TINY
from tests.support.simulation.command_runs import COMMAND, run
from tests.support.waiting import HANG_S, wait_until

TEMPLATE = "{% for m in messages %}{{ m.role[0] }}:{{ m.content }}|{% endfor %}"


@pytest.fixture
def words(tmp_path):
    (tmp_path / "template.jinja").write_text(TEMPLATE)
    return ("--model", str(TINY / "model"), "--chat-template", str(tmp_path / "template.jinja"))


def sent(controller):
    """Return the adapters and the texts of the prompts; the tiny model has a token per byte."""
    found = controller.requests(rq.Generate)
    return [(one.adapter, bytes(one.prompt).decode()) for one in found]


def test_a_chat_has_a_history_a_system_prompt_and_an_adapter(controller, words):
    typed = "a\n\nb\n/adapter\n/system S\nc\n/clear\nd\n/show\n/unknown\n/quit\ne\n"
    shown = run("chat", "-a", "upper", *words, directory=controller.directory, stdin=typed)
    assert shown.exit_code == 0, shown.output
    assert sent(controller) == [
        ("upper", "u:a|"),
        ("upper", "u:a|a:one|u:b|"),
        (None, "s:S|u:a|a:one|u:b|a:one|u:c|"),
        (None, "s:S|u:d|"),
    ]
    assert "system: S\nuser: d\nassistant: one\n" in shown.stdout
    assert "/adapter [NAME]" in shown.stdout


def test_a_chat_for_programs_prints_a_document_per_answer(controller, words):
    shown = run("chat", "--json", *words, directory=controller.directory, stdin="a\n")
    answer = {"role": "assistant", "content": "one", "adapter": None}
    assert [json.loads(line) for line in shown.stdout.splitlines()] == [answer]


def test_generate_sends_a_message_and_shows_the_texts_of_tokens(controller, words):
    shown = run("generate", "--chat", "a", *words, directory=controller.directory)
    assert shown.exit_code == 0, shown.output
    assert sent(controller) == [(None, "u:a|")]


def test_without_a_template_or_a_model_nothing_is_sent(controller, tmp_path):
    shutil.copytree(TINY / "model", tmp_path / "plain")
    (tmp_path / "plain" / "chat_template.jinja").unlink()
    model = ("--model", str(tmp_path / "plain"))
    for words, reason in ((model, "has no chat template"), ((), "not known on this machine")):
        refused = run("chat", *words, directory=controller.directory, stdin="a\n")
        assert refused.exit_code == ExitCode.NOT_FOUND
        assert reason in refused.stderr
    assert controller.received == []


def test_a_misspelt_adapter_is_refused_before_a_message_is_sent(controller, words):
    for arguments, stdin in ((("-a", "uper"), "a\n"), ((), "/adapter uper\na\n")):
        refused = run("chat", *arguments, *words, directory=controller.directory, stdin=stdin)
        assert refused.exit_code == ExitCode.NOT_FOUND
        assert "uper" in refused.stderr
    assert sent(controller) == []


def test_ctrl_c_at_the_prompt_drops_the_line_and_keeps_the_conversation(controller, words):
    terminal, inner = pty.openpty()
    chat = subprocess.Popen(
        [sys.executable, "-c", f"import os\nos.login_tty(0)\n{COMMAND}", "chat", *words],
        env=os.environ | {"LORADOCK_DIR": str(controller.directory)},
        stdin=inner,
    )
    os.close(inner)
    shown = ""

    def is_shown(text, times=1, within_s=HANG_S):
        nonlocal shown
        while shown.count(text) < times:
            if not select.select([terminal], [], [], within_s)[0]:
                return False
            shown += os.read(terminal, 4096).decode()
        return True

    assert is_shown("> ")
    os.write(terminal, b"a\n")
    assert is_shown("> ", 2)
    # The terminal forgets what is not read yet at a Ctrl-C, and readline then waits for a key.
    os.write(terminal, b"b")
    assert is_shown("> b")
    # A Ctrl-C just before readline waits is not seen before the next; a person types another.
    wait_until(lambda: os.write(terminal, b"\x03") and is_shown("> ", 3, within_s=10))
    os.write(terminal, b"c\n")
    assert is_shown("> ", 4)
    os.write(terminal, b"/quit\n")
    assert chat.wait(HANG_S) == 0
    os.close(terminal)
    assert sent(controller) == [(None, "u:a|"), (None, "u:a|a:one|u:c|")]
