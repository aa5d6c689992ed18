"""Base classes of all messages: encoded as arrays, with unknown fields refused."""

from msgspec import Struct

from loradock.messages.ids import RequestId


class Value(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of messages, without a tag: its type is known from its position."""


class Message(Value, frozen=True, tag=True):
    """A member of a union, with its class name in first position as tag."""


class RequestMessage(Message, frozen=True):
    """A request of a client."""

    request_id: RequestId


class ReplyMessage(Message, frozen=True):
    """A reply, with its request's id; that is empty if the request could not be read."""

    request_id: str
