"""The options of `serve` for its engine, made from `EngineOptions`."""

from inspect import Parameter
from typing import Any, Final

import typer

from loradock.cli.options.groups import OptionGroup, parameter, size_parameter
from loradock.messages.engine_options import EngineOptions
from loradock.processes.option_list import Option, options_of

_PANEL: Final = "Engine"


def _parameter(option: Option) -> Parameter:
    # A switch that can be left undecided, or is on by default, has a second flag.
    can_be_off = option.is_optional or option.default is True
    flags = f"{option.flag}/--no-{option.flag[2:]}" if can_be_off else option.flag
    shown = typer.Option(
        flags,
        help=option.help,
        rich_help_panel=_PANEL,
        metavar=option.metavar,
        min=option.value_min,
        max=option.value_max,
    )
    if option.metavar == "BYTES":
        return size_parameter(option.field, option.flag, option.help, option.default, _PANEL)
    if option.is_repeated:
        return parameter(option.field, list[str] | None, None, shown)
    kind = option.kind | None if option.is_optional else option.kind
    return parameter(option.field, kind, option.default, shown)


def _build(values: dict[str, Any]) -> EngineOptions:
    repeated = {o.field: tuple(values[o.field] or ()) for o in _OPTIONS if o.is_repeated}
    return EngineOptions(**{**values, **repeated})


_OPTIONS: Final = tuple(options_of(EngineOptions))
ENGINE_OPTIONS: Final = OptionGroup(tuple(map(_parameter, _OPTIONS)), _build)
