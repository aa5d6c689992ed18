"""The formats in which models write calls of tools, by the names that vLLM gives their parsers.

A format has a tag that begins calls, one that ends them or none, and a function that reads what is
between. Nothing that it can't read is a call.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, NamedTuple

Schemas = Mapping[str, Mapping[str, Any]]
"""Name of a tool -> the JSON schema of its arguments."""


class Call(NamedTuple):
    """A call of a tool; `arguments` is a JSON object."""

    name: str
    arguments: str


class Format(NamedTuple):
    """How a model writes calls.

    `end` is empty if calls extend to the next `begin` or to the end of the output. `bare`: an
    output that begins with this consists of calls, without `begin`. `short_ids`: the chat template
    accepts ids of nine letters and digits alone.
    """

    begin: str
    end: str
    read: Callable[[str, Schemas], Sequence[Call] | None]
    bare: str = ""
    short_ids: bool = False


def read_objects(body: str, schemas: Schemas) -> Sequence[Call] | None:
    """Read JSON objects with name and arguments, in a list, or separated by `;` or spaces."""
    found: list[Any] = []
    rest = body.strip()
    try:
        while rest:
            value, end = _JSON.raw_decode(rest)
            found += value if isinstance(value, list) else [value]
            rest = rest[end:].lstrip("; \t\r\n")
    except (ValueError, RecursionError):
        return None
    calls = [_call_of(value, schemas) for value in found]
    known = [call for call in calls if call is not None]
    return known if known and len(known) == len(calls) else None


def _call_of(value: Any, schemas: Schemas) -> Call | None:
    if not isinstance(value, dict):
        return None
    given = value.get("arguments", value.get("parameters", {}))
    return _call(value.get("name"), given, schemas)


def _call(name: Any, arguments: Any, schemas: Schemas) -> Call | None:
    """Return a call of a known tool; None if it is none or can't be sent."""
    if not isinstance(name, str) or name not in schemas or not isinstance(arguments, dict):
        return None
    text = json.dumps(arguments, ensure_ascii=False)
    # Half of a surrogate pair is valid in JSON and in no answer.
    return Call(name, text) if _is_encodable(text) else None


def _is_encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not JSON")


# Models write line breaks into strings as they are.
_JSON: Final = json.JSONDecoder(strict=False, parse_constant=_refuse_constant)

_NAMED: Final = re.compile(
    r"\s*(?P<name>[\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)"
)


def _read_mistral(body: str, schemas: Schemas) -> Sequence[Call] | None:
    """Read a list of objects, or a name followed by its arguments."""
    named = _NAMED.match(body)
    if named is None:
        return read_objects(body, schemas)
    try:
        arguments, end = _JSON.raw_decode(body, named.end())
    except (ValueError, RecursionError):
        return None
    call = _call(named["name"], arguments, schemas)
    return [call] if call is not None and not body[end:].strip() else None


_FUNCTION: Final = re.compile(r"\s*<function=([^>\s]+)>(.*?)</function>\s*", re.DOTALL)
_PARAMETER: Final = re.compile(r"\s*<parameter=([^>\s]+)>(.*?)</parameter>\s*", re.DOTALL)


def _read_elements(body: str, schemas: Schemas) -> Sequence[Call] | None:
    """Read elements `<function=NAME>` with elements `<parameter=NAME>`."""
    function = _FUNCTION.fullmatch(body)
    if function is None or function[1] not in schemas:
        return None
    properties = schemas[function[1]].get("properties")
    arguments: dict[str, Any] = {}
    position, text = 0, function[2]
    while parameter := _PARAMETER.match(text, position):
        value = parameter[2].removeprefix("\n").removesuffix("\n")
        schema = properties.get(parameter[1]) if isinstance(properties, dict) else None
        arguments[parameter[1]] = _value(value, _types(schema))
        position = parameter.end()
    call = _call(function[1], arguments, schemas)
    return [call] if call is not None and not text[position:].strip() else None


def _types(schema: Any) -> set[str]:
    """Return the types that a schema allows; empty if it names none."""
    if not isinstance(schema, dict):
        return set()
    types = schema.get("type", [])
    found = {types} if isinstance(types, str) else {*types} if isinstance(types, list) else set()
    for key in ("anyOf", "oneOf"):
        options = schema.get(key)
        for option in options if isinstance(options, list) else ():
            found |= _types(option)
    return found


def _value(text: str, types: set[str]) -> Any:
    """Return a parameter's value; one that is not of an allowed type stays a string."""
    if "null" in types and text.strip().lower() in ("null", "none"):
        return None
    if not types or "string" in types:
        return text
    try:
        # Python's spelling of booleans is common.
        return _JSON.decode(text.lower() if "boolean" in types else text)
    except (ValueError, RecursionError):
        return text


HERMES: Final = "hermes"

FORMATS: Final[dict[str, Format]] = {
    HERMES: Format("<tool_call>", "</tool_call>", read_objects),
    "llama3_json": Format("<|python_tag|>", "", read_objects, bare="{"),
    "mistral": Format("[TOOL_CALLS]", "", _read_mistral, short_ids=True),
    "qwen3_coder": Format("<tool_call>", "</tool_call>", _read_elements),
}
"""Name -> format."""


def find_format(template: str) -> str:
    """Return the name of the format that a chat template shows; empty if it shows none of these."""
    if "<function=" in template and "<tool_call>" in template:
        return "qwen3_coder"
    # GLM's templates have the tag and no JSON in it.
    if "<tool_call>" in template and "<arg_key>" not in template:
        return HERMES
    if "[TOOL_CALLS]" in template:
        return "mistral"
    is_llama = '{"name":' in template and '"parameters":' in template
    return "llama3_json" if "<|python_tag|>" in template or is_llama else ""
