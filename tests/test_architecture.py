"""Every module is in one room and imports only what the room may; each rule fails on a sample."""

import re

import pytest

from tests.architecture_rules import (
    BEGIN,
    END,
    PLACES,
    ROOMS,
    Room,
    allowed_graph,
    cycle_of,
    drawing,
    graph_of,
    room_graph,
    rooms_of,
    with_drawing,
    wrong_imports,
)
from tests.support.sources import LINKED, PROGRAM, ROOT, read_sources, source

LIBRARIES = {library for room in ROOMS for library in room.libraries} | {*PLACES, "numpy", "peft"}
OUTSIDE = ("tests.supported", "benchmarks.run", "examples.demo")
IMPURE = ("os", "io", "time", "random", "socket", "threading", "datetime", "pathlib", "asyncio")


def a_module_of(room: Room) -> str:
    """A module that the room claims and that no room names one by one."""
    name = room.modules[-1]
    return name.replace("*", "sample")


def a_path_of(room: Room) -> str:
    """The path of such a module."""
    name = a_module_of(room)
    is_package = name in room.modules and room.name != "processes.__main__"
    return path_of(f"{name}.__init__" if is_package else name)


def path_of(module: str) -> str:
    """The path of a module that the table names."""
    is_linked = module.partition(".")[0] in LINKED
    is_root = module.startswith("loradock.")
    return f"{'' if is_linked or is_root else 'loradock/'}{module.replace('.', '/')}.py"


def full_name(module: str) -> str:
    """The name by which a module that the table names is imported."""
    return module if module.partition(".")[0] == "loradock" else f"loradock.{module}"


def test_every_module_is_in_one_room_and_imports_what_the_room_may() -> None:
    files = read_sources(PROGRAM)
    assert len(files) > 20
    assert wrong_imports(files) == []


def test_no_module_and_no_room_imports_itself_in_the_end() -> None:
    files = read_sources(PROGRAM)
    assert cycle_of(graph_of(files)) == []
    assert cycle_of(room_graph(files)) == []
    assert cycle_of(allowed_graph()) == []


@pytest.mark.parametrize(
    ("document", "lines_max"),
    [
        ("README.md", 120),
        *((path, None) for path in ("ARCHITECTURE.md", "CONTRIBUTING.md", "benchmarks/README.md")),
        ("docs/guarantees.md", None),
    ],
)
def test_a_document_is_short_and_names_files_that_exist(
    document: str, lines_max: int | None
) -> None:
    text = (ROOT / document).read_text()
    # Generated diagrams are not read line by line.
    prose = re.sub(r"```mermaid.*?```", "", text, flags=re.S)
    assert lines_max is None or prose.count("\n") <= lines_max
    paths = re.findall(r"`((?:\w+/)+(?:\w+\.\w+)?)`", text)
    assert [path for path in paths if not (ROOT / path).exists()] == []


def test_the_drawing_of_the_rooms_is_up_to_date() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text()
    assert with_drawing(text, room_graph(read_sources(PROGRAM))) == text, "run `make diagrams`"


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_imports_from_the_rooms_that_it_may_and_from_no_other(room: Room) -> None:
    for other in ROOMS:
        text = f"from {full_name(a_module_of(other))} import thing"
        is_allowed = other == room or other.name in room.may
        assert len(wrong_imports([source(a_path_of(room), text)])) == (not is_allowed), text


@pytest.mark.parametrize("room", ROOMS, ids=lambda room: room.name)
def test_a_room_imports_the_libraries_that_it_may_and_no_other(room: Room) -> None:
    for library in LIBRARIES:
        text = f"def f():\n    import {library}.part"
        is_allowed = library in room.libraries
        assert len(wrong_imports([source(a_path_of(room), text)])) == (not is_allowed), text
    for module in OUTSIDE:
        assert len(wrong_imports([source(a_path_of(room), f"import {module}")])) == 1
    for module in IMPURE:
        is_refused = len(wrong_imports([source(a_path_of(room), f"import {module}")])) == 1
        assert is_refused == (room.name in ("controller.core", "controller.states"))


def test_a_single_module_of_a_room_may_be_allowed_alone() -> None:
    for room in ROOMS:
        for module in set(room.may) - {other.name for other in ROOMS}:
            sibling = f"{module.rpartition('.')[0]}.sample"
            right, wrong = (f"import {full_name(name)}" for name in (module, sibling))
            assert wrong_imports([source(a_path_of(room), right)]) == []
            assert len(wrong_imports([source(a_path_of(room), wrong)])) == 1


@pytest.mark.parametrize(
    ("library", "module"), [(name, module) for name, all_ in PLACES.items() for module in all_]
)
def test_a_library_may_belong_to_single_modules(library: str, module: str) -> None:
    path = path_of(module)
    assert wrong_imports([source(path, f"import {library}")]) == []
    assert [room.name for room in rooms_of(module)] == [module.rpartition(".")[0]]
    assert (ROOT / path).exists()


def test_relative_imports_are_followed() -> None:
    right = source("controller/core/x.py", "from . import world\nfrom .world import World")
    wrong = source("controller/core/y.py", "from ..shell import server")
    known = [source("controller/core/world.py", ""), source("controller/server/server.py", "")]
    assert len(wrong_imports([right, wrong, *known])) == 1


@pytest.mark.parametrize("path", ["helpers/x.py", "engine/new/x.py", "controller/x/y/z.py"])
def test_a_file_without_a_room_is_seen(path: str) -> None:
    assert len(wrong_imports([source(path, "")])) == 1
    importing = source("engine/worker/x.py", "import loradock.engine.new.x")
    assert len(wrong_imports([importing])) == 1


def test_cycles_of_modules_and_of_rooms_are_seen() -> None:
    files = [
        source("engine/kernels/x.py", "from loradock.engine import helper"),
        source("engine/helper.py", "def f():\n    from loradock.engine.layers.base import Layer"),
        source("engine/layers/base.py", "import loradock.engine.kernels.x"),
    ]
    modules = {"engine.kernels.x", "engine.helper", "engine.layers.base"}
    assert set(cycle_of(graph_of(files))) == {full_name(module) for module in modules}
    assert set(cycle_of(room_graph(files))) == {"engine.kernels", "engine", "engine.layers"}
    assert cycle_of(graph_of(files[:2])) == []


def test_the_drawing_shows_each_import_that_no_longer_path_implies() -> None:
    graph = {"a": {"b.x", "c"}, "b.x": {"c"}, "c": set()}
    lines = [line.strip() for line in drawing(graph).splitlines()]
    assert lines[2:-1] == ['a["a"] --> b_x', 'b_x["b.x"] --> c', 'c["c"]']
    stale = f"before\n{BEGIN}\nold\n{END}\nafter\n"
    fresh = with_drawing(stale, graph)
    assert fresh == f"before\n{BEGIN}\n{drawing(graph)}\n{END}\nafter\n"
    with pytest.raises(ValueError, match="marks"):
        with_drawing("no marks", graph)
