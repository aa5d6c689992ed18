"""What the controller tells the engine to do.

What it is: imperative Structs, each with the operation's id. What it is not: a wish; the
controller has made room and reserved it before it sends one. One rule: every operation is ended
by exactly one report that names its `op`, and an `op` that was seen before is not done again.
"""

from messages.base import Message, Value
from messages.ids import AdapterId, AdapterName, Generation, OpId, Path, RequestId, Seq, Slot
from messages.requests import PoolingTask, Prompt, Sampling, TextPrompt


class _Command(Message, frozen=True):
    op: OpId


class CheckAdapter(_Command, frozen=True):
    """Read an adapter's files and check them completely; keep nothing."""

    adapter_id: AdapterId
    adapter: AdapterName
    path: Path


class LoadWeights(_Command, frozen=True):
    """Read and check an adapter into pageable memory; the bytes must have this fingerprint."""

    adapter_id: AdapterId
    adapter: AdapterName
    path: Path
    fingerprint: str


class StageWeights(_Command, frozen=True):
    """Lay an adapter out as one page-locked blob; its pageable form is given back."""

    adapter_id: AdapterId


class UnstageWeights(_Command, frozen=True):
    """Move an adapter's blob back to pageable memory."""

    adapter_id: AdapterId


class WriteSlot(_Command, frozen=True):
    """Copy an adapter's blob to the device and enter it in the directory as this generation."""

    adapter_id: AdapterId
    slot: Slot
    generation: Generation


class ResetSlot(_Command, frozen=True):
    """Clear a slot's directory row and free its extent."""

    slot: Slot
    generation: Generation


class DropWeights(_Command, frozen=True):
    """Give back an adapter's host memory."""

    adapter_id: AdapterId


class SlotRef(Value, frozen=True):
    """A slot as one generation knows it."""

    slot: Slot
    generation: Generation


class SetMapping(_Command, frozen=True):
    """Make this the batch's active set; refused (L007) if any generation is stale."""

    active: tuple[SlotRef, ...]


class StartGeneration(_Command, frozen=True):
    """Generate with an adapter in a slot (`adapter_id` 0: the base model, slot -1).

    The core never sees `prompt` and `sampling`; the shell adds them on the way out.
    """

    request_id: RequestId
    adapter_id: AdapterId
    slot: Slot
    generation: Generation
    prompt: Prompt = ""
    sampling: Sampling = Sampling()


class StartPooling(_Command, frozen=True):
    """Embed or classify with an adapter in a slot (`adapter_id` 0: the base model, slot -1).

    The core never sees `inputs`; the shell adds them on the way out.
    """

    request_id: RequestId
    adapter_id: AdapterId
    slot: Slot
    generation: Generation
    task: PoolingTask
    inputs: tuple[TextPrompt, ...] = ()


class StopGeneration(_Command, frozen=True):
    """End the generation or pooling that operation `target` started; that one then reports."""

    target: OpId


class ResendTokens(Message, frozen=True):
    """Send an output again from its first token or vector, running or lately ended."""

    request_id: RequestId


class RequestInventory(Message, frozen=True):
    """Send every report not acknowledged yet, then say what you hold.

    Reports up to `acknowledged` are in the controller's log.
    """

    acknowledged: Seq


class ControllerBeat(Message, frozen=True):
    """The controller is alive; reports up to `acknowledged` are in its log."""

    acknowledged: Seq


StartInference = StartGeneration | StartPooling
"""What uses an adapter, with what the shell keeps for it."""

Operation = (
    CheckAdapter
    | LoadWeights
    | StageWeights
    | UnstageWeights
    | WriteSlot
    | ResetSlot
    | DropWeights
    | SetMapping
    | StartInference
)
Command = Operation | StopGeneration | ResendTokens | RequestInventory | ControllerBeat
