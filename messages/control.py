"""Requests about the server itself, and the replies: its requests, its settings, its end.

They are never logged. A repeated request is executed again, with the same result.
"""

from typing import Annotated, Literal

from msgspec import Meta, field

from loradock.messages.base import ReplyMessage, RequestMessage, Value
from loradock.messages.ids import RequestId, TimeoutMs

LIST_REQUESTS_MAX = 1000
"""Bound on the requests of one `RequestsListed`."""

PRELOAD = "preload-"
"""The ids of the server's own requests at its start begin with this."""

Setting = Annotated[str, Meta(min_length=1, max_length=64)]


class ListRequests(RequestMessage, frozen=True):
    """List the pending requests, the oldest first."""

    limit: Annotated[int, Meta(ge=1, le=LIST_REQUESTS_MAX)] = LIST_REQUESTS_MAX


class ListSlow(RequestMessage, frozen=True):
    """List the slowest operations and waits of the last hour."""


class ShowSettings(RequestMessage, frozen=True):
    """Show the limits and the policy."""


class CancelRequest(RequestMessage, frozen=True):
    """End a generation of any client; `target` is its id in `RequestsListed`."""

    target: RequestId


class ChangeSettings(RequestMessage, frozen=True):
    """Change limits, and the policy unless it is empty, without restarting the engine."""

    limits: Annotated[dict[Setting, int], Meta(max_length=64)] = field(default_factory=dict)
    policy: Annotated[str, Meta(max_length=64)] = ""


class StopServer(RequestMessage, frozen=True):
    """End the server; `timeout_ms`: the time that requests in progress have to end."""

    timeout_ms: TimeoutMs = 0


ServerQuery = ListRequests | ListSlow | ShowSettings
ServerCommand = CancelRequest | ChangeSettings | StopServer


class RequestView(Value, frozen=True):
    """A pending request; `adapter` is empty for the base model, `tokens` those sent so far."""

    request_id: str
    kind: str
    adapter: str
    phase: Literal["waiting", "running"]
    age_ms: int
    tokens: int


class SlowView(Value, frozen=True):
    """An operation, or the time from a request to its answer, that took long."""

    kind: str
    adapter: str
    duration_ms: int
    ended_ms_ago: int
    outcome: str


class RequestsListed(ReplyMessage, frozen=True):
    """The oldest pending requests; `total` is the number of all."""

    requests: tuple[RequestView, ...]
    total: int


class SlowListed(ReplyMessage, frozen=True):
    """The slowest operations of the engine and the slowest requests, the slowest first."""

    operations: tuple[SlowView, ...]
    waits: tuple[SlowView, ...]


class SettingsShown(ReplyMessage, frozen=True):
    """The limits and the policy in force; `fixed` are those that need a restart to change."""

    limits: dict[str, int]
    policy: str
    fixed: tuple[str, ...] = ()


class ServerStopping(ReplyMessage, frozen=True):
    """The server ends once `running` requests have ended, or the time has passed."""

    running: int


ServerReply = RequestsListed | SlowListed | SettingsShown | ServerStopping
