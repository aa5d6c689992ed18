"""Records of the log: the segment header, the record, and the inputs that only the log has.

Those are the shell's own inputs, and inference requests without their prompt or inputs. All that a
decision of the core depends on is in a record. `controller/log/format.py` frames it.
"""

from loradock.messages.base import Message, Value
from loradock.messages.ids import AdapterName, Epoch, RequestId, Seq, TimeoutMs
from loradock.messages.reports import LoggedReport
from loradock.messages.requests import LifecycleRequest
from loradock.messages.views import PoolingTask

FORMAT = 2
"""The format of segments, records and snapshots that this version writes and reads."""


class GenerationRequested(Message, frozen=True):
    """A `Generate` without its prompt and sampling."""

    request_id: RequestId
    adapter: AdapterName | None
    timeout_ms: TimeoutMs = 0


class PoolingRequested(Message, frozen=True):
    """An `Embed` or `Classify` without its inputs."""

    request_id: RequestId
    adapter: AdapterName | None
    task: PoolingTask
    timeout_ms: TimeoutMs = 0


class PayloadLost(Message, frozen=True):
    """A request's payload was lost with the previous process; its client will send it again."""

    request_id: RequestId


class ControllerStarted(Message, frozen=True):
    """The first record of every epoch.

    `wall_offset_ns`: wall time minus recorded time, a label of the epoch's records. It is 0 if
    recorded times are wall times.
    """

    epoch: Epoch
    wall_offset_ns: int = 0


class EngineLost(Message, frozen=True):
    """The engine's process ended or its heartbeats stopped."""

    engine_id: str
    reason: str


class TimerFired(Message, frozen=True):
    """A deadline that the core has set has passed."""


class InputSkipped(Message, frozen=True):
    """Handling record `seq` failed: it is skipped, and the state is as if it had never come.

    `request_id` is the id of the client's request in the record, if it is one.
    """

    seq: Seq
    request_id: str = ""


InferenceRequested = GenerationRequested | PoolingRequested
ShellInput = (
    InferenceRequested | PayloadLost | ControllerStarted | EngineLost | TimerFired | InputSkipped
)
Input = LifecycleRequest | LoggedReport | ShellInput


class Header(Value, frozen=True):
    """The header of a segment: the rules, the policy and the limits of its records."""

    format: int
    rules: int
    policy: str
    limits: dict[str, int]
    first_seq: Seq


class Record(Value, frozen=True):
    """One input as it was handled; `digest` is the digest of the state before it, if not empty.

    `time_ns` is logical: it never decreases, and only `ControllerStarted` relates it to wall time.
    `body` is a keyed hash of a client's request, which a repetition has too. `report_seq` is the
    number of a report's frame. Both are 0 for other inputs.
    """

    time_ns: int
    input: Input
    digest: str = ""
    body: int = 0
    report_seq: Seq = 0
