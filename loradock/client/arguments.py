"""Arguments of requests: images and sampling parameters, and what is wrong with a value.

A value outside the bounds of its message's field is refused before a frame is sent, by its name
and with what is allowed. A file of an image is read no further than the bounds of a request; the
engine refuses files of other formats.
"""

import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final, TypedDict

import msgspec
from msgspec import inspect as types

from loradock.messages.errors import Malformed
from loradock.messages.ids import NAME_PATTERN, REQUEST_PATTERN
from loradock.messages.prompts import (
    IMAGE_BYTES_MAX,
    IMAGES_BYTES_MAX,
    IMAGES_MAX,
    Image,
    Inputs,
    MultimodalPrompt,
    Prompt,
    Sampling,
    Structure,
    TextPrompt,
)

ImageSource = bytes | str | os.PathLike[str]
"""An image file's bytes, or its path on this machine."""

_SOURCES: Final = (bytes, str, os.PathLike)


class SamplingOptions(TypedDict, total=False):
    """The fields of `loradock.messages.prompts.Sampling`, as keywords."""

    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    stop: tuple[str, ...]
    min_p: float
    presence_penalty: float
    frequency_penalty: float
    repetition_penalty: float
    logit_bias: tuple[tuple[int, float], ...]
    min_tokens: int
    stop_token_ids: tuple[int, ...]
    ignore_eos: bool
    include_stop: bool
    logprobs: int | None
    prompt_logprobs: int | None
    n: int
    structure: Structure | None
    skip_special_tokens: bool


def inputs_of(texts: str | Iterable[TextPrompt]) -> Inputs:
    """Return the texts as a tuple; a single string is one text, not its characters."""
    return (texts,) if isinstance(texts, str) else tuple(texts)


def with_images(prompt: TextPrompt, images: ImageSource | Iterable[ImageSource]) -> Prompt:
    """Return the prompt with its images, or the prompt itself if there are none.

    Raises `Malformed` for what a request can't hold, and `OSError` for a file that can't be read.
    """
    sources = (images,) if isinstance(images, _SOURCES) else tuple(images)
    if not sources:
        return prompt
    if not isinstance(prompt, str):
        raise Malformed(
            "a prompt with images must be a string, which has a placeholder for each of them, got "
            "token ids"
        )
    if len(sources) > IMAGES_MAX:
        raise Malformed(f"a prompt must have at most {IMAGES_MAX} images, got {len(sources)}")
    read, size = [], 0
    for number, source in enumerate(sources, 1):
        read.append(_image(f"image {number}", source))
        size += len(read[-1])
        if size > IMAGES_BYTES_MAX:
            raise Malformed(
                f"the images of a prompt must have at most {IMAGES_BYTES_MAX} bytes together, the "
                f"first {number} have {size}"
            )
    return MultimodalPrompt(prompt, tuple(read))


def _image(name: str, source: ImageSource) -> Image:
    if not isinstance(source, _SOURCES):
        raise Malformed(f"{name} must be bytes or a path, got a {type(source).__name__}")
    if not isinstance(source, bytes):
        name = f"{name}, {os.fspath(source)!r},"
        with open(source, "rb") as file:
            source = file.read(IMAGE_BYTES_MAX + 1)
    if not source:
        raise Malformed(f"{name} is empty")
    if len(source) > IMAGE_BYTES_MAX:
        raise Malformed(f"{name} must have at most {IMAGE_BYTES_MAX} bytes, and has more")
    return source


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
    if isinstance(kind, types.UnionType):
        closest = [one for one in kind.types if _has_type(value, one)]
        if any(next(_problem(name, value, one), None) is None for one in closest):
            return
        kind = closest[0] if closest else kind
    if not _has_type(value, kind):
        yield f"{_shown(name)} must be {_type_rule(kind)}, got {_text(value)}"
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


def _has_type(value: Any, kind: types.Type) -> bool:
    if isinstance(kind, types.UnionType):
        return any(_has_type(value, one) for one in kind.types)
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
    types.IntType: "an integer",
    types.FloatType: "a number",
    types.StrType: "a string",
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
        low, above, high, below = kind.ge, kind.gt, kind.le, kind.lt
        is_low = (low is not None and value < low) or (above is not None and value <= above)
        is_high = (high is not None and value > high) or (below is not None and value >= below)
        # A comparison with NaN is false.
        if is_low or is_high or value != value:  # noqa: PLR0124
            bounds = {"at least ": low, "above ": above, "at most ": high, "below ": below}
            rules = [words + _number(n) for words, n in bounds.items() if n is not None]
            yield f"{_shown(name)} must be {' and '.join(rules)}, got {value}"
    elif isinstance(kind, types.StrType):
        if kind.pattern is not None and not re.search(kind.pattern, value):
            rule = _PATTERN_RULES.get(kind.pattern, "it has another form")
            yield f"{_text(value)} is not a valid {_CONTAINER_OF.get(name, _shown(name))}: {rule}"
        yield from _wrong_length(name, value, kind.min_length, kind.max_length, "characters")
    elif isinstance(kind, types.VarTupleType | types.DictType):
        yield from _wrong_length(name, value, kind.min_length, kind.max_length, "values")


def _number(bound: float) -> str:
    """Return every digit of an integer: a request can have exactly that one."""
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _wrong_length(
    name: str, value: Any, least: int | None, most: int | None, unit: str
) -> Iterator[str]:
    if least is not None and len(value) < least:
        unit = unit.removesuffix("s") if least == 1 else unit
        yield f"{_shown(name)} must have at least {least} {unit}, got {len(value)}"
    if most is not None and len(value) > most:
        yield f"{_shown(name)} must have at most {most} {unit}, got {len(value)}"


def _shown(name: str) -> str:
    return _PARAMETERS.get(name, name)


def _text(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN_CHARACTERS else f"{text[: _SHOWN_CHARACTERS - 3]}..."
