"""The options of a command line that a Struct of options describes."""

from collections.abc import Iterator
from typing import Any, NamedTuple, get_args

import msgspec

from loradock.messages.engine_options import EngineOptions


class Option(NamedTuple):
    """One option of a command line; `kind` is the type of one value.

    `is_repeated`: may be given several times. `is_optional`: the value is None if the option is not
    given. `value_min` and `value_max` are None without a bound. `choices`: the allowed values, none
    if any is.
    """

    field: str
    flag: str
    kind: type[int] | type[str] | type[bool]
    default: Any
    help: str
    metavar: str | None
    value_min: int | None
    value_max: int | None
    choices: tuple[str, ...]
    is_repeated: bool
    is_optional: bool

    @property
    def is_required(self) -> bool:
        """Whether there is no default."""
        return self.default is msgspec.NODEFAULT


def options_of(owner: type[EngineOptions]) -> Iterator[Option]:
    """Yield the options of a Struct, in the order of its fields."""
    for field in msgspec.structs.fields(owner):
        hint, meta = get_args(field.type)
        # Of `tuple[str, ...]` and `bool | None` the first is the type of a value.
        kind, *others = get_args(hint) or (hint,)
        yield Option(
            field.name,
            option_flag(field.name, Ellipsis in others),
            kind,
            field.default,
            meta.description,
            (meta.extra or {}).get("metavar"),
            meta.ge,
            meta.le,
            (meta.extra or {}).get("choices", ()),
            is_repeated=Ellipsis in others,
            is_optional=type(None) in others,
        )


def option_flag(field: str, is_repeated: bool) -> str:
    """Return the option of a field; one that may be repeated is named in the singular."""
    name = field.removesuffix("s") if is_repeated else field
    return f"--{name.replace('_', '-')}"


def command_line(options: EngineOptions) -> list[str]:
    """Return the arguments for all values that differ from their defaults."""
    arguments: list[str] = []
    for option in options_of(type(options)):
        value = getattr(options, option.field)
        if value != option.default:
            arguments += _arguments(option, value)
    return arguments


def _arguments(option: Option, value: object) -> list[str]:
    match value:
        case bool():
            return [option.flag if value else option.flag.replace("--", "--no-", 1)]
        case tuple():
            # One argument each, so that a value may begin with a dash.
            return [f"{option.flag}={one}" for one in value]
        case _:
            return [f"{option.flag}={value}"]
