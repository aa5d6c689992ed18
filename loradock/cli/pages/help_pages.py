"""Help pages of all commands: plain text that holds at 80 columns and is wider if there is room.

A page has one section per panel of options or commands, in the order of their definition. From
`WIDE` columns on, the allowed range of a number and the environment variable of an option are
shown too.
"""

import shutil
import typing
from collections.abc import Iterable, Iterator
from typing import Any, Final

from typer.core import TyperCommand, TyperGroup

from loradock.cli.pages.wrong_values import bounds_of, choices_of, with_own_texts
from loradock.controller.server.startup.sizes import format_size

WIDTH_MAX: Final = 120
WIDE: Final = 100

_TERM_COLUMNS_MAX: Final = 30
_OPTIONS: Final = "Options"
_ARGUMENTS: Final = "Arguments"
_COMMANDS: Final = "Commands"

EXIT_CODES: Final = "Exit codes"


def width() -> int:
    """Return the columns of a page: those of the terminal or of COLUMNS, up to `WIDTH_MAX`."""
    return min(shutil.get_terminal_size().columns, WIDTH_MAX)


class HelpCommand(TyperCommand):
    """A command with such a page, and own texts for wrong values.

    An option that may be repeated takes several values in one go too, as vLLM's options do, where
    the command has no arguments of its own.
    """

    def __init__(self, *arguments: Any, **attributes: Any) -> None:
        super().__init__(*arguments, **attributes)
        with_own_texts(self.params)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Read the options."""
        params = self.get_params(ctx)
        if not any(one.param_type_name == "argument" for one in params):
            flags = {flag for one in params if one.multiple for flag in one.opts}
            args = list(_repeated(args, flags))
        return super().parse_args(ctx, args)

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the command's name, in usage errors too."""
        return list(_usage(self, ctx))

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        _write_page(self, ctx, formatter)


def _repeated(args: list[str], flags: set[str]) -> Iterator[str]:
    """Yield the words of a command line, with such a flag before each of its values."""
    flag, has_value = "", True
    for word in args:
        name, equals, _ = word.partition("=")
        if not has_value:
            has_value = True
        elif name in flags:
            flag, has_value = name, bool(equals)
        elif word.startswith("-"):
            flag = ""
        elif flag:
            yield flag
        yield word


class HelpGroup(TyperGroup):
    """A group of commands with such a page; `exit_codes` are listed at its end."""

    exit_codes: tuple[tuple[str, str], ...] = ()

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Return the words after the group's name, in usage errors too."""
        return list(_usage(self, ctx))

    def overview(self) -> Iterator[tuple[str, str, str]]:
        """Yield the panel, the name and the summary of each command."""
        for name, one in self.commands.items():
            if not one.hidden:
                yield _COMMANDS, name, summary(one)

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the page."""
        _write_page(self, ctx, formatter)
        if self.exit_codes:
            with formatter.section(EXIT_CODES):
                formatter.write_dl(self.exit_codes)


def _write_page(command: Any, ctx: Any, formatter: Any) -> None:
    # The formatter's own bound is 80 columns.
    formatter.width = width() - 2
    formatter.write_usage(ctx.command_path, " ".join(command.collect_usage_pieces(ctx)))
    command.format_help_text(ctx, formatter)
    for title, rows in _sections(command, ctx).items():
        with formatter.section(title):
            formatter.write_dl(rows, col_max=_TERM_COLUMNS_MAX)


def _usage(command: Any, ctx: Any) -> Iterator[str]:
    yield "[OPTIONS]"
    for one in command.get_params(ctx):
        if one.param_type_name == "argument":
            metavar = _metavar(one, ctx)
            yield metavar if one.required else f"[{metavar}]"
    if isinstance(command, HelpGroup):
        yield "COMMAND [ARGUMENT...]"


def _sections(command: Any, ctx: Any) -> dict[str, list[tuple[str, str]]]:
    """Return the rows of each section: terms and their descriptions."""
    sections: dict[str, list[tuple[str, str]]] = {}
    if isinstance(command, HelpGroup):
        for panel, name, text in command.overview():
            sections.setdefault(panel, []).append((name, text))
    for one in command.get_params(ctx):
        is_argument = one.param_type_name == "argument"
        if not getattr(one, "hidden", False):
            usual = _ARGUMENTS if is_argument else _OPTIONS
            title = _title(getattr(one, "rich_help_panel", None), usual)
            sections.setdefault(title, []).append((_term(one, ctx), _text(one, ctx)))
    return sections


def _title(panel: Any, usual: str) -> str:
    return panel if isinstance(panel, str) else usual


def summary(command: Any) -> str:
    """Return the first paragraph of a command's help, in one line."""
    return " ".join((command.help or "").partition("\n\n")[0].split())


def _term(one: Any, ctx: Any) -> str:
    metavar = _metavar(one, ctx)
    if one.param_type_name == "argument":
        return metavar
    names = ", ".join(sorted(one.opts, key=len))
    if one.secondary_opts:
        names = f"{names} / {', '.join(one.secondary_opts)}"
    return names if one.is_flag else f"{names} {metavar}"


def _metavar(one: Any, ctx: Any) -> str:
    if one.metavar:
        return str(one.metavar)
    choices = choices_of(one)
    if choices:
        return "|".join(choices)
    if one.param_type_name == "argument":
        name = str(one.name).upper()
        return f"{name}..." if one.nargs < 0 else name
    return "NUMBER" if isinstance(one.get_default(ctx, call=False), int | float) else "TEXT"


def _text(one: Any, ctx: Any) -> str:
    """Return the help of an option, with its default unless the help states it."""
    text = (one.help or "").strip()
    default = "" if "Default:" in text else _default(one, ctx)
    notes = [f"Default: {default}."] if default else []
    if one.required:
        notes.append("Required.")
    elif not default and _lacks_default(one, text):
        notes.append("Default: none.")
    if width() >= WIDE:
        notes += _details(one)
    return " ".join([text, *notes])


def _lacks_default(one: Any, text: str) -> bool:
    """Whether an option that has a value is described without what holds in its absence."""
    is_switch = one.param_type_name == "option" and one.is_flag
    return not (is_switch or one.is_eager or "Default:" in text or "Needed" in text)


def _default(one: Any, ctx: Any) -> str:
    shown = getattr(one, "show_default", None)
    if isinstance(shown, str):
        return shown
    value = one.get_default(ctx, call=False)
    is_empty = value is False or (not isinstance(value, int | float) and not value)
    if shown is False or is_empty or one.is_eager or one.required:
        return ""
    return _value(value, one)


def _value(value: Any, one: Any) -> str:
    """Return a default with its unit."""
    if isinstance(value, bool):
        return "on" if one.secondary_opts else ""
    if one.metavar == "BYTES":
        return format_size(value)
    if isinstance(value, int | float):
        number = f"{value:g}" if isinstance(value, float) else str(value)
        return f"{number} s" if one.metavar == "SECONDS" else number
    if isinstance(value, Iterable) and not isinstance(value, str):
        return ", ".join(map(str, value))
    return str(getattr(value, "value", value))


def _details(one: Any) -> Iterator[str]:
    least, most = bounds_of(one)
    if least is not None and most is not None:
        yield f"From {least} to {most}."
    elif least is not None:
        yield f"At least {least}."
    variable = getattr(one, "envvar", None)
    if isinstance(variable, str):
        yield f"Environment: {variable}."


def with_help_pages(commands: Iterable[Any], groups: Iterable[Any]) -> None:
    """Have typer make commands and groups, which are registered already, with such pages."""
    for info in commands:
        info.cls = HelpCommand
    for info in groups:
        info.cls = HelpGroup
        nested = typing.cast(Any, info.typer_instance)
        with_help_pages(nested.registered_commands, nested.registered_groups)
