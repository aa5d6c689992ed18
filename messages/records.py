"""What the log stores.

What it is: the segment header, the record, and the inputs that only the log has (the shell's own,
and inference stripped of its prompt or inputs). What it is not: the framing and the checksums,
which are `controller.shell.log`'s. One rule: what the core's decision depends on is in a record.
"""

from messages.base import Message, Value
from messages.ids import AdapterName, Epoch, RequestId, Seq, TimeoutMs
from messages.reports import LoggedReport
from messages.requests import LifecycleRequest, PoolingTask

FORMAT = 1


class GenerationRequested(Message, frozen=True):
    """A `Generate` without what is private to its client."""

    request_id: RequestId
    adapter: AdapterName | None
    timeout_ms: TimeoutMs = 0


class PoolingRequested(Message, frozen=True):
    """An `Embed` or `Classify` without what is private to its client."""

    request_id: RequestId
    adapter: AdapterName | None
    task: PoolingTask
    timeout_ms: TimeoutMs = 0


class PayloadLost(Message, frozen=True):
    """A prompt or its like died with the last controller; the client will send it again."""

    request_id: RequestId


class ControllerStarted(Message, frozen=True):
    """The first record of every life of the controller."""

    epoch: Epoch


class EngineLost(Message, frozen=True):
    """The engine's process ended or its heartbeats stopped."""

    engine_id: str
    reason: str


class TimerFired(Message, frozen=True):
    """A deadline that the core asked for has passed."""


InferenceRequested = GenerationRequested | PoolingRequested
ShellInput = InferenceRequested | PayloadLost | ControllerStarted | EngineLost | TimerFired
Input = LifecycleRequest | LoggedReport | ShellInput


class Header(Value, frozen=True):
    """The first record of a segment: by what rules and with what bounds the rest was decided."""

    format: int
    rules: int
    policy: str
    limits: dict[str, int]
    first_seq: Seq


class Record(Value, frozen=True):
    """One input as it was handled; `digest` is the world's before it, where one was taken.

    `client` is the routing name of who sent it, empty for the shell and the engine.
    """

    time_ns: int
    input: Input
    client: bytes = b""
    digest: str = ""
