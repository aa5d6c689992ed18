"""The OpenAPI document, generated from the types of the endpoints."""

import re
from collections.abc import Sequence
from typing import Any, Final

import msgspec

from loradock.gateway.http.endpoint import Endpoint
from loradock.gateway.http.errors import AnthropicError, ErrorBody, UnauthorizedBody
from loradock.messages import VERSION

OPENAPI: Final = "3.1.0"
_REF: Final = "#/components/schemas/{name}"
_PARAMETER: Final = re.compile(r"\{(\w+)(?::\w+)?\}")
_BODY_ERRORS: Final = (400, 408, 413, 415, 500)
_KEY: Final = "bearer"


def openapi_document(
    endpoints: Sequence[Endpoint], *, updating: bool, root_path: str = ""
) -> dict[str, Any]:
    """Return the document; `updating`: clients can change adapters."""
    types = [kind for one in endpoints for kind in (one.body, one.answer, one.failure) if kind]
    types += [ErrorBody, UnauthorizedBody, AnthropicError]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = dict(zip(map(id, types), schemas, strict=True))
    paths: dict[str, Any] = {}
    for one in endpoints:
        if one.access != "updating" or updating:
            path = _PARAMETER.sub(r"{\1}", one.path)
            paths.setdefault(path, {})[one.method.lower()] = _operation(one, by_type)
    return {
        "openapi": OPENAPI,
        "info": {"title": "LoRADock", "version": VERSION},
        "servers": [{"url": root_path or "/"}],
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {_KEY: {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(endpoint: Endpoint, schemas: dict[int, Any]) -> dict[str, Any]:
    operation: dict[str, Any] = {
        "operationId": f"{endpoint.method.lower()}{re.sub(r'[^a-zA-Z0-9]+', '_', endpoint.path)}",
        "summary": endpoint.summary,
        "responses": _responses(endpoint, schemas),
    }
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}
        for name in _PARAMETER.findall(endpoint.path)
    ]
    if parameters:
        operation["parameters"] = parameters
    if endpoint.body is not None:
        content = {"application/json": {"schema": schemas[id(endpoint.body)]}}
        operation["requestBody"] = {"required": True, "content": content}
    if endpoint.access != "public":
        operation["security"] = [{_KEY: []}, {}]
    return operation


def _responses(endpoint: Endpoint, schemas: dict[int, Any]) -> dict[str, Any]:
    answer: dict[str, Any] = {"description": endpoint.summary}
    if endpoint.answer is not None:
        answer["content"] = {"application/json": {"schema": schemas[id(endpoint.answer)]}}
    elif endpoint.media_type == "text/event-stream":
        answer["content"] = {endpoint.media_type: {}}
    elif endpoint.media_type != "application/json":
        answer["content"] = {endpoint.media_type: {"schema": {"type": "string"}}}
    if endpoint.streams:
        answer["content"]["text/event-stream"] = {}
    responses: dict[str, Any] = {"200": answer}
    statuses = {*endpoint.errors, *(_BODY_ERRORS if endpoint.body is not None else ())}
    for status in sorted(statuses):
        responses[str(status)] = {"description": "An error"}
        if endpoint.path not in ("/health", "/ping"):
            body = ErrorBody if endpoint.shape == "openai" else AnthropicError
            error = schemas[id(body)]
            if endpoint.failure:
                error = {"anyOf": [error, schemas[id(endpoint.failure)]]}
            responses[str(status)]["content"] = {"application/json": {"schema": error}}
    if endpoint.access != "public":
        refused = UnauthorizedBody if endpoint.shape == "openai" else AnthropicError
        unauthorized = {"application/json": {"schema": schemas[id(refused)]}}
        responses["401"] = {"description": "No valid key", "content": unauthorized}
    return responses
