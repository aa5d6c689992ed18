"""Which part may import what, what nobody may call, and how long things may get.

What it is: the layout as one table, and checks that read the code and tell what breaks it. What it
is not: a linter for the rest; that is ruff's. One rule: a check takes files and returns findings,
so that `test_architecture` can show each one a small wrong file.
"""

import ast
import sys
from collections.abc import Iterator
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
PROGRAM = ("messages", "controller", "engine")
SHIPPED = (*PROGRAM, "examples", "benchmarks")
ALL = (*SHIPPED, "tests")

STDLIB = tuple(sys.stdlib_module_names)
# What a pure part may use of the standard library: no clock, chance, file, socket or thread.
PURE = (
    *("abc", "bisect", "collections", "contextlib", "copy", "dataclasses", "enum", "functools"),
    *("hashlib", "heapq", "itertools", "math", "operator", "re", "struct", "types", "typing"),
)
SHELL_AND_CLIENT = ("controller.shell", "controller.cli", "controller.client*")


class Area(NamedTuple):
    """The files that `path` matches may import what begins with one of `may`, but not `never`."""

    path: str
    may: tuple[str, ...]
    never: tuple[str, ...] = ()


# The first line that a path matches is its rule.
AREAS = (
    Area("messages/*", (*STDLIB, "msgspec", "messages")),
    Area("controller/client*.py", (*STDLIB, "zmq", "msgspec", "messages", "controller.client*")),
    Area("controller/states/*", (*PURE, "transitions", "messages", "controller.states")),
    Area(
        "controller/cli/*",
        (*STDLIB, "typer", "rich", "structlog", "msgspec", "messages", "controller"),
    ),
    Area(
        "controller/shell/transport.py",
        (*STDLIB, "zmq", "structlog", "messages", "controller"),
        ("controller.cli", "controller.client*"),
    ),
    Area(
        "controller/shell/*",
        (*STDLIB, "msgspec", "structlog", "xxhash", "messages", "controller"),
        ("controller.cli", "controller.client*"),
    ),
    Area(
        "controller/*",
        (*PURE, "msgspec", "xxhash", "messages", "controller"),
        SHELL_AND_CLIENT,
    ),
    Area("engine/kernels/*", (*STDLIB, "torch", "triton", "engine")),
    Area("engine/models/vision/decoding.py", (*STDLIB, "PIL", "messages", "engine")),
    Area("engine/adapters/files/tensorizer_stream.py", (*STDLIB, "torch", "tensorizer", "engine")),
    Area("engine/layers/*", (*STDLIB, "torch", "transformers", "engine")),
    Area("engine/punica/wrapper.py", (*STDLIB, "torch", "engine")),
    Area(
        "engine/worker/worker.py",
        (*STDLIB, "zmq", "msgspec", "structlog", "torch", "messages", "engine"),
    ),
    Area(
        "engine/manager/model_manager.py",
        (*STDLIB, "torch", "transformers", "messages", "engine", "controller"),
        SHELL_AND_CLIENT,
    ),
    Area(
        "engine/*",
        (
            *(*STDLIB, "msgspec", "structlog", "xxhash", "torch", "transformers", "safetensors"),
            *("messages", "engine"),
        ),
    ),
)

# Nothing reaches a higher floor, not even through modules that stand on none.
FLOORS = (
    (
        "engine.errors",
        "engine.config",
        "engine.adapters.lora_model",
        "engine.residency.staging",
        "engine.residency.arena",
    ),
    ("engine.kernels",),
    ("engine.punica", "engine.models.vision.mapping"),
    ("engine.layers",),
    ("engine.models.packing", "engine.models.probe", "engine.models.image_layer_probe"),
    ("engine.models.preparation",),
    ("engine.models.served_model",),
    ("engine.models.causal_model", "engine.models.pooling_model"),
    ("engine.models.loading",),
    ("engine.models.binding", "engine.residency.residency"),
    ("engine.worker.engine",),
    (
        "engine.worker.worker",
        "engine.manager.model_manager",
        "engine.manager.worker_manager",
        "engine.manager",
    ),
)

BANNED_MODULES = (
    *("pickle", "_pickle", "cPickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"),
    *("yaml", "ruamel", "importlib", "imp", "runpy", "pkgutil", "code", "codeop"),
    *("multiprocessing", "torch.multiprocessing"),
)
BANNED_NAMES = ("eval", "exec", "compile", "__import__", "breakpoint")
# Some pickle their argument, some run a text; the module before the dot does not matter.
BANNED_METHODS = (
    *("send_pyobj", "recv_pyobj", "broadcast_object_list", "scatter_object_list"),
    *("all_gather_object", "gather_object", "send_object_list", "recv_object_list"),
    *("import_module", "ProcessPoolExecutor"),
)
BANNED_FUNCTIONS = ("os.system", "os.popen", "torch.save")
# The one loader of pickles that may be called, here alone: told so, it builds tensors and nothing
# else. What it is given is checked before, and nothing calls it unless an operator allowed it.
PICKLE_LOADER, PICKLE_LOADER_PLACE = "torch.load", "engine/adapters/files/torch_pickle.py"
# `hash` and `id` differ from one process to the next, and a replay is another process.
BANNED_IN_CORE = ("open", "print", "input", "id", "hash")

FUNCTION_LINES_MAX, KERNEL_LINES_MAX, FILE_LINES_MAX = 70, 100, 400


class Source(NamedTuple):
    """A file of the program: its path from the root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @property
    def module(self) -> str:
        """The name by which it is imported."""
        name = self.path.removesuffix(".py").replace("/", ".")
        return name.removesuffix(".__init__")

    def at(self, node: ast.AST, words: str) -> str:
        """A finding, with its place."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {words}"


def source(path: str, text: str) -> Source:
    return Source(path, text, ast.parse(text, path))


def read_sources(folders: tuple[str, ...]) -> list[Source]:
    paths = sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))
    return [source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]


def begins(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module is one of `prefixes` or lies in one; `*` ends a prefix early."""
    parents = [module[:i] for i, letter in enumerate(module + ".") if letter == "."]
    return any(fnmatchcase(parent, prefix) for parent in parents for prefix in prefixes)


def imports(file: Source, modules: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Every module that a file imports; `from a import b` is `a.b` where that is a module."""
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = file.module.split(".")
                keep = len(package) - node.level + file.path.endswith("__init__.py")
                base = ".".join([*package[:keep], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node, full if full in modules else base


def wrong_imports(files: list[Source]) -> list[str]:
    modules, found = {file.module for file in files}, []
    for file in files:
        area = next((area for area in AREAS if fnmatchcase(file.path, area.path)), None)
        assert area is not None, f"{file.path} has no line in AREAS"
        found += [
            file.at(node, f"imports {name}, which {area.path} may not")
            for node, name in imports(file, modules)
            if not begins(name, area.may) or begins(name, area.never)
        ]
    return found


def graph_of(files: list[Source]) -> dict[str, set[str]]:
    modules = {file.module for file in files}
    return {
        file.module: {name for _, name in imports(file, modules) if name in modules}
        for file in files
    }


def reachable(graph: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += graph[module]
    return seen


def cycles(files: list[Source]) -> list[str]:
    graph = graph_of(files)
    return sorted(module for module in graph if module in reachable(graph, module))


def climbs(files: list[Source]) -> list[str]:
    graph = graph_of(files)
    return [
        f"{module} reaches {other}, a floor above it"
        for height, floor in enumerate(FLOORS)
        for module in sorted(graph)
        if begins(module, floor)
        for other in sorted(reachable(graph, module))
        if any(begins(other, above) for above in FLOORS[height + 1 :])
    ]


def keyword(call: ast.Call, name: str) -> object:
    """The value of a literal keyword argument; None where it is not given or no literal."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ...
    return None


def names_that_run_code(file: Source) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Name) and node.id in BANNED_NAMES:
            yield file.at(node, f"uses {node.id}")
        if isinstance(node, ast.Attribute):
            full = ast.unparse(node)
            if node.attr in BANNED_METHODS or full in BANNED_FUNCTIONS:
                yield file.at(node, f"uses {full}")
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                if alias.name in BANNED_METHODS or full in (*BANNED_FUNCTIONS, PICKLE_LOADER):
                    yield file.at(node, f"takes {full} out of its module")


def calls_that_run_code(file: Source) -> Iterator[str]:
    for node in ast.walk(file.tree):
        if not isinstance(node, ast.Call):
            continue
        if ast.unparse(node.func) == PICKLE_LOADER:
            if keyword(node, "weights_only") is not True:
                yield file.at(node, f"calls {PICKLE_LOADER} without weights_only=True")
            elif file.path != PICKLE_LOADER_PLACE:
                yield file.at(node, f"calls {PICKLE_LOADER}, which {PICKLE_LOADER_PLACE} does")
        for risk in ("shell", "trust_remote_code", "allow_pickle"):
            if keyword(node, risk) not in (None, False):
                yield file.at(node, f"passes {risk}={keyword(node, risk)}")


def ways_to_run_code(files: list[Source]) -> list[str]:
    found = []
    for file in files:
        found += [
            file.at(node, f"imports {name}")
            for node, name in imports(file, set())
            if begins(name, BANNED_MODULES)
        ]
        found += [*names_that_run_code(file), *calls_that_run_code(file)]
    return found


def is_core(file: Source) -> bool:
    outside = ("controller/shell/*", "controller/cli/*", "controller/client*")
    return file.path.startswith("controller/") and not any(
        fnmatchcase(file.path, path) for path in outside
    )


def impurities(files: list[Source]) -> list[str]:
    return [
        file.at(node, f"calls {node.func.id}, which is not the core's to do")
        for file in files
        if is_core(file)
        for node in ast.walk(file.tree)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in BANNED_IN_CORE
    ]


def too_long(files: list[Source]) -> list[str]:
    found = []
    for file in files:
        if (lines := file.text.count("\n")) > FILE_LINES_MAX:
            found.append(f"{file.path}: {lines} lines; at most {FILE_LINES_MAX}")
        for node in ast.walk(file.tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
                bound = KERNEL_LINES_MAX if is_kernel else FUNCTION_LINES_MAX
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > bound:
                    found.append(file.at(node, f"{node.name} has {lines} lines; at most {bound}"))
    return found


def without_docstring(files: list[Source]) -> list[str]:
    return [file.path for file in files if not ast.get_docstring(file.tree)]
