"""A wrong value of any option is answered with what is allowed, in words of this program."""

import json
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from loradock.cli.main import app
from loradock.cli.pages.wrong_values import bounds_of, choices_of, rule
from tests.support.simulation.command_runs import run


def _parameters(command: Any, name: str, parent: Any = None) -> Iterator[tuple[Any, Any]]:
    context = command.make_context(name, [], parent=parent, resilient_parsing=True)
    if not hasattr(command, "commands"):
        yield from ((context, one) for one in command.params)
    for each, one in getattr(command, "commands", {}).items():
        yield from _parameters(one, each, context)


def _refusal(context: Any, one: Any, value: Any) -> str:
    with pytest.raises(typer.BadParameter) as caught:
        one.process_value(context, value)
    return str(caught.value.message)


def test_every_number_and_choice_refuses_other_values_in_own_words() -> None:
    kinds = {"choice": 0, "number": 0, "least": 0, "most": 0}
    for context, one in _parameters(typer.main.get_command(app), "loradock"):
        text = rule(one, "no-such-value")
        if not text or getattr(one, "is_flag", False):
            continue
        where = f"{context.command_path} {one.opts[-1]}"
        many = getattr(one, "multiple", False)
        given = _refusal(context, one, ("no-such-value",) if many else "no-such-value")
        assert given == f"'no-such-value' is not allowed; {text}", where
        least, most = bounds_of(one)
        if choices_of(one):
            kinds["choice"] += 1
            assert all(choice in text for choice in choices_of(one)), where
        else:
            kinds["number"] += 1
            assert "number" in text, where
        for name, bound, step in (("least", least, -1), ("most", most, 1)):
            if bound is not None:
                kinds[name] += 1
                wrong = str(bound + step)
                given = _refusal(context, one, (wrong,) if many else wrong)
                assert given.startswith(f"{wrong!r} is not allowed; a ") or most is None, where
                assert f"{bound}" in given, where
    assert min(kinds.values()) >= 5, kinds


@pytest.mark.parametrize(
    ("words", "text"),
    [
        ("serve --slots many", "'many' is not allowed; a whole number of at least 1 is needed"),
        ("serve --sync often", "it is one of group, always, interval, never"),
        ("serve --request-timeout 0", "a number of seconds from 0.001 to 3600 is needed"),
        ("serve --host-bytes 64M", "'64M' has the unit 'M'; use KiB"),
        ("generate p --stop-token-id 4 --stop-token-id k", "'k' is not allowed; a whole number"),
        ("load", "Missing argument 'ADAPTER'"),
        ("load a --no-such-option", "No such option"),
        ("keys new", "Missing argument"),
    ],
)
def test_a_usage_error_has_the_format_of_the_command(words: str, text: str) -> None:
    person = run(*words.split())
    assert person.exit_code == 2
    assert text in " ".join(person.stderr.split())
    program = run(*words.split(), "--json")
    assert (program.exit_code, program.stdout) == (2, "")
    error = json.loads(program.stderr)["error"]
    assert text in error["message"]
    assert error["exit"] == 2
    assert "--help` lists what is allowed" in error["hint"]


def test_a_file_refuses_wrong_values_in_the_same_words(tmp_path: Any) -> None:
    for content, text in {
        'slots = "many"': "'many' is not allowed; a whole number of at least 1 is needed",
        "slots = 2.5": "2.5 is not allowed; a whole number",
        'checked = "maybe"': "'maybe' is not allowed; true or false is needed",
    }.items():
        file = tmp_path / "serve.toml"
        file.write_text(content)
        result = run("serve", "--config", str(file))
        assert result.exit_code == 2, result.output
        assert text in " ".join(result.stderr.split()), result.stderr
