"""The parts of an output, in the order in which they are generated.

Every parser yields them, and every protocol's answer is made of them.
"""

from msgspec import Struct


class Text(Struct, frozen=True):
    """A piece of text for the user."""

    text: str


class CallBegun(Struct, frozen=True):
    """A call of a tool begins."""

    name: str


class ArgumentsAdded(Struct, frozen=True):
    """A piece of the arguments, which are JSON when the call has ended."""

    text: str


class CallEnded(Struct, frozen=True):
    """The call is complete."""


Part = Text | CallBegun | ArgumentsAdded | CallEnded
