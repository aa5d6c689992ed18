"""Actions: what the core returns for the shell to perform.

They are performed in order, after the input that caused them is in the log.
"""

from msgspec import Struct

from loradock.messages import commands, events, requests


class SendReply(Struct, frozen=True, gc=False):
    """Send an answer to the client that sent the request of this `request_id`."""

    message: requests.Reply


class SendCommand(Struct, frozen=True, gc=False):
    """Send a command to the engine."""

    message: commands.Command


class PublishEvent(Struct, frozen=True, gc=False):
    """Send an event to every subscriber."""

    message: events.Published


class RestartEngine(Struct, frozen=True, gc=False):
    """Have the supervisor end the engine and start another one; the core has detached it."""

    engine_id: str
    pid: int
    reason: str


Action = SendReply | SendCommand | PublishEvent | RestartEngine
