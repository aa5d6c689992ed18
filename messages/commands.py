"""Commands of the controller to the engine.

The controller reserves capacity before it sends an operation. Every operation is ended by exactly
one report with its `op`. An engine executes commands in the order of their frames, each once.
"""

from typing import Annotated

from msgspec import Meta

from loradock.messages.base import Message
from loradock.messages.ids import (
    AdapterId,
    AdapterName,
    EndClient,
    Generation,
    OpId,
    Path,
    RequestId,
    Seq,
    Slot,
    TraceParent,
)
from loradock.messages.prompts import Dimensions, Priority, Prompt, Sampling, TextPrompt, Truncation
from loradock.messages.views import PoolingTask


class _Command(Message, frozen=True):
    op: OpId


class CheckAdapter(_Command, frozen=True):
    """Read and check all files of an adapter, which stays unloaded.

    What was read waits for the adapter's `LoadWeights`, for a bounded time and size.
    """

    adapter_id: AdapterId
    adapter: AdapterName
    path: Path


class LoadWeights(_Command, frozen=True):
    """Load an adapter into pageable memory; its fingerprint must be this one.

    The engine takes what the check of this `adapter_id` has read, or reads and checks it again.
    """

    adapter_id: AdapterId
    adapter: AdapterName
    path: Path
    fingerprint: str


class StageWeights(_Command, frozen=True):
    """Pack an adapter into one page-locked blob, and free its pageable form."""

    adapter_id: AdapterId


class UnstageWeights(_Command, frozen=True):
    """Move an adapter's blob back to pageable memory."""

    adapter_id: AdapterId


class WriteSlot(_Command, frozen=True):
    """Copy an adapter's blob to the device, and write its directory row with this generation."""

    adapter_id: AdapterId
    slot: Slot
    generation: Generation


class ResetSlot(_Command, frozen=True):
    """Clear a slot's directory row and free its extent."""

    slot: Slot
    generation: Generation


class PreemptSlot(_Command, frozen=True):
    """Suspend the generations that use a slot at the end of their turn, and reset it.

    They keep their place and what they have generated, and continue once their adapter is in a slot
    again. Since the slot was written, the one that began first must have generated a token, and one
    of them `tokens`.
    """

    slot: Slot
    generation: Generation
    tokens: Annotated[int, Meta(ge=0, le=65_536)] = 0


class DropWeights(_Command, frozen=True):
    """Free an adapter's host memory."""

    adapter_id: AdapterId


class StartGeneration(_Command, frozen=True):
    """Generate with an adapter in a slot (`adapter_id` 0: the base model, slot -1).

    The core sees nothing of what follows `generation`; the shell adds it when it sends the command.
    Whom the request is for: the client in `request_id`, and the client that `client` names.
    """

    request_id: RequestId
    adapter_id: AdapterId
    slot: Slot
    generation: Generation
    prompt: Prompt = ""
    sampling: Sampling = Sampling()
    priority: Priority = 0
    trace: TraceParent = ""
    client: EndClient = ""


class StartPooling(_Command, frozen=True):
    """Embed or classify with an adapter in a slot (`adapter_id` 0: the base model, slot -1).

    The core sees nothing of what follows `task`; the shell adds it when it sends the command.
    """

    request_id: RequestId
    adapter_id: AdapterId
    slot: Slot
    generation: Generation
    task: PoolingTask
    inputs: tuple[TextPrompt, ...] = ()
    trace: TraceParent = ""
    truncation: Truncation | None = None
    dimensions: Dimensions = 0
    client: EndClient = ""


class StopGeneration(_Command, frozen=True):
    """End the generation or pooling of operation `target`, which then reports its end."""

    target: OpId


class ResendTokens(Message, frozen=True):
    """Send an output again from its first token or vector, running or recently ended."""

    request_id: RequestId


class RequestInventory(Message, frozen=True):
    """Send every unacknowledged report again, then an inventory.

    Reports up to `acknowledged` are in the controller's log.
    """

    acknowledged: Seq


class ControllerBeat(Message, frozen=True):
    """Heartbeat of the controller; reports up to `acknowledged` are in its log."""

    acknowledged: Seq


StartInference = StartGeneration | StartPooling
"""Commands to which the shell adds a payload."""

Operation = (
    CheckAdapter
    | LoadWeights
    | StageWeights
    | UnstageWeights
    | WriteSlot
    | ResetSlot
    | PreemptSlot
    | DropWeights
    | StartInference
)
Command = Operation | StopGeneration | ResendTokens | RequestInventory | ControllerBeat
