"""The methods of the clients: arguments, message and docstring of each request.

`Client` and `AsyncClient` both make a method of every public function here, under its name.
"""

from collections.abc import Iterable
from typing import Any, Unpack

from loradock.client.calls import NO_ID, ClientCall
from loradock.client.images import ImageSource
from loradock.client.metrics import metrics_of
from loradock.client.pooling import (
    Classification,
    Embedding,
    PoolingCall,
    classify_request,
    embed_request,
)
from loradock.client.prepared import (
    PreparedCall,
    PreparedEvents,
    PreparedGeneration,
    PreparedList,
    UnaryCall,
    unary,
)
from loradock.client.session import SamplingOptions, answer_of
from loradock.messages.control import (
    CancelRequest,
    ChangeSettings,
    ListRequests,
    ListSlow,
    RequestsListed,
    ServerStopping,
    SettingsShown,
    ShowSettings,
    SlowListed,
    StopServer,
)
from loradock.messages.prompts import TextPrompt, Truncation
from loradock.messages.requests import (
    ActivateAdapter,
    ActivateBatch,
    AdapterDone,
    AdapterShown,
    BatchDone,
    CancelDone,
    CancelGeneration,
    DeactivateAdapter,
    EvictAdapter,
    HoldAdapter,
    LoadAdapter,
    PoolingDone,
    PrefetchAccepted,
    PrefetchAdapter,
    ReleaseAdapter,
    RemoveAdapter,
    ShowAdapter,
    ShowStatus,
    StageAdapter,
    StatusShown,
)
from loradock.messages.views import PrefetchTarget


def load(
    adapter: str, path: str = "", replace: bool = False, timeout_s: float | None = None
) -> UnaryCall[AdapterDone]:
    """Load an adapter into host memory; with `replace`, a known name may get other content."""
    return unary(LoadAdapter(NO_ID, adapter, path, replace), AdapterDone, timeout_s)


def stage(adapter: str, path: str = "", timeout_s: float | None = None) -> UnaryCall[AdapterDone]:
    """Copy an adapter to page-locked memory, loading it first if needed."""
    return unary(StageAdapter(NO_ID, adapter, path), AdapterDone, timeout_s)


def activate(
    adapter: str, path: str = "", timeout_s: float | None = None
) -> UnaryCall[AdapterDone]:
    """Copy an adapter into a device slot, loading and staging it first if needed."""
    return unary(ActivateAdapter(NO_ID, adapter, path), AdapterDone, timeout_s)


def hold(adapter: str, path: str = "", timeout_s: float | None = None) -> UnaryCall[AdapterDone]:
    """Exempt an adapter from every eviction, activating it first if needed."""
    return unary(HoldAdapter(NO_ID, adapter, path), AdapterDone, timeout_s)


def prefetch(
    adapter: str,
    path: str = "",
    target: PrefetchTarget = "gpu-slot",
    timeout_s: float | None = None,
) -> UnaryCall[PrefetchAccepted]:
    """Move an adapter up to `target` ahead of its use; returns before it moves.

    It moves as far as no use of another adapter is affected: a slot must be free, and on the host
    only idle adapters outside the slots make room.
    """
    return unary(PrefetchAdapter(NO_ID, adapter, path, target), PrefetchAccepted, timeout_s)


def release(adapter: str, timeout_s: float | None = None) -> UnaryCall[AdapterDone]:
    """End a hold; the adapter stays where it is until the policy evicts it."""
    return unary(ReleaseAdapter(NO_ID, adapter), AdapterDone, timeout_s)


def deactivate(adapter: str, timeout_s: float | None = None) -> UnaryCall[AdapterDone]:
    """Remove an adapter from its slot; it stays in page-locked memory."""
    return unary(DeactivateAdapter(NO_ID, adapter), AdapterDone, timeout_s)


def evict(adapter: str, timeout_s: float | None = None) -> UnaryCall[AdapterDone]:
    """Drop an adapter's weights from all memory; its source and history are kept."""
    return unary(EvictAdapter(NO_ID, adapter), AdapterDone, timeout_s)


def remove(
    adapter: str, force: bool = False, timeout_s: float | None = None
) -> UnaryCall[AdapterDone]:
    """Forget an adapter; `force` also ends a hold and waits for running requests."""
    return unary(RemoveAdapter(NO_ID, adapter, force), AdapterDone, timeout_s)


def activate_batch(adapters: Iterable[str], timeout_s: float | None = None) -> UnaryCall[BatchDone]:
    """Copy all adapters of a batch into slots, so that all are there at one moment."""
    return unary(ActivateBatch(NO_ID, tuple(adapters)), BatchDone, timeout_s)


def list(timeout_s: float | None = None) -> PreparedList:  # noqa: A001 - the method
    """List every known adapter, ordered by name.

    A long list is fetched in pages, each true to its moment. A subscriber can continue from the
    event number of the result.
    """
    return PreparedList(timeout_s)


def show(adapter: str, timeout_s: float | None = None) -> UnaryCall[AdapterShown]:
    """Return everything that is known about one adapter."""
    return unary(ShowAdapter(NO_ID, adapter), AdapterShown, timeout_s)


def status(timeout_s: float | None = None, *, uses: bool = False) -> UnaryCall[StatusShown]:
    """Return the status of the controller, its engine and its budgets.

    `uses`: also count adapters by state, and list those that are in a slot or have requests.
    """
    return unary(ShowStatus(NO_ID, uses), StatusShown, timeout_s)


def metrics(timeout_s: float | None = None) -> PreparedCall[ClientCall, dict[str, Any]]:
    """Return counts, sizes and durations under the keys of `LoRAModelManager.get_lora_metrics`."""
    return PreparedCall(
        lambda session, now: session.begin(ShowStatus(NO_ID), now, timeout_s),
        lambda call: metrics_of(answer_of(call, StatusShown)),
    )


def cancel(request_id: str, timeout_s: float | None = None) -> UnaryCall[CancelDone]:
    """End a generation of this client; `found` is False if none was running."""
    return unary(CancelGeneration(NO_ID, request_id), CancelDone, timeout_s)


def list_requests(timeout_s: float | None = None) -> UnaryCall[RequestsListed]:
    """List the requests in progress of all clients, the oldest first."""
    return unary(ListRequests(NO_ID), RequestsListed, timeout_s)


def cancel_request(request_id: str, timeout_s: float | None = None) -> UnaryCall[CancelDone]:
    """End a generation of any client, by its id in `list_requests`."""
    return unary(CancelRequest(NO_ID, request_id), CancelDone, timeout_s)


def list_slow(timeout_s: float | None = None) -> UnaryCall[SlowListed]:
    """List the slowest operations on adapters and the slowest requests of the last hour."""
    return unary(ListSlow(NO_ID), SlowListed, timeout_s)


def settings(timeout_s: float | None = None) -> UnaryCall[SettingsShown]:
    """Return the server's limits and policy; those in `fixed` need a restart to change."""
    return unary(ShowSettings(NO_ID), SettingsShown, timeout_s)


def change_settings(
    limits: dict[str, int] | None = None, policy: str = "", timeout_s: float | None = None
) -> UnaryCall[SettingsShown]:
    """Change limits and the policy while adapters stay where they are; empty ones stay."""
    return unary(ChangeSettings(NO_ID, limits or {}, policy), SettingsShown, timeout_s)


def stop_server(drain_s: float = 30.0, timeout_s: float | None = None) -> UnaryCall[ServerStopping]:
    """End the server: new requests are refused, those in progress have `drain_s` to end."""
    return unary(StopServer(NO_ID, round(drain_s * 1000)), ServerStopping, timeout_s)


def embed(  # noqa: PLR0913 - named options
    texts: str | Iterable[TextPrompt],
    adapter: str | None = None,
    *,
    timeout_s: float | None = None,
    attempts: int = 1,
    trace: str = "",
    truncation: Truncation | None = None,
    dimensions: int = 0,
) -> PreparedCall[PoolingCall, Embedding]:
    """Compute a vector per text (or list of token ids), with an adapter or the base model.

    With `attempts` over 1, a retryable failure starts the request again under a new id. `trace` is
    the W3C `traceparent` of the span that causes the request. A text that is too long is refused
    without a `truncation`. `dimensions`: the length of the vectors, if the model has several.
    """
    request = embed_request(texts, adapter, trace, truncation, dimensions)
    return PreparedCall(
        lambda session, now: session.begin_pooling(request, now, timeout_s, attempts),
        lambda call: call.embedding(answer_of(call, PoolingDone)),
    )


def classify(
    texts: str | Iterable[TextPrompt],
    adapter: str | None = None,
    *,
    timeout_s: float | None = None,
    attempts: int = 1,
    trace: str = "",
    truncation: Truncation | None = None,
) -> PreparedCall[PoolingCall, Classification]:
    """Compute a score per text and label of the model, with an adapter or the base model.

    With `attempts` over 1, a retryable failure starts the request again under a new id. `trace` is
    the W3C `traceparent` of the span that causes the request. A text that is too long is refused
    without a `truncation`.
    """
    request = classify_request(texts, adapter, trace, truncation)
    return PreparedCall(
        lambda session, now: session.begin_pooling(request, now, timeout_s, attempts),
        lambda call: call.classification(answer_of(call, PoolingDone)),
    )


def generate(  # noqa: PLR0913 - named options
    prompt: TextPrompt,
    adapter: str | None = None,
    *,
    images: ImageSource | Iterable[ImageSource] = (),
    timeout_s: float | None = None,
    attempts: int = 1,
    trace: str = "",
    priority: int = 0,
    **sampling: Unpack[SamplingOptions],
) -> PreparedGeneration:
    """Continue a prompt (text or token ids) with an adapter, or with the base model for None.

    `images` are image files, as bytes or as paths on this machine. The text contains the model's
    own placeholder once per image, in their order. Raises `Malformed` if a request can't hold the
    images.

    `sampling` is any of the fields of `Sampling` of `messages/prompts.py`. Of the requests whose
    adapters are in slots, those with the smallest `priority` start first. With `attempts` over 1, a
    retryable failure starts a new generation under a new id while no token has been delivered;
    `text()` delivers all tokens at the end. `trace` is the W3C `traceparent` of the span that
    causes the request.
    """
    return PreparedGeneration(
        prompt, adapter, images, timeout_s, attempts, priority, sampling, trace
    )


def events(since: int | None = None, follow: bool = True, snapshot: bool = False) -> PreparedEvents:
    """Return the life-cycle events after number `since`, each once and in order.

    `since=0` starts with the oldest event in the log, None with the next new event. With `follow`
    False the stream ends with the newest event at that time.

    Events that the controller does not keep any more are reported: by a `Gap`, or with `snapshot`
    by a `Snapshot` of all adapters, from which the stream continues.
    """
    return PreparedEvents(since, follow, snapshot)
