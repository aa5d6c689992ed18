"""What the engine tells the controller.

What it is: past-tense Structs, each naming the operation that it ends. What it is not: a promise;
only a report moves an adapter to its next state. One rule: a report is kept by the engine and
sent again until the controller says that it is in the log.
"""

from typing import Literal

from messages.base import Message, Value
from messages.errors import ErrorCode
from messages.ids import (
    AdapterId,
    AdapterName,
    AdapterState,
    Bytes,
    Generation,
    OpId,
    Path,
    RequestId,
    Seq,
    Slot,
)
from messages.requests import FinishReason, Vector


class _Report(Message, frozen=True):
    op: OpId


class AdapterChecked(_Report, frozen=True):
    """The files are sound and fit the model; this is what loading them will take.

    `host_bytes` is what the weights take as they are read, `blob_bytes` what they take packed,
    on the host and on the device alike.
    """

    fingerprint: str
    rank: int
    host_bytes: Bytes
    blob_bytes: Bytes


class WeightsLoaded(_Report, frozen=True):
    """The weights lie checked in pageable memory."""


class WeightsStaged(_Report, frozen=True):
    """The blob lies page-locked; the pageable form is gone."""


class WeightsUnstaged(_Report, frozen=True):
    """The blob lies in pageable memory."""


class SlotWritten(_Report, frozen=True):
    """The slot's directory row points at the adapter's complete copy."""


class SlotReset(_Report, frozen=True):
    """The slot's row is clear and its extent free."""


class WeightsDropped(_Report, frozen=True):
    """The host memory is given back."""


class MappingSet(_Report, frozen=True):
    """Every slot of the active set has the generation that was named."""


class GenerationEnded(_Report, frozen=True):
    """A generation is over; its tokens went to the client, not here."""

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int


class PoolingEnded(_Report, frozen=True):
    """So many inputs have their vectors (all, unless it was stopped); they went to the client."""

    inputs: int
    input_tokens: int


class OperationFailed(_Report, frozen=True):
    """An operation changed nothing; `message` says what was found, allowed, and what to do."""

    code: ErrorCode
    message: str


class InventoryAdapter(Value, frozen=True):
    """One adapter that the engine holds."""

    adapter_id: AdapterId
    adapter: AdapterName
    path: Path
    fingerprint: str
    rank: int
    state: AdapterState
    slot: Slot
    generation: Generation
    host_bytes: Bytes
    blob_bytes: Bytes


class EngineInventory(Message, frozen=True):
    """Who the engine is, what it can hold and what it holds; sent on attaching and on request.

    `engine_id` names one life of the process. `last_op` is the highest operation that it has seen;
    `running` are those without a report yet. `answers` is the number of the `RequestInventory`
    frame that asked for it: only then does it take every earlier command into account. 0
    means that the engine introduces itself, or saw a gap, and wants to be asked.
    """

    engine_id: str
    pid: int
    model: str
    slots_max: int
    device_bytes_max: Bytes
    last_op: OpId = 0
    running: tuple[OpId, ...] = ()
    adapters: tuple[InventoryAdapter, ...] = ()
    answers: Seq = 0


class TokensGenerated(Message, frozen=True):
    """Output on its way to the client; passes by the log."""

    request_id: RequestId
    offset: int
    tokens: tuple[int, ...]
    text: str = ""


class VectorsComputed(Message, frozen=True):
    """Vectors or scores on their way to the client; pass by the log."""

    request_id: RequestId
    offset: int
    vectors: tuple[Vector, ...]
    labels: tuple[str, ...] = ()


class EngineBeat(Message, frozen=True):
    """The engine's main loop is alive, and its life and last operation are these."""

    engine_id: str
    last_op: OpId
    state: Literal["loading", "ready"] = "ready"


OperationReport = (
    AdapterChecked
    | WeightsLoaded
    | WeightsStaged
    | WeightsUnstaged
    | SlotWritten
    | SlotReset
    | WeightsDropped
    | MappingSet
    | GenerationEnded
    | PoolingEnded
    | OperationFailed
)
LoggedReport = OperationReport | EngineInventory
PrivateReport = TokensGenerated | VectorsComputed
Report = LoggedReport | PrivateReport | EngineBeat
