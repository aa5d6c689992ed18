"""The rooms of the program and what each one may import.

`python -m tests.architecture_rules ARCHITECTURE.md` draws the imports between rooms into the file.
"""

import sys
from collections.abc import Iterator, Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Final, NamedTuple

from tests.support.documents import between_marks
from tests.support.sources import PROGRAM, Source, imports, read_sources

STDLIB: Final = tuple(sys.stdlib_module_names)
# What a pure room may use of the standard library: no clock, randomness, file, socket or thread.
PURE: Final = (
    *("abc", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "itertools", "math", "operator", "re", "struct", "types", "typing"),
)


class Room(NamedTuple):
    """Modules that belong together, and what they may import.

    Names are those below `loradock`.
    `modules`: names of modules; `package.*` stands for the modules directly in a package.
    `may`: rooms, or single modules of other rooms; a room may always import from itself.
    `libraries`: packages from elsewhere; `stdlib`: the parts of the standard library.
    """

    name: str
    modules: tuple[str, ...]
    may: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ()
    stdlib: tuple[str, ...] = STDLIB


def _package(name: str, may: str = "", libraries: str = "") -> Room:
    """A room that is one package; `may` and `libraries` are names between spaces."""
    return Room(name, (name, f"{name}.*"), tuple(may.split()), tuple(libraries.split()))


ROOMS: Final = (
    _package("messages", libraries="msgspec structlog"),
    # What every process has: its log, its step, its keys and its command line.
    _package("processes", "messages", "msgspec structlog uvloop"),
    # The controller.
    _package("controller"),
    _package("controller.states", "messages", "transitions")._replace(stdlib=PURE),
    _package("controller.core", "messages controller.states", "msgspec xxhash")._replace(
        stdlib=PURE
    ),
    _package("controller.log", "processes messages controller.core", "caio msgspec xxhash"),
    _package(
        "controller.server",
        "processes messages controller.core controller.log",
        "msgspec structlog xxhash",
    ),
    # Many machines: what is in etcd, the picker, and the proxy in front.
    _package(
        "fleet",
        "processes messages client gateway.http",
        "cryptography envoy google grpc httpx msgspec structlog",
    ),
    # Simulations of a log's traffic, and of workloads.
    _package(
        "lab",
        "messages controller.states controller.core controller.log",
        "matplotlib msgspec scipy",
    ),
    _package("client", "processes messages", "msgspec"),
    _package(
        "cli",
        "processes messages controller.core controller.log controller.server "
        "client fleet gateway.address gateway.options gateway.web lab "
        "gateway.inference.chat_template gateway.inference.model_files",
        "msgspec rich structlog typer",
    ),
    _package(
        "cli.serve",
        "processes messages cli client controller.core controller.log controller.server "
        "fleet gateway.address gateway.options",
        "msgspec structlog typer",
    ),
    # It joins all commands.
    Room("cli.main", ("cli.main",), ("messages", "cli", "cli.serve", "client"), ("typer",)),
    # The engine, from the ground up.
    _package("engine", "messages.errors messages.engine_options messages.options", "msgspec torch"),
    # The only one that imports transformers.
    _package("engine.models.library", "engine", "torch transformers"),
    _package(
        "engine.adapters",
        "messages.engine_options messages.errors engine engine.models.library processes.safe_open",
        "msgspec re2 torch xxhash",
    ),
    Room("engine.kernels", ("engine.kernels.*",), ("engine.layout",), ("torch",)),
    _package("engine.kernels.reference", "engine.kernels", "torch"),
    _package(
        "engine.kernels.cpu", "engine.kernels engine.kernels.reference engine.layout", "torch"
    ),
    _package("engine.kernels.gpu", "engine.kernels engine.layout", "torch triton"),
    # The package's own file chooses among its implementations, which import its modules.
    Room(
        "engine.kernels.__init__",
        ("engine.kernels",),
        (
            *("engine.kernels", "engine.kernels.reference"),
            *("engine.kernels.cpu", "engine.kernels.gpu"),
        ),
    ),
    _package(
        "engine.residency",
        "messages engine engine.adapters engine.kernels.directory",
        "msgspec structlog torch",
    ),
    _package("engine.punica", "engine engine.kernels", "torch"),
    _package(
        "engine.layers",
        "engine engine.kernels engine.models.library engine.punica engine.residency.arena",
        "torch",
    ),
    _package(
        "engine.models",
        "messages.engine_options messages.prompts messages.requests messages.views engine "
        "engine.adapters engine.kernels engine.kernels.__init__ engine.residency "
        "engine.punica engine.layers engine.models.library",
        "msgspec safetensors torch",
    ),
    _package(
        "engine.serving",
        "messages engine engine.kernels.block_attention engine.residency.arena engine.punica "
        "engine.models engine.models.library",
        "llguidance msgspec structlog torch",
    ),
    _package(
        "engine.manager",
        "messages controller.core engine engine.adapters "
        "engine.kernels.__init__ "
        "engine.residency engine.punica engine.layers engine.models",
        "structlog torch",
    ),
    _package(
        "engine.worker",
        "processes messages engine engine.adapters "
        "engine.residency engine.models engine.models.library engine.serving",
        "msgspec structlog torch",
    ),
    # The gateway, from the ground up: a client of the controller.
    _package("gateway", "messages", "msgspec"),
    _package("gateway.http", "messages client gateway", "msgspec starlette"),
    _package(
        "gateway.adapters",
        "processes.safe_open messages client gateway gateway.http",
        "msgspec starlette structlog",
    ),
    Room(
        "gateway.metrics",
        ("gateway.metrics",),
        ("messages", "gateway", "gateway.http", "gateway.adapters"),
        ("prometheus_client", "starlette"),
    ),
    _package("gateway.web", "messages", "msgspec"),
    Room(
        "gateway.page",
        ("gateway.page", "gateway.rates"),
        ("messages", "client", "gateway", "gateway.web", "gateway.http", "gateway.adapters"),
        ("msgspec", "starlette"),
    ),
    _package(
        "gateway.inference",
        "processes messages client gateway gateway.http gateway.adapters",
        "jinja2 msgspec structlog tokenizers",
    ),
    _package(
        "gateway.server",
        "processes messages client fleet gateway gateway.http gateway.adapters gateway.metrics "
        "gateway.inference gateway.page",
        "httptools msgspec starlette structlog uvicorn",
    ),
    # What users import.
    Room(
        "loradock",
        ("loradock",),
        ("messages", "client", "engine", "engine.adapters", "engine.punica", "engine.manager"),
    ),
    # The entry points of our processes.
    Room(
        "processes.__main__",
        ("processes.__main__",),
        (
            *("loradock", "controller.log", "controller.server", "engine.worker"),
            *("engine.models.library.light_imports", "gateway.inference.chat_template"),
            *("fleet", "gateway.server", "processes"),
        ),
    ),
    Room(
        "testing",
        ("testing",),
        ("controller.core",),
        ("msgspec",),
    ),
)

PLACES: Final[dict[str, tuple[str, ...]]] = {
    "zmq": (
        *("controller.server.transport", "controller.server.listener"),
        *("controller.server.keys", "client.async_client", "client.client"),
        *("client.sockets", "engine.worker.process", "engine.worker.worker"),
    ),
    "PIL": ("engine.models.image_processor",),
    "torchao": ("engine.models.saved_settings",),
    # An extra: only what runs while tracing is on imports it.
    "opentelemetry": ("messages.traces", "gateway.inference.traces", "engine.worker.spans"),
    "tensorizer": ("engine.adapters.other_formats",),
}
"""Libraries that belong to single modules instead of rooms."""

BEGIN: Final = "<!-- rooms: generated by make diagrams -->"
END: Final = "<!-- end of the rooms -->"


def _short(module: str) -> str:
    """The name of one of our modules below `loradock`."""
    return module.removeprefix("loradock.")


@cache
def rooms_of(module: str) -> tuple[Room, ...]:
    """The rooms that claim a module; a well-placed one has exactly one."""
    module = _short(module)
    siblings = f"{module.rpartition('.')[0]}.*"
    # A package's own name is matched before the folder that it is in.
    exact = tuple(room for room in ROOMS if module in room.modules)
    return exact or tuple(room for room in ROOMS if siblings in room.modules)


def _is_allowed(room: Room, module: str, imported: str, ours: bool) -> bool:
    """Whether a module of `room` may import `imported`, which is `ours` or a library's."""
    if not ours:
        library = imported.partition(".")[0]
        return library in (*room.stdlib, *room.libraries) or module in PLACES.get(library, ())
    (target,), imported = rooms_of(imported), _short(imported)
    # `engine.kernels` is both a room and the one module of another.
    is_module = imported in room.may and imported not in {other.name for other in ROOMS}
    return target == room or target.name in room.may or is_module


def wrong_imports(files: list[Source]) -> list[str]:
    """Every import that the importing module's room does not allow."""
    modules, findings = {file.module for file in files}, []
    for file in files:
        rooms = rooms_of(file.module)
        if len(rooms) != 1:
            findings.append(f"{file.path} belongs to {len(rooms)} rooms; it must be one")
            continue
        for node, name in imports(file, modules):
            ours = name.partition(".")[0] == "loradock"
            if ours and len(rooms_of(name)) != 1:
                findings.append(file.at(node, f"imports {name}, which is in no room"))
            elif not _is_allowed(rooms[0], _short(file.module), name, ours):
                findings.append(file.at(node, f"imports {name}, which {rooms[0].name} may not"))
    return findings


def graph_of(files: list[Source]) -> dict[str, set[str]]:
    """The modules that each module imports."""
    modules = {file.module for file in files}
    return {
        file.module: {name for _, name in imports(file, modules) if name in modules}
        for file in files
    }


def room_graph(files: list[Source]) -> dict[str, set[str]]:
    """The other rooms from which the modules of each room import."""
    graph: dict[str, set[str]] = {room.name: set() for room in ROOMS}
    for module, imported in graph_of(files).items():
        (room,) = rooms_of(module)
        graph[room.name] |= {rooms_of(other)[0].name for other in imported} - {room.name}
    return graph


def allowed_graph() -> dict[str, set[str]]:
    """The other rooms that the table lets each room import from."""
    names = {room.name for room in ROOMS}
    return {
        room.name: {other if other in names else rooms_of(other)[0].name for other in room.may}
        for room in ROOMS
    }


def cycle_of(graph: Mapping[str, set[str]]) -> list[str]:
    """The nodes of one cycle, first and last equal; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def _reduced(graph: Mapping[str, set[str]]) -> Iterator[tuple[str, str]]:
    """The edges that no longer path implies."""

    def reaches(start: str) -> set[str]:
        return set().union(*({other} | reaches(other) for other in graph[start]), set())

    for room in sorted(graph):
        for other in sorted(graph[room]):
            if not any(other in reaches(third) for third in graph[room] - {other}):
                yield room, other


def drawing(graph: Mapping[str, set[str]]) -> str:
    """The graph in Mermaid's language; an arrow leads from a room to one that it imports."""
    lines = []
    for room in sorted(graph):
        targets = [_id_of(other) for start, other in _reduced(graph) if start == room]
        arrow = f" --> {' & '.join(targets)}" if targets else ""
        lines.append(f'    {_id_of(room)}["{room}"]{arrow}')
    return "\n".join(["```mermaid", "flowchart TD", *lines, "```"])


def _id_of(room: str) -> str:
    return room.replace(".", "_")


def with_drawing(text: str, graph: Mapping[str, set[str]]) -> str:
    """`text` with the drawing between its marks; raises ValueError without marks."""
    return between_marks(text, BEGIN, END, drawing(graph))


def main() -> None:
    """Draw the rooms into the file that the command line names."""
    path = Path(sys.argv[1])
    path.write_text(with_drawing(path.read_text(), room_graph(read_sources(PROGRAM))))


if __name__ == "__main__":
    main()
