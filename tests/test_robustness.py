"""Tests of the tests: none of them fails on a slow machine."""

import ast
from collections.abc import Iterator
from typing import Final

import pytest
from hypothesis import HealthCheck, settings

from tests.support.sources import Source, read_sources, source

CLOCKS: Final = frozenset(
    {"monotonic", "monotonic_ns", "perf_counter", "perf_counter_ns", "process_time"}
)

CLOCK_USERS: Final = frozenset(
    {
        # The bound on a run that hangs.
        "tests/support/waiting.py",
        # The clocks of a simulated machine.
        "tests/support/campaign/machine.py",
        # Stand-ins send beats at intervals.
        "tests/support/simulation/shell_examples.py",
        "tests/support/simulation/standin_controller.py",
    }
)


def clock_calls(file: Source) -> Iterator[str]:
    """Return a finding for every clock that a test reads: its result could depend on speed."""
    for node in file.nodes:
        name = getattr(node, "attr", None) or getattr(node, "id", None)
        if name in CLOCKS and file.path not in CLOCK_USERS:
            yield file.at(node, f"reads {name}; wait with tests.support.waiting instead")


def timed_settings(file: Source) -> Iterator[str]:
    """Return a finding for every `settings(...)` that could fail a test for its duration."""
    for node in file.nodes:
        if not (isinstance(node, ast.Call) and getattr(node.func, "id", "") == "settings"):
            continue
        for keyword in node.keywords:
            text = ast.unparse(keyword.value)
            if keyword.arg == "deadline":
                yield file.at(node, "sets a deadline; tests/conftest.py has the one for all")
            suppresses = keyword.arg == "suppress_health_check"
            if suppresses and not ("too_slow" in text or text == "list(HealthCheck)"):
                yield file.at(node, "suppresses health checks without too_slow")


def test_no_result_depends_on_a_clock() -> None:
    files = read_sources(("tests",))
    assert [line for file in files for line in (*clock_calls(file), *timed_settings(file))] == []


def test_the_profile_has_no_time_limit() -> None:
    assert settings.default.deadline is None
    assert HealthCheck.too_slow in settings.default.suppress_health_check
    assert settings.default.print_blob


@pytest.mark.parametrize(
    ("text", "finding"),
    [
        ("assert time.perf_counter() - start < 2", "reads perf_counter"),
        ("from time import monotonic\nend = monotonic() + 60", "reads monotonic"),
        ("@settings(max_examples=3, deadline=200)\ndef test(): ...", "sets a deadline"),
        ("settings(suppress_health_check=[HealthCheck.data_too_large])", "without too_slow"),
    ],
)
def test_each_rule_finds_a_violation(text: str, finding: str) -> None:
    file = source("tests/test_example.py", text)
    [line] = [*clock_calls(file), *timed_settings(file)]
    assert finding in line
