"""Requests of clients to the controller, and the replies.

Replies repeat their request's `request_id`. No prompt is logged: see `records.InferenceRequested`.
"""

from collections.abc import Iterator
from typing import Annotated, Final

from msgspec import Meta

from loradock.messages.base import ReplyMessage, RequestMessage
from loradock.messages.control import ServerCommand, ServerQuery, ServerReply
from loradock.messages.errors import ErrorCode, LoradockError, error_of
from loradock.messages.events import Published
from loradock.messages.ids import (
    GPU_SLOT,
    NO_SLOT,
    AdapterName,
    AdapterState,
    Bytes,
    EndClient,
    Epoch,
    Generation,
    Path,
    RequestId,
    Seq,
    Slot,
    TimeoutMs,
    TraceParent,
)
from loradock.messages.prompts import (
    Dimensions,
    Inputs,
    Priority,
    Prompt,
    Sampling,
    TokenId,
    Truncation,
)
from loradock.messages.views import (
    AdapterCounters,
    AdapterUse,
    AdapterView,
    Batching,
    Details,
    EngineStatistics,
    FailureView,
    FinishReason,
    Placement,
    PoolingTask,
    PrefetchTarget,
    TierView,
    TokenLogprob,
    Vector,
    Warnings,
)


class LoadAdapter(RequestMessage, frozen=True):
    """Load an adapter to the host; with `replace`, a known name can get other bytes."""

    adapter: AdapterName
    path: Path = ""
    replace: bool = False
    timeout_ms: TimeoutMs = 0


class _Upward(RequestMessage, frozen=True):
    adapter: AdapterName
    path: Path = ""
    timeout_ms: TimeoutMs = 0


class StageAdapter(_Upward, frozen=True):
    """Stage an adapter in page-locked memory, after loading it if necessary."""


class ActivateAdapter(_Upward, frozen=True):
    """Copy an adapter to a device slot, after loading and staging it if necessary."""


class HoldAdapter(_Upward, frozen=True):
    """Exempt an adapter from every eviction, after activating it if necessary."""


class PrefetchAdapter(RequestMessage, frozen=True):
    """Move an adapter up to `target` ahead of its use; answered at once, before it moves.

    It never waits: a slot must be free, and only idle adapters on the host make room for it.
    """

    adapter: AdapterName
    path: Path = ""
    target: PrefetchTarget = GPU_SLOT


class ReleaseAdapter(RequestMessage, frozen=True):
    """End a hold; the adapter stays in its state until a policy evicts it."""

    adapter: AdapterName


class _Downward(RequestMessage, frozen=True):
    adapter: AdapterName
    timeout_ms: TimeoutMs = 0


class DeactivateAdapter(_Downward, frozen=True):
    """Remove an adapter from its slot; it stays pinned."""


class EvictAdapter(_Downward, frozen=True):
    """Drop an adapter's weights in all tiers; its name, path and counters are kept."""


class RemoveAdapter(RequestMessage, frozen=True):
    """Forget an adapter; answered when its memory is free.

    `force`: also if it is held or in use. Its name is free at once; inference that runs or waits
    ends before.
    """

    adapter: AdapterName
    force: bool = False
    timeout_ms: TimeoutMs = 0


class ActivateBatch(RequestMessage, frozen=True):
    """Activate all adapters of a batch, so that all are in slots at one moment."""

    adapters: Annotated[tuple[AdapterName, ...], Meta(min_length=1, max_length=65_536)]
    timeout_ms: TimeoutMs = 0


class Generate(RequestMessage, frozen=True):
    """Continue a prompt with an adapter (None: the base model); tokens are streamed back.

    Of the requests whose adapters are in slots, those with the smallest `priority` start first.
    """

    adapter: AdapterName | None
    prompt: Prompt
    sampling: Sampling = Sampling()
    timeout_ms: TimeoutMs = 0
    priority: Priority = 0
    trace: TraceParent = ""
    client: EndClient = ""


class _Pooling(RequestMessage, frozen=True):
    adapter: AdapterName | None
    inputs: Inputs
    timeout_ms: TimeoutMs = 0
    trace: TraceParent = ""
    truncation: Truncation | None = None


class Embed(_Pooling, frozen=True):
    """Embed each input with an adapter (None: the base model); vectors are streamed back.

    `dimensions`: the length of the vectors, if the model was trained for several (Matryoshka).
    """

    dimensions: Dimensions = 0
    client: EndClient = ""


class Classify(_Pooling, frozen=True):
    """Score each input for every label of the model with an adapter (None: the base model)."""

    client: EndClient = ""


class CancelGeneration(RequestMessage, frozen=True):
    """End another request's generation, which is answered as `cancelled`."""

    target: RequestId


LIST_PAGE_ADAPTERS_MAX: Final = 64
"""Bound on the adapters of one reply to a `ListAdapters`, which takes a fraction of a ms."""


class ListAdapters(RequestMessage, frozen=True):
    """List known adapters: up to `limit` of them after (`after`, `after_id`), as `AdaptersPage`.

    Pages are in order of name and id. `limit` 0: one `AdaptersListed`, refused beyond a page.
    """

    after: str = ""
    after_id: int = 0
    limit: Annotated[int, Meta(ge=0, le=LIST_PAGE_ADAPTERS_MAX)] = 0


class ShowAdapter(RequestMessage, frozen=True):
    """Show one adapter and its retired versions."""

    adapter: AdapterName


class ShowStatus(RequestMessage, frozen=True):
    """Show the status of the controller, its engine and its tiers; with `uses`, of adapters too."""

    uses: bool = False


class FetchEvents(RequestMessage, frozen=True):
    """Fetch published events from `first_seq` on; with `snapshot`, adapters if they are too old."""

    first_seq: Seq
    count_max: Annotated[int, Meta(ge=1, le=4096)] = 1024
    snapshot: bool = False


Query = ListAdapters | ShowAdapter | ShowStatus | FetchEvents | ServerQuery
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
    | PrefetchAdapter
)
PrivateRequest = Generate | Embed | Classify

Request = LifecycleRequest | PrivateRequest | Query | ServerCommand


class AdapterDone(ReplyMessage, frozen=True):
    """The adapter has reached the state that was requested.

    `warnings`: after a load, staging, activation or hold, what the check of its files found.
    """

    adapter: AdapterName
    state: AdapterState
    slot: Slot = NO_SLOT
    generation: Generation = 0
    warnings: Warnings = ()


class PrefetchAccepted(ReplyMessage, frozen=True):
    """The adapter is in `state` now, and moves towards `goal`."""

    adapter: AdapterName
    state: AdapterState
    goal: AdapterState


class BatchDone(ReplyMessage, frozen=True):
    """All adapters of the batch were in slots at one moment, as the engine has reported."""

    placements: tuple[Placement, ...]


class TokensStreamed(ReplyMessage, frozen=True):
    """Tokens of output number `index` of a generation: `tokens[i]` is its token `offset + i`.

    `text` is the text that they complete; an incomplete character is in a later message. They are
    never logged. `finish_reason` is set in the last message of an output, and `stop_reason` is then
    the stop string or the token of `stop_token_ids` that ended it. `logprobs` has an entry per
    token, if they were requested. `prompt_logprobs` is in the first message of output 0, with an
    entry per token of the prompt; the first of them is None. `end_token` is the token that ended
    the output: it is not one of `tokens` and has no text, but an entry in `logprobs`.
    """

    offset: int
    tokens: tuple[int, ...]
    text: str = ""
    index: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob | None, ...] = ()
    end_token: TokenId | None = None


class GenerationDone(ReplyMessage, frozen=True):
    """The final reply to a `Generate`: the tokens of all outputs, and how the last output ended."""

    adapter: AdapterName | None
    finish_reason: FinishReason
    prompt_tokens: int
    output_tokens: int


class VectorsStreamed(ReplyMessage, frozen=True):
    """Results of an `Embed` or `Classify`: `vectors[i]` belongs to input `offset + i`.

    An embedding's vector has the model's dimensions, a classification's one score per label.
    """

    offset: int
    vectors: tuple[Vector, ...]
    labels: tuple[str, ...] = ()


class PoolingDone(ReplyMessage, frozen=True):
    """The final reply to an `Embed` or `Classify`: all `inputs` have a result."""

    adapter: AdapterName | None
    task: PoolingTask
    inputs: int
    input_tokens: int


class CancelDone(ReplyMessage, frozen=True):
    """The cancellation was sent to the engine; `found` is False if nothing was running."""

    target: RequestId
    found: bool


class Refused(ReplyMessage, frozen=True):
    """The request changed nothing; `retry_after_ms`: when it can succeed, 0 if not known."""

    code: ErrorCode
    message: str
    retry_after_ms: Annotated[int, Meta(ge=0, le=3_600_000)] = 0
    details: Details = ()

    def error(self) -> LoradockError:
        """Return the exception for the refusal."""
        return error_of(
            self.code,
            self.message,
            self.request_id,
            retry_after_s=self.retry_after_ms / 1000,
            details=self.details,
        )


class AdaptersListed(ReplyMessage, frozen=True):
    """All adapters as of event `events_seq`, from which a subscriber can continue."""

    adapters: tuple[AdapterView, ...]
    events_seq: Seq

    def __iter__(self) -> Iterator[AdapterView]:
        return iter(self.adapters)

    def __len__(self) -> int:
        return len(self.adapters)


class _Page(ReplyMessage, frozen=True):
    adapters: tuple[AdapterView, ...]
    events_seq: Seq
    more: bool = False


class AdaptersPage(_Page, frozen=True):
    """One page of a list as of event `events_seq`; `more`: other adapters follow its last one."""


class AdapterShown(ReplyMessage, frozen=True):
    """One adapter's current version, retired versions that still run, and its latest failure.

    `batching` and `batching_refusal` are the engine's; see `EngineStatistics`.
    """

    adapter: AdapterView
    retired: tuple[AdapterView, ...] = ()
    failure: FailureView | None = None
    batching: Batching = ""
    batching_refusal: str = ""


class StatusShown(ReplyMessage, frozen=True):
    """Status of the controller, its log, its engine and its tiers."""

    epoch: Epoch
    seq: Seq
    digest: str
    policy: str
    engine_id: str  # Empty if no engine is attached.
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
    snapshot_seq: Seq = 0  # The last record that the newest snapshot contains; 0 for none.
    snapshot_age_ms: int = 0  # Recorded time since then.
    log_bytes: Bytes = 0
    version: str = ""
    uptime_ms: int = 0  # Of the controller's process.
    memory_bytes: Bytes = 0  # Resident memory of the controller's process.
    engine_memory_bytes: Bytes = 0  # Of the engine's process, if it runs on this machine.
    device: str = ""
    dtype: str = ""  # Of the base model.
    stopping: bool = False  # New requests are refused, those in progress end.
    counters: AdapterCounters = AdapterCounters()  # Of all adapters, and of the base model.
    engine: EngineStatistics = EngineStatistics()  # As of its last heartbeat, except for requests.
    running: int = 0  # Generations and poolings that take part in the engine's next step,
    queued: int = 0  # that wait in the engine,
    waiting: int = 0  # and that wait for a slot or for an engine.
    # With `ShowStatus.uses`:
    states: tuple[tuple[AdapterState, int], ...] = ()  # How many records are in each state,
    held: int = 0  # how many are held,
    uses: tuple[AdapterUse, ...] = ()  # and those in a slot or with requests, by name.
    log_error: str = ""  # Why the log can't be written; empty if it can.
    disk_free_bytes: Bytes = 0  # Of the file system that has the log.
    unready: str = ""  # Why the server can't take new work; empty if it can.


class EventsFetched(ReplyMessage, frozen=True):
    """Events in order; `last_seq` is the newest published event, so that a gap can be seen."""

    events: tuple[Published, ...]
    last_seq: Seq


class EventsTooOld(ReplyMessage, frozen=True):
    """The requested event is not kept; of the later ones `oldest_seq` is the first that is."""

    oldest_seq: Seq
    last_seq: Seq


class SnapshotFetched(_Page, frozen=True):
    """The first page of a list as of event `events_seq`, in place of events that are too old."""


EventsReply = EventsFetched | EventsTooOld | SnapshotFetched
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
    | AdaptersPage
    | AdapterShown
    | StatusShown
    | EventsReply
    | ServerReply
    | PrefetchAccepted
)
