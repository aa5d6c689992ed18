"""The program's files as text and syntax trees, and what each one imports."""

import ast
import gc
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

ROOT = Path(__file__).parents[2]
LINKED = ("messages", "controller", "engine")
"""Folders that are links below `loradock/`, and are imported as its packages."""

PROGRAM = (*LINKED, "loradock")
SHIPPED = (*PROGRAM, "examples", "benchmarks")
ALL = (*SHIPPED, "tests")


@dataclass(frozen=True, eq=False)
class Source:
    """A file: its path from the root, its text and its syntax tree."""

    path: str
    text: str
    tree: ast.Module

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        """All nodes of the tree; each rule reads them, so they are collected once."""
        return tuple(ast.walk(self.tree))

    @cached_property
    def import_nodes(self) -> tuple[ast.Import | ast.ImportFrom, ...]:
        """The nodes that import something."""
        return tuple(node for node in self.nodes if isinstance(node, ast.Import | ast.ImportFrom))

    @property
    def module(self) -> str:
        """The name by which it is imported."""
        name = self.path.removesuffix(".py").replace("/", ".")
        name = name.removesuffix(".__init__")
        return f"loradock.{name}" if name.partition(".")[0] in LINKED else name

    def at(self, node: ast.AST, finding: str) -> str:
        """Return a finding with its file and line."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}: {finding}"


def source(path: str, text: str) -> Source:
    """Return a `Source` with this text; the file need not exist."""
    return Source(path, text, ast.parse(text, path))


def read_sources(folders: tuple[str, ...]) -> list[Source]:
    """Return every Python file below these folders of the project."""
    return [file for folder in folders for file in _read_folder(folder)]


@cache
def _read_folder(folder: str) -> list[Source]:
    paths = sorted((ROOT / folder).rglob("*.py"))
    # The trees live until the end, and the collector would visit their nodes again and again.
    gc.disable()
    try:
        return [source(path.relative_to(ROOT).as_posix(), path.read_text()) for path in paths]
    finally:
        gc.freeze()
        gc.enable()


def imports(file: Source, modules: set[str]) -> Iterator[tuple[ast.AST, str]]:
    """Every module that a file imports; `from a import b` is `a.b` where that is in `modules`."""
    for node in file.import_nodes:
        if isinstance(node, ast.Import):
            yield from ((node, alias.name) for alias in node.names)
        else:
            base = node.module or ""
            if node.level:
                package = file.module.split(".")
                keep = len(package) - node.level + file.path.endswith("__init__.py")
                base = ".".join([*package[:keep], *([base] if base else [])])
            for alias in node.names:
                full = f"{base}.{alias.name}"
                yield node, full if full in modules else base


def begins(module: str, prefixes: tuple[str, ...]) -> bool:
    """Whether a module is one of `prefixes` or below one of them."""
    return any(module == prefix or module.startswith(f"{prefix}.") for prefix in prefixes)
