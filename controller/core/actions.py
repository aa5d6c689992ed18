"""What the core wants done: the only way out of it.

What it is: four frozen Structs. What it is not: the doing, which is the shell's. One rule: actions
are performed in order, after the input that caused them is in the log.
"""

from msgspec import Struct

from messages import commands, events, requests


class Reply(Struct, frozen=True, gc=False):
    """Answer a client; the shell knows by `request_id` where it is."""

    message: requests.Reply


class Command(Struct, frozen=True, gc=False):
    """Tell the engine to do an operation."""

    message: commands.Command


class Publish(Struct, frozen=True, gc=False):
    """Tell every subscriber."""

    message: events.Published


class SetTimer(Struct, frozen=True, gc=False):
    """Send `TimerFired` at this time or later; replaces an earlier wish."""

    at_ns: int


Action = Reply | Command | Publish | SetTimer
