"""Errors of HTTP requests: status and JSON body, in the shape of the endpoint's protocol.

The error code of a `LoradockError` is in the message and in the header `X-LoRADock-Code`.
"""

from typing import Final, Literal

import msgspec
from msgspec import Struct
from starlette.responses import Response

from loradock.client import LoradockError
from loradock.messages.errors import ErrorCode

CODE_HEADER: Final = "X-LoRADock-Code"
RETRY_AFTER_S: Final = 1

TYPES: Final[dict[int, str]] = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "TimeoutError",
    409: "ConflictError",
    413: "PayloadTooLargeError",
    415: "UnsupportedMediaTypeError",
    429: "RateLimitError",
    431: "HeadersTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
"""Status -> the `type` of its error body."""

STATUSES: Final[dict[ErrorCode, int]] = {
    ErrorCode.NO_ROOM: 503,
    ErrorCode.NOT_FOUND: 404,
    ErrorCode.DOES_NOT_FIT: 400,
    ErrorCode.DEVICE_OUT_OF_MEMORY: 503,
    ErrorCode.CONFIG_REFUSED: 400,
    ErrorCode.UNKNOWN_ADAPTER: 404,
    ErrorCode.NOT_RESIDENT: 503,
    ErrorCode.NOT_FINITE: 400,
    ErrorCode.PATH_NOT_ALLOWED: 403,
    ErrorCode.CONFLICT: 409,
    ErrorCode.ENGINE_GONE: 503,
    ErrorCode.MALFORMED: 400,
    ErrorCode.NOT_ALLOWED: 403,
    ErrorCode.LOG_UNAVAILABLE: 503,
    ErrorCode.OVERLOADED: 429,
    ErrorCode.NOT_SERVED: 400,
    ErrorCode.STOPPING: 503,
    ErrorCode.CONTEXT_EXCEEDED: 400,
}

_OPENAI: Final[dict[str, tuple[str, str]]] = {
    ErrorCode.CONTEXT_EXCEEDED: ("invalid_request_error", "context_length_exceeded"),
}
"""Error code -> the `type` and `code` by which clients of OpenAI recognize this failure."""

_RETRIED: Final = (429, 503)
"""Statuses after which the same request can succeed later."""


class ErrorInfo(Struct, frozen=True):
    """The error of a request; `code` is the HTTP status, or OpenAI's name for the failure."""

    message: str
    type: str
    param: str | None
    code: int | str


class ErrorBody(Struct, frozen=True):
    """The body of an answer that reports an error."""

    error: ErrorInfo


class UnauthorizedBody(Struct, frozen=True):
    """The body of an answer to a request without a valid key."""

    error: str = "Unauthorized"


class AnthropicErrorInfo(Struct, frozen=True):
    """The error of a request in Anthropic's protocol."""

    type: str
    message: str


class AnthropicError(Struct, frozen=True, tag_field="type", tag="error"):
    """The body of an answer that reports an error in Anthropic's protocol, and an event."""

    error: AnthropicErrorInfo


Shape = Literal["openai", "anthropic"]
"""The protocol that an endpoint's errors follow."""

ANTHROPIC_TYPES: Final[dict[int, str]] = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
}
"""Status -> the `type` of Anthropic's error; others are of the request."""


class HttpError(Exception):
    """A request that is answered with an error.

    `param` names the field of the request that caused it; `error_code` is LoRADock's own code.
    """

    def __init__(
        self, status: int, message: str, param: str | None = None, error_code: str = ""
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.error_code = error_code

    @property
    def body(self) -> ErrorBody:
        """The JSON body, which is also an event of a stream."""
        usual: tuple[str, int | str] = (TYPES.get(self.status, "Error"), self.status)
        kind, code = _OPENAI.get(self.error_code, usual)
        return ErrorBody(ErrorInfo(self.message, kind, self.param, code))

    @property
    def anthropic_body(self) -> AnthropicError:
        """The JSON body in Anthropic's protocol."""
        kind = ANTHROPIC_TYPES.get(self.status, "invalid_request_error")
        return AnthropicError(AnthropicErrorInfo(kind, self.message))


def model_not_found(name: str) -> HttpError:
    """Return the error for a model name that is neither the base model nor an adapter."""
    code = ErrorCode.UNKNOWN_ADAPTER.value
    message = f"{code}: the model {name!r} does not exist; GET /v1/models lists those that do"
    return HttpError(404, message, "model", code)


def prompt_too_long(found: str, context: int | None, param: str) -> HttpError:
    """Return the error for a prompt of which `found` is more than a request can contain.

    `context`: the tokens of the model's context, if they are known.
    """
    code = ErrorCode.CONTEXT_EXCEEDED.value
    limit = (
        "" if context is None else f"this model's maximum context length is {context} tokens, and "
    )
    message = f"{code}: {limit}the prompt is too long: {found}; shorten the prompt"
    return HttpError(400, message, param, code)


def error_of(error: LoradockError, param: str | None = None) -> HttpError:
    """Return the HTTP error for an error of the controller's client."""
    if error.code is ErrorCode.UNKNOWN_ADAPTER and param is None:
        param = "model"
    return HttpError(STATUSES[error.code], str(error), param, error.code.value)


def error_response(error: HttpError, shape: Shape = "openai") -> Response:
    """Return the answer that reports an error."""
    headers = {}
    if error.error_code:
        headers[CODE_HEADER] = error.error_code
    if error.status in _RETRIED:
        headers["Retry-After"] = str(RETRY_AFTER_S)
    content = msgspec.json.encode(error.body if shape == "openai" else error.anthropic_body)
    return Response(content, error.status, headers, media_type="application/json")


def unauthorized_response(shape: Shape = "openai") -> Response:
    """Return the answer to a request without a valid key."""
    if shape == "anthropic":
        message = "send a valid key, as x-api-key or as Authorization: Bearer"
        return error_response(HttpError(401, message), shape)
    content = msgspec.json.encode(UnauthorizedBody())
    headers = {"WWW-Authenticate": "Bearer"}
    return Response(content, 401, headers, media_type="application/json")


def failure() -> Response:
    """Return the answer for an internal error, which the server logs."""
    response = error_response(HttpError(500, "the gateway failed; its log contains the reason"))
    # The server closes the connection after it has logged the exception.
    response.headers["connection"] = "close"
    return response
