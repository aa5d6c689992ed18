"""What is wrong with a request's arguments, in words, before a frame is sent.

The bounds are those of the message's fields; a value outside them is named with what is allowed.
"""

import re
from collections.abc import Callable, Iterator
from typing import Any, Final

import msgspec
from msgspec import inspect as types

from loradock.client.errors import Malformed
from loradock.messages.ids import NAME_PATTERN, REQUEST_PATTERN
from loradock.messages.prompts import Sampling

NAME_RULE: Final = (
    "use 1 to 128 of the characters A-Z a-z 0-9 . _ - and no two dots in a row; a directory with "
    "another name is loaded by its path: loradock load NAME --path DIRECTORY"
)
_SHOWN_CHARACTERS: Final = 200
_CONTAINER_OF: Final = {"adapter": "adapter name", "adapters": "adapter name"}
_PATTERN_RULES: Final = {
    NAME_PATTERN: NAME_RULE,
    REQUEST_PATTERN: "use 1 to 96 characters without spaces, as `loradock requests` shows ids",
}
_PARAMETERS: Final = {
    "timeout_ms": "timeout_s",
    "inputs": "texts",
    "target": "request id",
    "first_seq": "since",
}
"""Fields that the client's methods have under another name."""


def check_arguments(request: msgspec.Struct) -> None:
    """Raise `Malformed` for the first argument that the wire does not allow."""
    for problem in _problems(request):
        raise Malformed(problem, getattr(request, "request_id", ""))


def _problems(struct: msgspec.Struct) -> Iterator[str]:
    info = types.type_info(type(struct))
    for field in info.fields if isinstance(info, types.StructType) else ():
        value = getattr(struct, field.name)
        if isinstance(value, Sampling):
            yield from _problems(value)
        elif field.name != "request_id":
            yield from _problem(field.name, value, field.type)


def _problem(name: str, value: Any, kind: types.Type) -> Iterator[str]:
    """Yield why a value is not allowed; nothing for one that is."""
    if isinstance(kind, types.UnionType) and not _matches(value, kind):
        closest = [one for one in kind.types if _has_type(value, one)]
        if not closest:
            yield f"{_shown(name)} is {_text(value)}; {_type_rule(kind)} is needed"
        else:
            yield from _problem(name, value, closest[0])
        return
    if isinstance(kind, types.UnionType):
        return
    if not _has_type(value, kind):
        yield f"{_shown(name)} is {_text(value)}; {_type_rule(kind)} is needed"
        return
    yield from _out_of_bounds(name, value, kind)
    if isinstance(kind, types.VarTupleType):
        for one in value:
            yield from _problem(_CONTAINER_OF.get(name, _item(name)), one, kind.item_type)
    elif isinstance(kind, types.TupleType):
        for one, item in zip(value, kind.item_types, strict=False):
            yield from _problem(_item(name), one, item)


def _item(name: str) -> str:
    return name if name.startswith("one of ") else f"one of {_shown(name)}"


def _matches(value: Any, kind: types.UnionType) -> bool:
    name = "value"
    return any(
        _has_type(value, one) and next(_problem(name, value, one), None) is None
        for one in kind.types
    )


def _has_type(value: Any, kind: types.Type) -> bool:
    check = _IS_A.get(type(kind))
    return check is None or check(value)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


_IS_A: Final[dict[type, Callable[[Any], bool]]] = {
    types.IntType: lambda value: isinstance(value, int) and not isinstance(value, bool),
    types.FloatType: _is_number,
    types.StrType: lambda value: isinstance(value, str),
    types.BoolType: lambda value: isinstance(value, bool),
    types.BytesType: lambda value: isinstance(value, bytes),
    types.NoneType: lambda value: value is None,
    types.VarTupleType: lambda value: isinstance(value, tuple | list),
    types.TupleType: lambda value: isinstance(value, tuple | list),
    types.DictType: lambda value: isinstance(value, dict),
    types.StructType: lambda value: isinstance(value, msgspec.Struct),
}

_TYPE_RULES: Final[dict[type, str]] = {
    types.IntType: "a whole number",
    types.FloatType: "a number",
    types.StrType: "a text",
    types.BoolType: "True or False",
    types.BytesType: "bytes",
    types.NoneType: "None",
    types.VarTupleType: "a list",
    types.TupleType: "a list",
    types.DictType: "a dictionary",
    types.StructType: "a prompt with images",
}


def _type_rule(kind: types.Type) -> str:
    kinds = kind.types if isinstance(kind, types.UnionType) else (kind,)
    return " or ".join(dict.fromkeys(_TYPE_RULES.get(type(one), "another value") for one in kinds))


def _out_of_bounds(name: str, value: Any, kind: types.Type) -> Iterator[str]:
    if isinstance(kind, types.IntType | types.FloatType):
        least, above, most, below = kind.ge, kind.gt, kind.le, kind.lt
        is_low = (least is not None and value < least) or (above is not None and value <= above)
        is_high = (most is not None and value > most) or (below is not None and value >= below)
        # A comparison with NaN is false.
        if is_low or is_high or value != value:  # noqa: PLR0124
            yield f"{_shown(name)} is {value}; {_range(least, above, most, below)}"
    elif isinstance(kind, types.StrType):
        if kind.pattern is not None and not re.search(kind.pattern, value):
            rule = _PATTERN_RULES.get(kind.pattern, "it has another form")
            yield f"{_text(value)} is not a valid {_CONTAINER_OF.get(name, _shown(name))}: {rule}"
        yield from _wrong_length(name, value, kind.min_length, kind.max_length, "characters")
    elif isinstance(kind, types.VarTupleType | types.DictType):
        yield from _wrong_length(name, value, kind.min_length, kind.max_length, "values")


def _range(
    least: float | None, above: float | None, most: float | None, below: float | None
) -> str:
    if least is None and above is not None:
        return f"it has to be above {_number(above)}" + _bound(" and at most", most)
    low, high = _bound(" from", least), _bound(" to", most) or _bound(" below", below)
    return f"it may be{low}{high}"


def _bound(words: str, bound: float | None) -> str:
    return "" if bound is None else f"{words} {_number(bound)}"


def _number(bound: float) -> str:
    """Return every digit of a whole number: a request may have exactly that one."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _wrong_length(
    name: str, value: Any, least: int | None, most: int | None, unit: str
) -> Iterator[str]:
    if least is not None and len(value) < least:
        yield f"{_shown(name)} is empty; at least {least} {unit.removesuffix('s')} is needed"
    if most is not None and len(value) > most:
        yield f"{_shown(name)} has {len(value)} {unit}; at most {most} are allowed"


def _shown(name: str) -> str:
    return _PARAMETERS.get(name, name)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
