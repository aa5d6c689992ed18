"""What a client asks of the controller, and what it is answered.

What it is: imperative Structs (`LoadAdapter`) and their replies (`AdapterDone`). What it is not:
what the log keeps; prompts and inputs never get there (see `records.InferenceRequested`).
One rule: every request carries the client's own `request_id`, and every reply repeats it.
"""

from typing import Annotated, Final, Literal

from msgspec import Meta

from messages.base import Message, Value
from messages.errors import ErrorCode
from messages.events import Published
from messages.ids import (
    NO_SLOT,
    AdapterName,
    AdapterState,
    Bytes,
    Epoch,
    Generation,
    Path,
    RequestId,
    Seq,
    Slot,
    TimeoutMs,
)

TokenId = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Text = Annotated[str, Meta(max_length=1_000_000)]
TextPrompt = Text | Annotated[tuple[TokenId, ...], Meta(max_length=262_144)]
Inputs = Annotated[tuple[TextPrompt, ...], Meta(min_length=1, max_length=2048)]
Vector = Annotated[bytes, Meta(max_length=1 << 22)]
"""Numbers as float32, little endian."""
FinishReason = Literal["stop", "length", "cancelled"]
PoolingTask = Literal["embed", "classify"]

IMAGE_BYTES_MAX: Final = 8 << 20
"""What one image file may have: a photograph as cameras write it."""

IMAGES_MAX: Final = 16
"""How many images one prompt may have."""

IMAGES_BYTES_MAX: Final = 32 << 20
"""What the images of one prompt may have together."""

Image = Annotated[bytes, Meta(min_length=1, max_length=IMAGE_BYTES_MAX)]
"""An image file as it lies on a disk (PNG, JPEG, ...); the engine says which formats it reads."""


class IllustratedPrompt(Value, frozen=True, array_like=False):
    """A text and its images: `text` has the model's own placeholder once for each, in their order.

    A map on the wire, so that it is told from token ids, which are an array.
    """

    text: Text
    images: Annotated[tuple[Image, ...], Meta(min_length=1, max_length=IMAGES_MAX)]


Prompt = TextPrompt | IllustratedPrompt


class _Request(Message, frozen=True):
    request_id: RequestId


class LoadAdapter(_Request, frozen=True):
    """Bring an adapter to the host; with `replace`, other bytes may take over a known name."""

    adapter: AdapterName
    path: Path = ""
    replace: bool = False
    timeout_ms: TimeoutMs = 0


class StageAdapter(_Request, frozen=True):
    """Bring an adapter to page-locked memory, loading it first if need be."""

    adapter: AdapterName
    path: Path = ""
    timeout_ms: TimeoutMs = 0


class ActivateAdapter(_Request, frozen=True):
    """Bring an adapter into a device slot, loading and staging it first if need be."""

    adapter: AdapterName
    path: Path = ""
    timeout_ms: TimeoutMs = 0


class HoldAdapter(_Request, frozen=True):
    """Exempt an adapter from every eviction, activating it first if need be."""

    adapter: AdapterName
    path: Path = ""
    timeout_ms: TimeoutMs = 0


class ReleaseAdapter(_Request, frozen=True):
    """End a hold; the adapter stays where it is until a policy needs its room."""

    adapter: AdapterName


class DeactivateAdapter(_Request, frozen=True):
    """Take an adapter out of its slot; it stays pinned."""

    adapter: AdapterName
    timeout_ms: TimeoutMs = 0


class EvictAdapter(_Request, frozen=True):
    """Drop an adapter's weights everywhere; its source and history are kept."""

    adapter: AdapterName
    timeout_ms: TimeoutMs = 0


class RemoveAdapter(_Request, frozen=True):
    """Forget an adapter; `force` also ends a hold and waits for running requests."""

    adapter: AdapterName
    force: bool = False
    timeout_ms: TimeoutMs = 0


class ActivateBatch(_Request, frozen=True):
    """Bring a batch's whole active set into slots at once, confirmed by the engine."""

    adapters: Annotated[tuple[AdapterName, ...], Meta(min_length=1, max_length=65_536)]
    timeout_ms: TimeoutMs = 0


class Sampling(Value, frozen=True):
    """How tokens are chosen; temperature 0 is greedy, top_k 0 and top_p 1 do not filter."""

    max_tokens: Annotated[int, Meta(ge=1, le=1_000_000)] = 128
    temperature: Annotated[float, Meta(ge=0.0, le=100.0)] = 0.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    top_p: Annotated[float, Meta(gt=0.0, le=1.0)] = 1.0
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    stop: Annotated[
        tuple[Annotated[str, Meta(min_length=1, max_length=256)], ...], Meta(max_length=16)
    ] = ()


class Generate(_Request, frozen=True):
    """Continue a prompt with an adapter (None: the base model); tokens stream back."""

    adapter: AdapterName | None
    prompt: Prompt
    sampling: Sampling = Sampling()
    timeout_ms: TimeoutMs = 0


class Embed(_Request, frozen=True):
    """Turn each input into a vector with an adapter (None: the base model); they stream back."""

    adapter: AdapterName | None
    inputs: Inputs
    timeout_ms: TimeoutMs = 0


class Classify(_Request, frozen=True):
    """Score each input by the model's labels with an adapter (None: the base model)."""

    adapter: AdapterName | None
    inputs: Inputs
    timeout_ms: TimeoutMs = 0


class CancelGeneration(_Request, frozen=True):
    """End another request's generation; it is answered as `cancelled` with what it had."""

    target: RequestId


class ListAdapters(_Request, frozen=True):
    """Every known adapter, in order of name."""


class ShowAdapter(_Request, frozen=True):
    """One adapter, whole."""

    adapter: AdapterName


class ShowStatus(_Request, frozen=True):
    """The controller, its engine and its budgets."""


class FetchEvents(_Request, frozen=True):
    """Published events from `first_seq` on, for a subscriber that has a gap."""

    first_seq: Seq
    count_max: Annotated[int, Meta(ge=1, le=4096)] = 1024


Query = ListAdapters | ShowAdapter | ShowStatus | FetchEvents
LifecycleRequest = (
    LoadAdapter
    | StageAdapter
    | ActivateAdapter
    | HoldAdapter
    | ReleaseAdapter
    | DeactivateAdapter
    | EvictAdapter
    | RemoveAdapter
    | ActivateBatch
    | CancelGeneration
)
PrivateRequest = Generate | Embed | Classify
"""What an adapter is for. Prompts and inputs are the client's own: they pass by the log."""

Request = LifecycleRequest | PrivateRequest | Query


class _Reply(Message, frozen=True):
    request_id: str  # Empty where the request could not be read.


class AdapterDone(_Reply, frozen=True):
    """The fact that the request asked for is there."""

    adapter: AdapterName
    state: AdapterState
    slot: Slot = NO_SLOT
    generation: Generation = 0


class Placement(Value, frozen=True):
    """Where one adapter of a batch lies."""

    adapter: AdapterName
    slot: Slot
    generation: Generation


class BatchDone(_Reply, frozen=True):
    """All adapters of the batch were in slots at one moment; the engine confirmed each."""

    placements: tuple[Placement, ...]


class TokensStreamed(_Reply, frozen=True):
    """Some of a generation's tokens: `tokens[i]` is output number `offset + i`.

    `text` is what became readable with them; a character cut in two waits for its rest.
    """

    offset: int
    tokens: tuple[int, ...]
    text: str = ""


class GenerationDone(_Reply, frozen=True):
    """The last word on a generation: how it ended and how many tokens it took."""

    adapter: AdapterName | None
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int


class VectorsStreamed(_Reply, frozen=True):
    """Some results of an `Embed` or `Classify`: `vectors[i]` is that of input `offset + i`.

    An embedding's vector has the model's dimensions; a classification's has one score for each of
    `labels`, which are empty for an embedding.
    """

    offset: int
    vectors: tuple[Vector, ...]
    labels: tuple[str, ...] = ()


class PoolingDone(_Reply, frozen=True):
    """The last word on an `Embed` or `Classify`: all `inputs` have a result."""

    adapter: AdapterName | None
    task: PoolingTask
    inputs: int
    input_tokens: int


class CancelDone(_Reply, frozen=True):
    """The cancellation was passed on; `found` is False where nothing was running."""

    target: RequestId
    found: bool


class Refused(_Reply, frozen=True):
    """The request was not done, and nothing else was changed by it."""

    code: ErrorCode
    message: str


class AdapterView(Value, frozen=True):
    """What the controller knows of one adapter; sizes in bytes, times in nanoseconds (UTC)."""

    adapter: AdapterName
    adapter_id: int
    state: AdapterState
    goal: AdapterState
    path: Path
    fingerprint: str
    rank: int
    slot: Slot
    generation: Generation
    held: bool
    retired: bool
    leases: int
    waiting: int
    host_bytes: Bytes
    pinned_bytes: Bytes
    device_bytes: Bytes
    uses: int
    loads: int
    hits: int
    evictions: int
    failures: int
    last_used_ns: int


class AdaptersListed(_Reply, frozen=True):
    """All adapters as of event `events_seq`: the snapshot that a late subscriber starts from."""

    adapters: tuple[AdapterView, ...]
    events_seq: Seq


class AdapterShown(_Reply, frozen=True):
    """One adapter's current version, and versions that still end their requests."""

    adapter: AdapterView
    retired: tuple[AdapterView, ...] = ()


class TierView(Value, frozen=True):
    """One tier's use and bounds; `count` is adapters on the host or slots on the device."""

    name: Literal["host", "pinned", "device"]
    count: int
    count_max: int
    size_bytes: Bytes
    size_bytes_max: Bytes


class StatusShown(_Reply, frozen=True):
    """The controller's life, its log, its engine and its tiers."""

    epoch: Epoch
    seq: Seq
    digest: str
    policy: str
    engine_id: str  # Empty where no engine is attached.
    engine_pid: int
    model: str
    adapters: int
    requests: int
    operations: int
    answered: int
    refused: int
    tiers: tuple[TierView, ...]
    events_seq: Seq
    controller_pid: int = 0


class EventsFetched(_Reply, frozen=True):
    """Events in order; `last_seq` is the newest published, so the reader knows what is missing."""

    events: tuple[Published, ...]
    last_seq: Seq


Reply = (
    AdapterDone
    | BatchDone
    | TokensStreamed
    | GenerationDone
    | VectorsStreamed
    | PoolingDone
    | CancelDone
    | Refused
    | AdaptersListed
    | AdapterShown
    | StatusShown
    | EventsFetched
)
