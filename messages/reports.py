"""Reports of the engine to the controller.

Only a report, the engine's loss or a removal changes an adapter's state. The engine keeps a report,
and sends it again, until the controller acknowledges that it is in the log.
"""

from typing import Literal

from loradock.messages.base import Message, Value
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import (
    AdapterId,
    AdapterName,
    AdapterState,
    Bytes,
    Generation,
    OpId,
    Path,
    Seq,
    Slot,
)
from loradock.messages.requests import TokensStreamed, VectorsStreamed
from loradock.messages.views import Details, EngineStatistics, FinishReason, Warnings


class _Report(Message, frozen=True):
    op: OpId


class AdapterChecked(_Report, frozen=True):
    """The files are valid and fit the model.

    `host_bytes` is the size of the weights as they are read, `blob_bytes` their size when packed,
    on the host and on the device. `warnings`: findings that do not prevent the adapter's use.
    """

    fingerprint: str
    rank: int
    host_bytes: Bytes
    blob_bytes: Bytes
    warnings: Warnings = ()


class WeightsLoaded(_Report, frozen=True):
    """The weights are checked, in pageable memory."""


class WeightsStaged(_Report, frozen=True):
    """The blob is in page-locked memory; the pageable form is freed."""


class WeightsUnstaged(_Report, frozen=True):
    """The blob is in pageable memory."""


class SlotWritten(_Report, frozen=True):
    """The slot has the adapter's complete copy, which the next forward pass can use."""


class SlotReset(_Report, frozen=True):
    """The slot's row is clear and its extent free.

    After `PreemptSlot`, every generation that used the slot and has not ended is suspended.
    """


class WeightsDropped(_Report, frozen=True):
    """The host memory is freed."""


class GenerationEnded(_Report, frozen=True):
    """A generation ended; its tokens were sent to the client separately.

    `prefix_tokens`: the prompt tokens whose KV cache was taken from an earlier prompt.
    `first_token_ns`: from the command's arrival to the first token; 0 if there was none.
    """

    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int
    prefix_tokens: int = 0
    first_token_ns: int = 0


class PoolingEnded(_Report, frozen=True):
    """A pooling ended; vectors of `inputs` inputs (all, unless stopped) were sent separately."""

    inputs: int
    input_tokens: int


class OperationFailed(_Report, frozen=True):
    """An operation failed and changed nothing; `message` is an error text.

    The controller keeps `details` apart: they are not in the log.
    """

    code: ErrorCode
    message: str
    details: Details = ()


class InventoryAdapter(Value, frozen=True):
    """One adapter that the engine holds; `warnings` are what the check of its files found."""

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
    warnings: Warnings = ()


class EngineInventory(Message, frozen=True):
    """The engine's identity, capacity and content; sent on attaching and on request.

    `engine_id` names one start of the process. `last_op` is the highest operation that it has
    received; `running` are those without a report yet. `answers` is the number of the
    `RequestInventory` frame that it answers: only then does it cover every earlier command. 0: the
    engine introduces itself or saw a gap, and expects a `RequestInventory`. `dtype` is the base
    model's. `suspended`: the operations of `running` whose adapter has left its slot.
    """

    engine_id: str
    pid: int
    model: str
    max_loras: int
    device_bytes_max: Bytes
    last_op: OpId = 0
    running: tuple[OpId, ...] = ()
    adapters: tuple[InventoryAdapter, ...] = ()
    answers: Seq = 0
    device: str = ""
    dtype: str = ""
    suspended: tuple[OpId, ...] = ()


class EngineBeat(Message, frozen=True):
    """Heartbeat of the engine's main loop: its identity, last operation and statistics.

    `running`: the generations and poolings that take part in the next forward pass.
    """

    engine_id: str
    last_op: OpId
    state: Literal["loading", "ready"] = "ready"
    statistics: EngineStatistics = EngineStatistics()
    running: tuple[OpId, ...] = ()


OperationReport = (
    AdapterChecked
    | WeightsLoaded
    | WeightsStaged
    | WeightsUnstaged
    | SlotWritten
    | SlotReset
    | WeightsDropped
    | GenerationEnded
    | PoolingEnded
    | OperationFailed
)
LoggedReport = OperationReport | EngineInventory
PrivateReport = TokensStreamed | VectorsStreamed
"""Output for a client; it is never logged."""

Report = LoggedReport | PrivateReport | EngineBeat
