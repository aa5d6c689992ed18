"""Options: each is declared once, as an annotated field of a Struct or a frozen dataclass.

`option` annotates the field. From this one declaration come the command line
(`loradock.cli.options`), the configuration file and the environment (through the command line), the
checks of values, and docs/options.md. msgspec makes the JSON that a process gets of the same type.
"""

import dataclasses
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Final, Literal, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta, Struct

Unit = Literal["", "bytes", "seconds"]
"""Unit of a number. Sizes can be written with a unit, and `_ms` fields are set in seconds."""

ENVIRONMENT_PREFIX: Final = "LORADOCK_"

AUTOMATIC: Final = 0
"""Stands for the word auto until a command has replaced it; never a valid number of its option."""

_UNIT_ENDS: Final = ("_ms", "_s", "_max")
_METAVARS: Final = {"bytes": "SIZE", "seconds": "SECONDS"}


class Declaration(Struct, frozen=True):
    """Properties of an option beyond its field's name, type, default and bounds."""

    flag: str = ""
    flags: str = ""
    former: str = ""
    metavar: str = ""
    unit: Unit = ""
    choices: tuple[Any, ...] = ()
    names: tuple[tuple[str, int], ...] = ()
    default: Any = None
    panel: str = ""
    is_common: bool = False
    is_secret: bool = False
    is_automatic: bool = False


def option(
    help_: str, ge: int | float | None = None, le: int | float | None = None, **more: Any
) -> Any:
    """Return the annotation of an option's field; `more` are fields of `Declaration`.

    `ge` and `le` bound the value, in the unit of the field. `default`: what a command uses if it
    differs from the field's. `names`: the numbers that can be set, by their names. `flags`: all
    names if there are several, between commas, or with a slash before the name that switches off.
    `former`: the flag of earlier versions, which errors correct. `is_common`: shown by `--help`,
    not only by `--help-all`. A secret has no environment variable. `is_automatic`: a command takes
    the word auto, as the number `AUTOMATIC`, and replaces it.
    """
    return Meta(description=help_, ge=ge, le=le, extra={"option": Declaration(**more)})


class Option(Struct, frozen=True):
    """An option as its field declares it.

    `kind` is the type of one value. `encoded` is the field's name in JSON. A repeated option has
    several values, in a tuple or, with `is_pairs`, in a dict of `KEY=VALUE` arguments.
    `is_optional`: the value is None if the option is not given. `variable`: the environment
    variable that sets it; empty if none does.
    """

    field: str
    encoded: str
    flag: str
    flags: str
    former: str
    variable: str
    kind: Any
    default: Any
    help: str
    metavar: str
    unit: Unit
    choices: tuple[Any, ...]
    names: tuple[tuple[str, int], ...]
    panel: str
    ge: int | float | None
    le: int | float | None
    is_repeated: bool
    is_pairs: bool
    is_optional: bool
    is_common: bool
    is_automatic: bool = False

    @property
    def is_scaled(self) -> bool:
        """True if the field is in milliseconds, and the option in seconds."""
        return self.unit == "seconds" and self.field.endswith("_ms")

    def parse(self, value: Any) -> Any:
        """Return the field's value for what a command line or a file has; raises `ValueError`."""
        if value is None and not self.is_repeated:
            return None
        if self.is_pairs:
            return self._pairs(value or ()) or (None if self.is_optional else {})
        if self.is_repeated:
            return tuple(value or ()) or (None if self.is_optional else ())
        if self.is_automatic and isinstance(value, str):
            return AUTOMATIC if value == "auto" else self.parse_text(value)
        if self.names:
            # An unknown name is no integer, so it is a problem.
            value = dict(self.names).get(value, value)
        elif self.unit == "bytes":
            value = parse_size(str(value))
        elif self.is_scaled:
            value = round(1000 * float(value))
        if reason := self.problem(value):
            raise ValueError(f"{self.flag} must be {reason}, got {value}")
        return value

    def parse_text(self, text: str) -> Any:
        """Return the field's value for `text`; raises `ValueError`."""
        if self.kind is int and self.unit != "bytes" and not self.names:
            try:
                return self.parse(float(text) if self.is_scaled else int(text))
            except (ValueError, OverflowError) as error:
                raise ValueError(f"{self.flag} must be {self.needed}, got {text}") from error
        return self.parse(text)

    def _pairs(self, texts: Iterable[str]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in map(self._pair, texts):
            if key in found:
                raise ValueError(f"{self.flag} has {key} twice: {found[key]} and {value}")
            found[key] = value
        if reason := self.problem(found):
            raise ValueError(f"{self.flag} must be {self.metavar}, with {reason}, got {found}")
        return found

    def _pair(self, text: str) -> tuple[str, Any]:
        key, _, value = text.partition("=")
        is_wrong = self.kind is int and not (value.isdecimal() and value.isascii())
        if not key or not value or is_wrong:
            raise ValueError(f"{self.flag} must be {self.metavar}, got {text!r}")
        return key, self.kind(value)

    def problem(self, value: Any) -> str:
        """Return what a field's value must be; empty if it is that."""
        if value is None and self.is_optional:
            return ""
        if self.is_pairs:
            return next(filter(None, map(self._problem_of_one, dict(value or {}).values())), "")
        if self.is_repeated:
            return "" if isinstance(value, tuple) else "a list"
        return self._problem_of_one(value)

    def _problem_of_one(self, value: Any) -> str:
        kind = str if self.choices and not isinstance(self.choices[0], int) else self.kind
        kind = (int, float) if kind is float else kind
        is_fit = isinstance(value, kind) and (kind is bool or not isinstance(value, bool))
        if is_fit and self.choices:
            is_fit = value in self.choices
        if is_fit and self.kind in (int, float):
            is_fit = (self.ge is None or value >= self.ge) and (self.le is None or value <= self.le)
        return "" if is_fit else self.needed

    @property
    def needed(self) -> str:
        """Description of the allowed values, for an error: `an integer from 1 to 1024`."""
        if self.choices or self.names:
            allowed = self.choices or dict(self.names)
            return f"one of {', '.join(map(str, allowed))}"
        if self.kind is bool:
            return "true or false"
        if self.kind is str:
            return "a string"
        name = "an integer" if self.kind is int else "a number"
        if self.is_scaled:
            name = "a number of seconds"
        least, most = map(self._bound, (self.ge, self.le))
        if not least:
            return f"{name} of at most {most}" if most else name
        return f"{name} from {least} to {most}" if most else f"{name} of at least {least}"

    def _bound(self, bound: float | None) -> str:
        if bound is None:
            return ""
        return f"{bound / 1000:g}" if self.is_scaled else str(bound)

    def shown(self, value: Any) -> str:
        """Return a field's value for people: `4 GiB`, `0.25 s`, `on`; empty for no value."""
        if value is None or value in ((), {}, "") or isinstance(value, bool):
            return "on" if value is True else ""
        if self.names:
            return next((name for name, number in self.names if number == value), str(value))
        if self.unit == "bytes":
            return format_size(value)
        if self.unit == "seconds":
            return f"{value / 1000 if self.is_scaled else value:g} s"
        return str(value)


@cache
def options_of(owner: type) -> tuple[Option, ...]:
    """Return the options that a Struct or dataclass declares, in the order of its fields."""
    return tuple(_options(owner))


def _options(owner: type) -> Iterator[Option]:
    hints = get_type_hints(owner, include_extras=True)
    is_struct = issubclass(owner, Struct)
    fields: Any = msgspec.structs.fields(owner) if is_struct else dataclasses.fields(owner)
    for field in fields:
        kind, metas = _annotations(hints[field.name])
        if any("option" in (meta.extra or {}) for meta in metas):
            encoded = getattr(field, "encode_name", field.name)
            yield _option(owner, field.name, encoded, kind, _default(field), metas)


def _annotations(hint: Any) -> tuple[Any, list[Meta]]:
    """Return an annotated type, and what msgspec knows about it."""
    if get_origin(hint) is not Annotated:
        return hint, []
    kind, *metas = get_args(hint)
    return kind, [meta for meta in metas if isinstance(meta, Meta)]


def _default(field: Any) -> Any:
    factory = field.default_factory
    if factory not in (msgspec.NODEFAULT, dataclasses.MISSING):
        return factory()
    missing = (msgspec.NODEFAULT, dataclasses.MISSING)
    return msgspec.NODEFAULT if field.default in missing else field.default


def _option(
    owner: type, name: str, encoded: str, hint: Any, default: Any, metas: list[Meta]
) -> Option:
    [meta] = (meta for meta in metas if "option" in (meta.extra or {}))
    extra: Declaration = (meta.extra or {})["option"]
    alternatives = get_args(hint) if get_origin(hint) is UnionType else (hint,)
    kind = alternatives[0]
    origin = get_origin(kind)
    is_pairs, is_repeated = origin is dict, origin in (dict, tuple)
    if is_repeated:
        kind, of_values = _annotations(get_args(kind)[1 if is_pairs else 0])
        metas = [*metas, *of_values]
    usual = "NUMBER" if kind in (int, float) else ""
    metavar = extra.metavar or _METAVARS.get(extra.unit, usual)
    flag = extra.flag or flag_of(name, is_repeated)
    has_variable = getattr(owner, "VARIABLES", True) and not extra.is_secret
    return Option(
        field=name,
        encoded=encoded,
        flag=flag,
        flags=extra.flags,
        former=extra.former,
        variable=ENVIRONMENT_PREFIX + flag[2:].replace("-", "_").upper() if has_variable else "",
        kind=kind,
        default=default if extra.default is None else extra.default,
        help=meta.description or "",
        metavar=metavar,
        unit=extra.unit,
        choices=extra.choices or (get_args(kind) if get_origin(kind) is Literal else ()),
        names=extra.names,
        panel=extra.panel or getattr(owner, "PANEL", "Options"),
        ge=next((meta.ge for meta in metas if meta.ge is not None), None),
        le=next((meta.le for meta in metas if meta.le is not None), None),
        is_repeated=is_repeated,
        is_pairs=is_pairs,
        is_optional=NoneType in alternatives,
        is_common=extra.is_common,
        is_automatic=extra.is_automatic,
    )


def flag_of(field: str, is_repeated: bool = False) -> str:
    """Return the flag of a field: without the end that names a unit, and in the singular."""
    name = field.removesuffix("s") if is_repeated else field
    for end in _UNIT_ENDS:
        name = name.removesuffix(end)
    return f"--{name.replace('_', '-')}"


def check_options(
    config: object, owner: type | None = None, fields: Collection[str] | None = None
) -> None:
    """Raise `ValueError` if a field has a wrong type, exceeds a bound or is not a choice.

    `owner`: the class that declares the options, by default the class of `config`; `fields`: the
    fields to check, by default all.
    """
    for found in options_of(owner or type(config)):
        if fields is None or found.field in fields:
            value = getattr(config, found.field)
            if reason := found.problem(value):
                raise ValueError(f"{found.field} must be {reason}, got {value!r}")


def build(owner: type, values: Mapping[str, Any]) -> Any:
    """Return an `owner` of what a command line has, by field; raises `ValueError`."""
    return owner(**{one.field: one.parse(values[one.field]) for one in options_of(owner)})


_NUMBER: Final = re.compile(r"([0-9]+(?:\.[0-9]+)?) ?([A-Za-z]*)")
_SIZE_END: Final = 1 << 63
_BINARY: Final = ("B", "KiB", "MiB", "GiB", "TiB")
_UNITS: Final = {
    "": 1,
    **{unit.lower(): 1024**power for power, unit in enumerate(_BINARY)},
    **{unit: 1000**power for power, unit in enumerate(("b", "kb", "mb", "gb", "tb"))},
}


def parse_size(text: str) -> int:
    """Return the bytes of `4096`, `64MiB`, `1.5GiB` or `2 GB`, in upper or lower case.

    Raises `ValueError` for another unit, a fraction of a byte, and sizes from 8 EiB on. `64M` is
    refused: it stands for 1000**2 bytes in one program and for 1024**2 in another.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is not a size; write bytes or for example 64MiB or 1.5GiB")
    number, unit = match.groups()
    if unit.lower() not in _UNITS:
        raise ValueError(
            f"{text!r} has the unit {unit!r}; use KiB, MiB, GiB, TiB (powers of 1024) or kB, MB, "
            "GB, TB (powers of 1000)"
        )
    size = Fraction(number) * _UNITS[unit.lower()]
    if size >= _SIZE_END:
        raise ValueError(f"{text!r} is more than any machine has")
    if size.denominator != 1:
        raise ValueError(f"{text!r} is {float(size)} bytes, which is not an integer")
    return int(size)


def format_size(size_bytes: int) -> str:
    """Return a size with three digits and a binary unit: `512 B`, `1.5 KiB`, `4 GiB`."""
    power = 0
    # 999.5 and more would round to four digits, so the next unit is used.
    while power < len(_BINARY) - 1 and size_bytes >= 999.5 * 1024**power:
        power += 1
    number = size_bytes / 1024**power
    digits = f"{number:.0f}" if number >= 100 else f"{number:.3g}"
    return f"{digits} {_BINARY[power]}"
