"""The overview of a program's commands, whose modules are imported when a command is used."""

from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any, ClassVar, NamedTuple

import typer
import typer.main

from loradock.cli.pages.help_pages import HelpGroup, with_help_pages


class Entry(NamedTuple):
    """A command: its name, how to import the application that has it, and its summary.

    The summary is the first paragraph of the command's help, so that the overview needs no import.
    """

    name: str
    load: Callable[[], typer.Typer]
    summary: str


class LazyCommands(Mapping[str, Any]):
    """Commands by name; reading one imports its module."""

    def __init__(self, panels: Mapping[str, tuple[Entry, ...]]) -> None:
        self._entries = {entry.name: entry for panel in panels.values() for entry in panel}

    def __getitem__(self, name: str) -> Any:
        return _commands_of(self._entries[name].load)[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


@cache
def _commands_of(load: Callable[[], typer.Typer]) -> dict[str, Any]:
    """Return the commands of an application by name, with pages of plain text."""
    loaded = load()
    app = typer.Typer(rich_markup_mode=None)
    app.registered_commands = loaded.registered_commands
    app.registered_groups = loaded.registered_groups
    with_help_pages(app.registered_commands, app.registered_groups)
    return dict(typer.main.get_group(app).commands)


class OverviewGroup(HelpGroup):
    """A group with the commands of `panels`: titles, and the commands under each."""

    panels: ClassVar[Mapping[str, tuple[Entry, ...]]] = {}

    def __init__(self, **attributes: Any) -> None:
        super().__init__(**attributes)
        self.commands: Any = LazyCommands(self.panels)

    def overview(self) -> Iterator[tuple[str, str, str]]:
        """Yield the panel, the name and the summary of each command."""
        for panel, entries in self.panels.items():
            for entry in entries:
                yield panel, entry.name, entry.summary
