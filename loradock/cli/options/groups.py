"""Groups of options that a command receives as one argument each."""

import functools
import inspect
from collections.abc import Callable, Iterable
from inspect import Parameter
from typing import Annotated, Any, Final, NamedTuple

import typer
from msgspec.structs import FieldInfo

from loradock.controller.server.startup.sizes import format_size, parse_size

_SECONDS_MIN: Final = 0.001
_SECONDS_MAX: Final = 3600

Command = Callable[..., None]


class OptionGroup(NamedTuple):
    """Options of a command, and the function that makes one argument of their values by name."""

    parameters: tuple[Parameter, ...]
    build: Callable[[dict[str, Any]], Any]


def with_option_groups(**groups: OptionGroup) -> Callable[[Command], Command]:
    """Replace each argument that a group is named after by the options of the group."""

    def decorate(command: Command) -> Command:
        signature = inspect.signature(command, eval_str=True)
        kept = [one for name, one in signature.parameters.items() if name not in groups]

        @functools.wraps(command)
        def run(*positional: Any, **values: Any) -> None:
            built = {
                name: group.build({one.name: values.pop(one.name) for one in group.parameters})
                for name, group in groups.items()
            }
            command(*positional, **values, **built)

        options = [one for group in groups.values() for one in group.parameters]
        # typer makes the options of a command from its signature.
        run.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*kept, *options]
        )
        return run

    return decorate


def parameter(name: str, kind: Any, default: Any, option: Any) -> Parameter:
    """A command's argument that is an option."""
    annotation = Annotated[kind, option]
    return Parameter(name, Parameter.KEYWORD_ONLY, default=default, annotation=annotation)


def size_parameter(name: str, flag: str, text: str, default: int, panel: str) -> Parameter:
    """The option of a size in bytes, which may have a unit."""
    shown = typer.Option(
        flag,
        help=text,
        rich_help_panel=panel,
        parser=_size,
        metavar="SIZE",
        show_default=format_size(default),
    )
    return parameter(name, int, default, shown)


def setting(field: FieldInfo, flag: str, text: str, panel: str) -> Parameter:
    """The option of a configuration's field, in the unit that the end of its name specifies.

    Durations (`_ms`) are options in seconds, see `in_milliseconds`; sizes (`_bytes_max`) may have a
    unit.
    """
    shown: dict[str, Any] = {"help": text, "rich_help_panel": panel}
    kind, default = field.type, field.default
    if field.name.endswith("_ms"):
        kind, default = float, default / 1000
        least = 0 if field.name.endswith("_quantum_ms") else _SECONDS_MIN
        shown |= {"min": least, "max": _SECONDS_MAX, "metavar": "SECONDS"}
    elif field.name.endswith("_bytes_max"):
        return size_parameter(field.name, flag, text, default, panel)
    elif field.name == "log_retention":
        shown["metavar"] = "ACTION"
    elif isinstance(default, int) and not isinstance(default, bool):
        kind = int
        shown |= {"min": int(not field.name.endswith("_hours")), "metavar": "NUMBER"}
    return parameter(field.name, kind, default, typer.Option(flag, **shown))


def in_milliseconds(values: dict[str, Any]) -> dict[str, Any]:
    """The values of `setting` options with durations in milliseconds, as their fields have them."""
    return {
        name: round(value * 1000) if name.endswith("_ms") else value
        for name, value in values.items()
    }


def settings(
    fields: Iterable[FieldInfo], texts: dict[str, tuple[str, str]], panel: str
) -> tuple[Parameter, ...]:
    """The options of the fields that `texts` names, with the flag and the help text of each."""
    by_name = {field.name: field for field in fields}
    return tuple(setting(by_name[name], *texts[name], panel) for name in texts)


def _size(value: str | int) -> int:
    try:
        return parse_size(str(value))
    except ValueError as error:
        raise typer.BadParameter(str(error)) from error
