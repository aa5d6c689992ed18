"""No code runs what it reads, the core is pure, and no function is too long."""

import pytest

from tests.code_rules import (
    impurities,
    too_long,
    wall_clock_reads,
    ways_to_run_code,
    without_docstring,
)
from tests.support.sources import ALL, PROGRAM, SHIPPED, read_sources, source


def test_nothing_shipped_runs_code_that_it_reads() -> None:
    assert ways_to_run_code(read_sources(SHIPPED)) == []


def test_the_core_is_pure() -> None:
    assert impurities(read_sources(PROGRAM)) == []


def test_nothing_waits_on_the_wall_clock() -> None:
    assert wall_clock_reads(read_sources(PROGRAM)) == []


def test_every_module_has_a_docstring() -> None:
    assert without_docstring(read_sources(ALL)) == []


def test_no_function_is_too_long() -> None:
    assert too_long(read_sources(ALL)) == []


@pytest.mark.parametrize(
    "text",
    [
        *("import pickle", "from pickle import loads", "import yaml.cyaml", "import marshal as m"),
        *("import importlib", "from importlib import reload", "import multiprocessing.pool"),
        *(
            "import importlib.util",
            "from torch import load",
            "import shelve",
            "from os import system as s",
        ),
        *("eval('1')", "exec('x')", "compile('1', '', 'eval')", "__import__('os')", "run = eval"),
        *("torch.load(f)", "torch.load(f, weights_only=False)", "torch.load(f, weights_only=w)"),
        *("torch.save(t, f)", "subprocess.run('x', shell=True)", "subprocess.run('x', shell=s)"),
        *("os.system('x')", "os.popen('x')", "importer.import_module('x')", "socket.recv_pyobj()"),
        *("dist.broadcast_object_list(x)", "load(x, trust_remote_code=True)"),
        "numpy.load(x, allow_pickle=True)",
    ],
)
def test_a_way_to_run_code_is_seen(text: str) -> None:
    assert len(ways_to_run_code([source("engine/x.py", text)])) == 1


def test_what_only_looks_like_running_code_is_let_pass() -> None:
    harmless = ("re.compile('x')", "model.eval()", "platform.system()", "run(x, shell=False)")
    for text in harmless:
        assert ways_to_run_code([source("engine/x.py", text)]) == []


def test_pickles_are_loaded_in_one_place_and_as_tensors_only() -> None:
    right = "torch.load(f, weights_only=True)"
    assert ways_to_run_code([source("engine/adapters/other_formats.py", right)]) == []
    for path, text in (
        ("engine/adapters/reader.py", right),
        ("engine/adapters/other_formats.py", "torch.load(f)"),
        ("engine/adapters/other_formats.py", "torch.load(f, weights_only=allowed)"),
        ("engine/adapters/other_formats.py", "from torch import load"),
    ):
        assert len(ways_to_run_code([source(path, text)])) == 1


def test_plugins_are_loaded_in_one_place() -> None:
    text = "from importlib.metadata import entry_points"
    assert ways_to_run_code([source("loradock/gateway/adapters/sources.py", text)]) == []
    for path, other in (
        ("loradock/gateway/adapters/models.py", text),
        ("loradock/gateway/adapters/sources.py", "from importlib import import_module"),
    ):
        assert len(ways_to_run_code([source(path, other)])) >= 1


def test_an_impure_call_in_the_core_is_seen() -> None:
    assert len(impurities([source("controller/core/x.py", "open('f')\nid(x)")])) == 2
    assert impurities([source("controller/server/x.py", "open('f')")]) == []


def test_a_reading_of_the_wall_clock_is_seen() -> None:
    for text in (
        *("until = time.time() + 1", "time.time_ns()", "from time import monotonic, time_ns"),
        *("datetime.now(UTC)", "datetime.datetime.utcnow()", "clock = time.time"),
        "time.clock_gettime_ns(time.CLOCK_REALTIME)",
    ):
        assert len(wall_clock_reads([source("controller/server/server.py", text)])) == 1
        assert wall_clock_reads([source("controller/server/inputs.py", text)]) == []
    harmless = ("time.monotonic()", "from time import sleep", "clock.time_ns", "loop.time()")
    assert wall_clock_reads([source("controller/x.py", text) for text in harmless]) == []


def test_long_code_and_missing_docstrings_are_seen() -> None:
    function = "def f():\n" + "    x = 1\n" * 69
    assert too_long([source("a.py", function)]) == []
    assert len(too_long([source("a.py", function + "    x = 1\n")])) == 1
    assert too_long([source("a.py", "@triton.jit\n" + function + "    x = 1\n" * 30)]) == []
    assert len(too_long([source("a.py", "@triton.jit\n" + function + "    x = 1\n" * 31)])) == 1
    assert without_docstring([source("a.py", "x = 1"), source("b.py", '"""Named."""')]) == ["a.py"]
