"""The two shapes that every message has.

What it is: the Struct options, stated once. What it is not: a message. One rule: array-like and
closed, so that bytes are compact, positions are the contract, and an unknown field is refused.
"""

from msgspec import Struct


class Value(Struct, frozen=True, array_like=True, forbid_unknown_fields=True, gc=False):
    """A part of messages, told apart by where it stands."""


class Message(Value, frozen=True, tag=True):
    """A member of a union, told apart by its class name in first position."""
