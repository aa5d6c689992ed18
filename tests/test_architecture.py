"""Every file keeps to its place, and each check is known to fail on a small wrong file."""

import pytest

from tests.architecture_rules import (
    ALL,
    PROGRAM,
    SHIPPED,
    climbs,
    cycles,
    impurities,
    read_sources,
    source,
    too_long,
    ways_to_run_code,
    without_docstring,
    wrong_imports,
)


def test_every_file_imports_only_what_its_place_allows() -> None:
    files = read_sources(PROGRAM)
    assert len(files) > 20
    assert wrong_imports(files) == []


def test_no_module_imports_itself_in_the_end() -> None:
    assert cycles(read_sources(PROGRAM)) == []


def test_the_engine_has_floors_and_nothing_climbs() -> None:
    assert climbs(read_sources(PROGRAM)) == []


def test_nothing_shipped_runs_code_that_it_reads() -> None:
    assert ways_to_run_code(read_sources(SHIPPED)) == []


def test_the_core_asks_nobody() -> None:
    assert impurities(read_sources(PROGRAM)) == []


def test_every_module_says_what_it_is() -> None:
    assert without_docstring(read_sources(ALL)) == []


def test_nothing_is_longer_than_the_house_allows() -> None:
    assert too_long(read_sources(ALL)) == []


WRONG_IMPORTS = [
    ("messages/x.py", "import zmq"),
    ("messages/x.py", "from controller.world import World"),
    *(("controller/x.py", f"import {name}") for name in ("zmq", "os", "io", "time", "random")),
    *(("controller/x.py", f"import {name}") for name in ("socket", "threading", "datetime")),
    *(
        ("controller/x.py", f"import {name}")
        for name in ("structlog", "pathlib", "asyncio", "torch")
    ),
    ("controller/x.py", "from transitions import Machine"),
    ("controller/x.py", "from controller.shell.log import Log"),
    ("controller/x.py", "from controller.cli import main"),
    ("controller/x.py", "from controller.client import Client"),
    ("controller/x.py", "def f():\n    import time"),
    ("controller/x.py", "import collections, time"),
    ("controller/x.py", "from .shell import log"),
    ("controller/states/x.py", "from controller.world import World"),
    ("controller/states/x.py", "import time"),
    ("controller/policies/x.py", "import random"),
    ("controller/policies/x.py", "from ..shell import log"),
    ("controller/client.py", "from controller.world import World"),
    ("controller/client/async_client.py", "import structlog"),
    ("controller/shell/server.py", "import zmq.asyncio"),
    ("controller/shell/server.py", "from controller.cli.main import app"),
    ("controller/shell/transport.py", "from controller.cli.main import app"),
    ("controller/shell/server.py", "import torch"),
    ("controller/cli/main.py", "import zmq"),
    ("controller/cli/main.py", "from engine.worker import main"),
    ("engine/x.py", "import zmq"),
    ("engine/x.py", "import triton"),
    ("engine/x.py", "from controller.core import Controller"),
    ("engine/x.py", "import peft"),
    ("engine/x.py", "from tensorizer import TensorDeserializer"),
    ("engine/manager/model_manager.py", "from controller.shell.log import Log"),
    ("engine/manager/model_manager.py", "import controller.client"),
    ("engine/manager/model_manager.py", "import zmq"),
    ("engine/worker/worker.py", "from controller.core import Controller"),
    ("engine/manager/worker_manager.py", "from controller.core import Controller"),
    ("engine/manager.py", "from controller.core import Controller"),
    ("engine/layers/x.py", "from messages.ids import Slot"),
    ("engine/layers/x.py", "import triton.language as tl"),
    ("engine/kernels/x.py", "import messages"),
    ("engine/punica/wrapper.py", "from messages import ids"),
]


@pytest.mark.parametrize(("path", "text"), WRONG_IMPORTS)
def test_a_wrong_import_is_seen(path: str, text: str) -> None:
    assert len(wrong_imports([source(path, text)])) == 1


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ("controller/x.py", "from collections import abc\nfrom messages.ids import Seq"),
        ("controller/shell/transport.py", "import zmq, os"),
        ("controller/client.py", "import time, zmq.asyncio\nfrom controller import client_calls"),
        ("engine/manager/model_manager.py", "from controller.core import Controller"),
        ("engine/kernels/x.py", "import triton.language as tl"),
        ("messages/x.py", "from . import ids"),
    ],
)
def test_a_right_import_is_let_pass(path: str, text: str) -> None:
    known = [source("controller/client/calls.py", ""), source("messages/ids.py", "")]
    assert wrong_imports([source(path, text), *known]) == []


def test_a_file_without_a_place_is_seen() -> None:
    with pytest.raises(AssertionError, match="no line in AREAS"):
        wrong_imports([source("helpers/x.py", "")])


def test_a_climb_through_a_module_between_and_a_cycle_are_seen() -> None:
    files = [
        source("engine/kernels/x.py", "from engine import helper"),
        source("engine/helper.py", "def f():\n    from engine.layers.base import Layer"),
        source("engine/layers/base.py", "import engine.kernels.x"),
        source("engine/models/causal_model.py", "import engine.layers.base"),
    ]
    assert climbs(files) == ["engine.kernels.x reaches engine.layers.base, a floor above it"]
    assert cycles(files) == ["engine.helper", "engine.kernels.x", "engine.layers.base"]


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
    assert ways_to_run_code([source("engine/adapters/files/torch_pickle.py", right)]) == []
    for path, text in (
        ("engine/adapters/reader.py", right),
        ("engine/adapters/files/torch_pickle.py", "torch.load(f)"),
        ("engine/adapters/files/torch_pickle.py", "torch.load(f, weights_only=allowed)"),
        ("engine/adapters/files/torch_pickle.py", "from torch import load"),
    ):
        assert len(ways_to_run_code([source(path, text)])) == 1


def test_an_impure_call_in_the_core_is_seen() -> None:
    assert len(impurities([source("controller/x.py", "open('f')\nid(x)")])) == 2
    assert impurities([source("controller/shell/x.py", "open('f')")]) == []


def test_what_is_too_long_or_says_nothing_is_seen() -> None:
    function = "def f():\n" + "    x = 1\n" * 69
    assert too_long([source("a.py", function)]) == []
    assert len(too_long([source("a.py", function + "    x = 1\n")])) == 1
    assert too_long([source("a.py", "@triton.jit\n" + function + "    x = 1\n" * 30)]) == []
    assert len(too_long([source("a.py", "@triton.jit\n" + function + "    x = 1\n" * 31)])) == 1
    assert len(too_long([source("a.py", "x = 1\n" * 401)])) == 1
    assert without_docstring([source("a.py", "x = 1"), source("b.py", '"""Says."""')]) == ["a.py"]
