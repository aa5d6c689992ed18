"""The structure of an answer, under the names of the OpenAI protocol and of vLLM."""

from operator import attrgetter
from typing import Any, Final

import msgspec
from msgspec import UNSET, Struct, UnsetType

from loradock.gateway.http.errors import HttpError
from loradock.messages.prompts import Structure


class JsonSchema(Struct, frozen=True, forbid_unknown_fields=True):
    """The schema of a `response_format`; it is always followed, whether `strict` or not."""

    name: str
    schema: msgspec.Raw | UnsetType = UNSET
    strict: bool | None = None
    description: str | None = None


class ResponseFormat(Struct, frozen=True, forbid_unknown_fields=True):
    """`text`, `json_object` or `json_schema`."""

    type: str
    json_schema: JsonSchema | None = None


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True):
    """One of the kinds of vLLM; a grammar and structural tags are not served."""

    json: msgspec.Raw | UnsetType = UNSET
    regex: str | None = None
    choice: list[str] | None = None
    json_object: bool | None = None
    grammar: str | None = None
    structural_tag: msgspec.Raw | UnsetType = UNSET


_fields: Final = attrgetter(
    *("response_format", "structured_outputs", "guided_json", "guided_regex", "guided_choice")
)
_NONE: Final = (None, None, UNSET, None, None)


def structure_of(body: Any) -> Structure | None:
    """Return the structure that a request has; raises `HttpError` for more than one."""
    if _fields(body) == _NONE:
        return None
    found = {name: one for name, one in _structures(body).items() if one is not None}
    if len(found) > 1:
        names = " and ".join(sorted(found))
        raise HttpError(400, f"{names} exclude each other", sorted(found)[0])
    return next(iter(found.values()), None)


def _structures(body: Any) -> dict[str, Structure | None]:
    outputs: StructuredOutputs = body.structured_outputs or StructuredOutputs()
    if outputs.grammar is not None or outputs.structural_tag is not UNSET:
        message = "structured_outputs with a grammar or structural tags are not served"
        raise HttpError(400, message, "structured_outputs")
    return {
        "response_format": _of_response_format(body.response_format),
        "structured_outputs.json": _schema(outputs.json),
        "structured_outputs.regex": _regex(outputs.regex),
        "structured_outputs.choice": _choice(outputs.choice),
        "structured_outputs.json_object": _any_object() if outputs.json_object else None,
        "guided_json": _schema(body.guided_json),
        "guided_regex": _regex(body.guided_regex),
        "guided_choice": _choice(body.guided_choice),
    }


def _of_response_format(wanted: ResponseFormat | None) -> Structure | None:
    if wanted is None or wanted.type == "text":
        return None
    if wanted.type == "json_object":
        return _any_object()
    if wanted.type != "json_schema":
        message = (
            f"response_format {wanted.type!r} is not served; text, json_object and json_schema are"
        )
        raise HttpError(400, message, "response_format")
    if wanted.json_schema is None or wanted.json_schema.schema is UNSET:
        raise HttpError(
            400, "response_format json_schema needs json_schema.schema", "response_format"
        )
    return _schema(wanted.json_schema.schema)


def _schema(raw: msgspec.Raw | UnsetType) -> Structure | None:
    """Return the structure of a schema, which may be JSON within a string."""
    if raw is UNSET:
        return None
    text = bytes(raw).decode().strip()
    if text == "null":
        return None
    if text.startswith('"'):
        text = msgspec.json.decode(text, type=str)
    return Structure("json_schema", text)


def _any_object() -> Structure:
    return Structure("json_schema")


def _regex(pattern: str | None) -> Structure | None:
    return None if pattern is None else Structure("regex", pattern)


def _choice(choices: list[str] | None) -> Structure | None:
    return None if choices is None else Structure("choice", choices=tuple(choices))
