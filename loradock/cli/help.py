"""Commands and their help: typer's own, with options below the titles of their panels.

The modules of commands are imported when a command is used, so that help answers at once.
"""

import re
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, Final, NamedTuple

import typer
import typer.main
from typer.core import TyperCommand, TyperGroup

from loradock.cli.options import with_each_value_flagged

USAGE_ERROR: Final[Any] = typer.BadParameter.__bases__[0]
"""The base class of all errors in a command line; typer does not export it."""

WIDTH_MAX: Final = 120
_TERM_COLUMNS_MAX: Final = 30

_TYPE_NAMES: Final = {"int": "NUMBER", "float": "NUMBER", "str": "TEXT", "path": "FILE"}
_TYPE: Final = re.compile(rf"<({'|'.join(_TYPE_NAMES)})( range)?>")
"""typer's words for the types of values that have no name of their own."""


class HelpCommand(TyperCommand):
    """A command whose options are listed by panel, and repeated options take several values."""

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options."""
        params = self.get_params(ctx)
        if not any(one.param_type_name == "argument" for one in params):
            flags = {flag for one in params if one.multiple for flag in one.opts}
            args = list(with_each_value_flagged(args, flags))
        try:
            return super().parse_args(ctx, args)
        except USAGE_ERROR as error:
            former: dict[str, str] = getattr(self.callback, "former_flags", {})
            if (name := getattr(error, "option_name", None)) in former:
                error.possibilities = [former[name]]
            raise

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of arguments and options."""
        _write_options(self, ctx, formatter)


class HelpGroup(TyperGroup):
    """A group of commands; `exit_codes` are listed at the end of its help."""

    exit_codes: ClassVar[tuple[tuple[str, str], ...]] = ()

    def overview(self) -> Iterator[tuple[str, str, str]]:
        """Yield the panel, the name and the summary of each command."""
        for name, one in self.commands.items():
            yield "Commands", name, summary(one)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the sections of commands, options and exit codes."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for panel, name, text in self.overview():
            sections.setdefault(panel, []).append((name, text))
        _write_sections(formatter, sections)
        _write_options(self, ctx, formatter)
        if self.exit_codes:
            _write_sections(formatter, {"Exit codes": list(self.exit_codes)})


def _write_options(command: Any, ctx: Any, formatter: Any) -> None:
    sections: dict[str, list[tuple[str, str]]] = {}
    for one in command.get_params(ctx):
        usual = "Arguments" if one.param_type_name == "argument" else "Options"
        panel = getattr(one, "rich_help_panel", None)
        record = one.get_help_record(ctx)
        if record is not None:
            record = (_named(record[0], usual == "Arguments"), record[1])
            title = panel if isinstance(panel, str) else usual
            sections.setdefault(title, []).append(record)
    _write_sections(formatter, sections)


def _named(term: str, is_argument: bool) -> str:
    """Return an option with what its value is, an argument with its name alone."""
    if is_argument:
        return term.partition(" <")[0]
    return _TYPE.sub(lambda found: _TYPE_NAMES[found[1]], term)


def _write_sections(formatter: Any, sections: dict[str, list[tuple[str, str]]]) -> None:
    for title, rows in sections.items():
        with formatter.section(title):
            formatter.write_dl(rows, col_max=_TERM_COLUMNS_MAX)


def summary(command: Any) -> str:
    """Return the first paragraph of a command's help, in one line."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


class Entry(NamedTuple):
    """A command: its name, the module of this package that has it, and its summary.

    The summary is the first paragraph of the command's help, so that the overview needs no import.
    """

    name: str
    module: str
    summary: str


class LazyCommands(Mapping[str, Any]):
    """Commands by name; reading a command imports its module, by `load`."""

    def __init__(
        self, panels: Mapping[str, tuple[Entry, ...]], load: Callable[[str], typer.Typer]
    ) -> None:
        self._entries = {entry.name: entry for panel in panels.values() for entry in panel}
        self._load = load

    def __getitem__(self, name: str) -> Any:
        return commands_of(self._load, self._entries[name].module)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@cache
def commands_of(load: Callable[[str], typer.Typer], module: str) -> dict[str, Any]:
    """Return the commands of a module by name."""
    loaded = load(module)
    app = typer.Typer(rich_markup_mode=None)
    app.registered_commands = loaded.registered_commands
    app.registered_groups = loaded.registered_groups
    _set_classes(app)
    return dict(typer.main.get_group(app).commands)


def _set_classes(app: Any) -> None:
    for info in app.registered_commands:
        info.cls = HelpCommand
    for info in app.registered_groups:
        info.cls = HelpGroup
        _set_classes(info.typer_instance)


class OverviewGroup(HelpGroup):
    """A group with the commands of `panels`: titles, and the commands under each."""

    panels: ClassVar[Mapping[str, tuple[Entry, ...]]] = {}

    @staticmethod
    def load(module: str) -> typer.Typer:
        """Import a module of commands; return its application."""
        raise NotImplementedError

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands(self.panels, self.load)

    def overview(self) -> Iterator[tuple[str, str, str]]:
        """Yield the panel, the name and the summary of each command."""
        for panel, entries in self.panels.items():
            for entry in entries:
                yield panel, entry.name, entry.summary
