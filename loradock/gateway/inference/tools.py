"""The tools of a chat: what the request says about them, and how its output is read.

A forced call is a structure of the whole output. A call that the model is free to make is found in
its text, in the format that the chat template shows or that `--tool-call-parser` names.
"""

import secrets
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Protocol

import msgspec
from msgspec import Meta, Struct

from loradock.gateway.http.errors import HttpError
from loradock.gateway.inference.prompts import Json, decoded
from loradock.gateway.inference.sampling import ResponseFormat
from loradock.gateway.inference.service import finish_reason
from loradock.gateway.inference.tool_formats import FORMATS, Schemas
from loradock.gateway.inference.tool_parsers import (
    FORCED_ARGUMENTS,
    FORCED_NAME,
    Blocks,
    ForcedArguments,
    ForcedCalls,
    FreeCalls,
    Parser,
    PlainText,
    Step,
)
from loradock.messages.prompts import Structure
from loradock.messages.requests import TokensStreamed

TOOLS_MAX: Final = 1024

FunctionName = Annotated[str, Meta(min_length=1, max_length=256)]


class Function(Struct, frozen=True):
    """A function that the model can call; `parameters` is the JSON schema of its arguments.

    `strict` has no effect: forced calls always follow the schema, and others can't be made to.
    """

    name: FunctionName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, frozen=True):
    """A tool of the request; there are functions alone."""

    type: Literal["function"]
    function: Function


class NamedFunction(Struct, frozen=True):
    """The function of a `NamedChoice`."""

    name: FunctionName


class NamedChoice(Struct, frozen=True):
    """The one function that has to be called."""

    type: Literal["function"]
    function: NamedFunction


Choice = Literal["none", "auto", "required"] | NamedChoice


class ToolFields(Protocol):
    """The fields of a chat that its tools depend on."""

    tools: Json
    tool_choice: Json
    parallel_tool_calls: bool | None
    response_format: ResponseFormat | None


class ToolPlan(Struct, frozen=True):
    """The way in which the output of a chat is read.

    `mode`: `none` (all is text), `auto`, `required`, or `named`. `structure`: what a forced call
    has to follow.
    """

    mode: Literal["none", "auto", "required", "named"] = "none"
    format_name: str = ""
    schemas: Schemas = {}
    function: str = ""
    parallel: bool = True
    structure: Structure | None = None

    @property
    def tags(self) -> tuple[str, ...]:
        """The texts that have to be part of the output for its calls to be found."""
        if self.mode != "auto":
            return ()
        found = FORMATS[self.format_name]
        return tuple(tag for tag in (found.begin, found.end) if tag)

    def parser(self, blocks: Blocks) -> Parser:
        """Return a parser that adds one output to its blocks."""
        match self.mode:
            case "auto":
                found = FORMATS[self.format_name]
                return FreeCalls(blocks, found, self.schemas, parallel=self.parallel)
            case "required":
                return ForcedCalls(blocks)
            case "named":
                return ForcedArguments(blocks, self.function)
        return PlainText(blocks)

    def new_id(self) -> str:
        """Return an id for a call, in a form that the chat template accepts later."""
        of = FORMATS.get(self.format_name)
        if of is not None and of.short_ids:
            return secrets.token_hex(5)[:9]
        return f"call_{secrets.token_hex(12)}"


class OutputReader:
    """Reads one output of a chat into blocks."""

    def __init__(self, plan: ToolPlan) -> None:
        self.blocks: Final = Blocks(plan.new_id)
        self._parser = plan.parser(self.blocks)

    def read(self, chunk: TokensStreamed) -> list[Step]:
        """Return what a chunk changes; the one with the finish reason ends all blocks."""
        if chunk.text:
            self._parser.add(chunk.text)
        if chunk.finish_reason is not None:
            self._parser.finish()
            self.blocks.end()
        return self.blocks.take_steps()

    def finish_reason(self, chunk: TokensStreamed) -> str | None:
        """Return the protocol's name for how the output ended; None before its end."""
        reason = finish_reason(chunk)
        return "tool_calls" if reason == "stop" and self.blocks.calls else reason


def plan_of(body: ToolFields, format_name: str) -> ToolPlan:
    """Return how the output is read; raises `HttpError`.

    `format_name`: the format of the model's calls; empty if it is unknown.
    """
    try:
        return _plan_of(body, format_name)
    except RecursionError as error:
        raise HttpError(400, f"tools are nested too deeply: {error}", "tools") from error


def _plan_of(body: ToolFields, format_name: str) -> ToolPlan:
    schemas = {tool.function.name: _schema_of(tool.function) for tool in _tools_of(body)}
    choice = choice_of(body)
    if choice is None:
        choice = "auto" if schemas else "none"
    if choice == "none" or (choice == "auto" and not schemas):
        return ToolPlan()
    if not schemas:
        raise HttpError(400, "tool_choice needs tools, and there are none", "tool_choice")
    parallel = body.parallel_tool_calls is not False
    if choice == "auto":
        _check_free(body, format_name)
        return ToolPlan("auto", format_name, schemas, parallel=parallel)
    if choice == "required":
        structure = _structure(_schema_of_calls(schemas, 0 if parallel else 1))
        return ToolPlan("required", format_name, schemas, parallel=parallel, structure=structure)
    name = choice.function.name
    if name not in schemas:
        message = f"tool_choice must name one of the tools {', '.join(schemas)}, got {name!r}"
        raise HttpError(400, message, "tool_choice")
    structure = _structure(schemas[name])
    return ToolPlan("named", format_name, schemas, name, structure=structure)


def choice_of(body: ToolFields) -> Choice | None:
    """Return the choice of a request; raises `HttpError` for one that is not served."""
    value = decoded(body.tool_choice, "tool_choice")
    try:
        choice: Choice | None = msgspec.convert(value, Choice | None)
        return choice
    except msgspec.ValidationError as error:
        message = (
            "tool_choice must be 'none', 'auto', 'required' or "
            '{"type": "function", "function": {"name": ...}}: ' + str(error)
        )
        raise HttpError(400, message, "tool_choice") from error


def _tools_of(body: ToolFields) -> list[Tool]:
    """Return the tools of a request; raises `HttpError` for those that are no functions."""
    value = decoded(body.tools, "tools")
    try:
        tools: list[Tool] = msgspec.convert(
            value or [], Annotated[list[Tool], Meta(max_length=TOOLS_MAX)]
        )
    except msgspec.ValidationError as error:
        raise HttpError(400, f"tools must be functions with a name: {error}", "tools") from error
    names: set[str] = set()
    for tool in tools:
        name = tool.function.name
        if name in names:
            raise HttpError(400, f"names of tools must differ, got {name!r} twice", "tools")
        names.add(name)
    return tools


def _schema_of(function: Function) -> Mapping[str, Any]:
    """Return the schema of a function's arguments, which are an object."""
    schema = function.parameters or {"properties": {}, "additionalProperties": False}
    if schema.get("type", "object") != "object":
        message = f"parameters of {function.name!r} must be of type object, got {schema['type']!r}"
        raise HttpError(400, message, "tools")
    return {"type": "object", **schema}


def _check_free(body: ToolFields, format_name: str) -> None:
    if not format_name:
        message = (
            "the chat template shows no known format of tool calls, so calls can't be found in the "
            f"output; start the gateway with --tool-call-parser ({', '.join(FORMATS)}), force a "
            "call with tool_choice 'required', or send tool_choice 'none' and read the text"
        )
        raise HttpError(400, message, "tool_choice")
    if body.response_format is not None and body.response_format.type != "text":
        message = (
            "response_format applies to the whole output, so the model could call no tool; send "
            "tool_choice 'none' or 'required', or no response_format"
        )
        raise HttpError(400, message, "response_format")


def _structure(schema: Mapping[str, Any]) -> Structure:
    return Structure("json_schema", msgspec.json.encode(schema).decode())


def _schema_of_calls(schemas: Schemas, calls_max: int) -> dict[str, Any]:
    """Return the schema of a list of calls; `calls_max` 0: as many as the model makes."""
    # Schemas refer to their own definitions from their root, which is elsewhere in the list's.
    definitions = {
        str(number): _rebased(schema, f"#/$defs/{number}")
        for number, schema in enumerate(schemas.values())
    }
    calls = [
        {
            "type": "object",
            "properties": {
                FORCED_NAME: {"const": name},
                FORCED_ARGUMENTS: {"$ref": f"#/$defs/{number}"},
            },
            "required": [FORCED_NAME, FORCED_ARGUMENTS],
            "additionalProperties": False,
        }
        for number, name in enumerate(schemas)
    ]
    bound = {"maxItems": calls_max} if calls_max else {}
    items = {"anyOf": calls}
    return {"type": "array", "minItems": 1, **bound, "items": items, "$defs": definitions}


def _rebased(value: Any, root: str) -> Any:
    """Return a schema whose references begin at `root` instead of `#`."""
    if isinstance(value, list):
        return [_rebased(one, root) for one in value]
    if not isinstance(value, dict):
        return value
    changed = {name: _rebased(one, root) for name, one in value.items()}
    reference = value.get("$ref")
    if isinstance(reference, str) and reference.startswith("#"):
        changed["$ref"] = root + reference[1:]
    return changed
