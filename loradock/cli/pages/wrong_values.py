"""What a wrong value of an option is answered with, in words that name what is allowed.

The command-line library's own sentences differ between its versions, and some quote its types.
"""

import functools
import types
import typing
from collections.abc import Iterable
from typing import Any

import typer


def with_own_texts(parameters: Iterable[Any]) -> None:
    """Have the parameters of a command refuse wrong values with these texts."""
    for one in parameters:
        one.process_value = functools.partial(_process, one, one.process_value)


def choices_of(one: Any) -> tuple[str, ...]:
    """Return the values of a choice; typer's versions keep them in two places."""
    annotation = getattr(getattr(one, "type_descriptor", None), "annotation", None)
    if typing.get_origin(annotation) is typing.Literal:
        return tuple(map(str, typing.get_args(annotation)))
    return tuple(map(str, getattr(getattr(one, "type", None), "choices", ())))


def bounds_of(one: Any) -> tuple[float | None, float | None]:
    """Return the smallest and the largest number that is allowed; None without a bound."""
    bounds = getattr(one, "type", None) or one
    return getattr(bounds, "min", None), getattr(bounds, "max", None)


def _process(one: Any, process: Any, ctx: Any, value: Any) -> Any:
    try:
        return process(ctx, value)
    except typer.BadParameter as error:
        found = next((each for each in _each(one, value) if rule(one, each)), value)
        if found is not None and (text := rule(one, found)):
            error.message = f"{found!r} is not allowed; {text}"
        raise


def _each(one: Any, value: Any) -> Iterable[Any]:
    is_list = getattr(one, "multiple", False) or one.nargs != 1
    return value if is_list and isinstance(value, list | tuple) else (value,)


def rule(one: Any, value: Any) -> str:
    """Return what a parameter needs instead of a value; empty if the value is not the reason."""
    if choices := choices_of(one):
        return "" if value in choices else f"it is one of {', '.join(choices)}"
    if one.metavar == "SIZE":
        # Its parser has a text of its own.
        return ""
    kind = _number_of(one)
    if kind is None:
        is_flag = one.param_type_name == "option" and one.is_flag
        is_wrong = is_flag and not isinstance(value, bool)
        return "true or false is needed" if is_wrong else ""
    least, most = bounds_of(one)
    try:
        number = kind(value)
        is_allowed = number == float(value)
        is_allowed = (
            is_allowed and (least is None or number >= least) and (most is None or number <= most)
        )
    except (TypeError, ValueError, OverflowError):
        is_allowed = False
    return "" if is_allowed else f"{_needed(one, kind, least, most)} is needed"


def _needed(one: Any, kind: type, least: float | None, most: float | None) -> str:
    name = "a whole number" if kind is int else "a number"
    if one.metavar == "SECONDS":
        name += " of seconds"
    elif one.metavar == "BYTES":
        name += " of bytes"
    if least is not None:
        name += f" from {least}" if most is not None else f" of at least {least}"
    return name if most is None else f"{name} to {most}"


def _number_of(one: Any) -> type[int] | type[float] | None:
    """Return the type of a parameter that is a number, or a list of numbers."""
    annotation = getattr(getattr(one, "type_descriptor", None), "annotation", None)
    found = _types_in(annotation)
    name = str(getattr(getattr(one, "type", None), "name", ""))
    if int in found or name.startswith("integer"):
        return int
    return float if float in found or name.startswith("float") else None


def _types_in(annotation: Any) -> set[Any]:
    """Return the types that an annotation is made of: int and None of `list[int] | None`."""
    if typing.get_origin(annotation) in (list, types.UnionType, typing.Union, typing.Annotated):
        return set().union(*map(_types_in, typing.get_args(annotation)))
    return {annotation} if isinstance(annotation, type) else set()
