"""Rules for code: none runs what it reads, the core is pure, functions are short."""

import ast
from collections.abc import Iterator

from tests.support.sources import Source, begins, imports

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
# The one loader of pickles, in one module: with `weights_only` it builds tensors and nothing else.
# Its input is checked before, and only an operator's option leads to it.
PICKLE_LOADER, PICKLE_LOADER_PLACE = "torch.load", "engine/adapters/other_formats.py"
# Plugins that are installed as entry points are loaded in these modules.
PLUGIN_LOADER = "importlib.metadata"
PLUGIN_LOADER_PLACES = ("loradock/gateway/adapters/sources.py", "controller/log/policies.py")
# `hash` and `id` differ from one process to the next, and a replay is another process.
BANNED_IN_CORE = ("open", "print", "input", "id", "hash")
# The wall clock may jump: it is read for labels and for an epoch's number, and never to wait.
WALL_CLOCKS = ("time", "time_ns", "now", "utcnow", "today", "CLOCK_REALTIME")
WALL_CLOCK_PLACES = (
    *("controller/server/inputs.py", "loradock/cli/render.py"),
    "loradock/cli/event_filter.py",
    *("loradock/gateway/recorder.py", "loradock/gateway/inference/chat_template.py"),
    # Compared with the times of files, which no other clock can be; the wait is bounded.
    "engine/adapters/directory.py",
)

FUNCTION_LINES_MAX, KERNEL_LINES_MAX = 70, 100


def keyword(call: ast.Call, name: str) -> object:
    """The value of a literal keyword argument; None where it is not given or no literal."""
    for given in call.keywords:
        if given.arg == name:
            return given.value.value if isinstance(given.value, ast.Constant) else ...
    return None


def names_that_run_code(file: Source) -> Iterator[str]:
    for node in file.nodes:
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
    for node in file.nodes:
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
            and not (name == PLUGIN_LOADER and file.path in PLUGIN_LOADER_PLACES)
        ]
        found += [*names_that_run_code(file), *calls_that_run_code(file)]
    return found


def is_core(file: Source) -> bool:
    """Whether the file belongs to the pure part of the controller."""
    return file.path.startswith(("controller/core/", "controller/states/"))


def impurities(files: list[Source]) -> list[str]:
    return [
        file.at(node, f"calls {node.func.id}, which is not the core's to do")
        for file in files
        if is_core(file)
        for node in file.nodes
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
        if node.func.id in BANNED_IN_CORE
    ]


def wall_clock_reads(files: list[Source]) -> list[str]:
    """Return every reading of the wall clock outside its places."""
    found = []
    for file in files:
        if file.path in WALL_CLOCK_PLACES:
            continue
        for node in file.nodes:
            if isinstance(node, ast.Attribute) and node.attr in WALL_CLOCKS:
                owner = ast.unparse(node.value).rpartition(".")[2]
                if owner in ("time", "datetime", "date"):
                    found.append(file.at(node, f"reads {owner}.{node.attr}, which may jump"))
            if isinstance(node, ast.ImportFrom) and node.module == "time":
                names = [alias.name for alias in node.names if alias.name in WALL_CLOCKS]
                found += [file.at(node, f"takes {name} out of time") for name in names]
    return found


def too_long(files: list[Source]) -> list[str]:
    found = []
    for file in files:
        for node in file.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                is_kernel = any("triton.jit" in ast.unparse(d) for d in node.decorator_list)
                bound = KERNEL_LINES_MAX if is_kernel else FUNCTION_LINES_MAX
                lines = (node.end_lineno or node.lineno) - node.lineno + 1
                if lines > bound:
                    found.append(file.at(node, f"{node.name} has {lines} lines; at most {bound}"))
    return found


def without_docstring(files: list[Source]) -> list[str]:
    return [file.path for file in files if not ast.get_docstring(file.tree)]
