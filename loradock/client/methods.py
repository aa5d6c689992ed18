"""The requests of a client: its methods, as coroutines over a `Port`.

`AsyncClient` is these methods; `Client` runs each of them to its end.
"""

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterable
from functools import partial
from typing import Any, Final, Self, TypeVar, Unpack

import msgspec

from loradock.client.arguments import (
    ImageSource,
    SamplingOptions,
    inputs_of,
    with_images,
)
from loradock.client.calls import NO_ID, Classification, ClientCall, Embedding, GenerationCall
from loradock.client.session import Session, answer_of
from loradock.client.sockets import Port
from loradock.client.streams import AsyncEventStream, EventCursor, FetchReply
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
from loradock.messages.prompts import Prompt, Sampling, TextPrompt, Truncation
from loradock.messages.requests import (
    LIST_PAGE_ADAPTERS_MAX,
    ActivateAdapter,
    ActivateBatch,
    AdapterDone,
    AdapterShown,
    AdaptersListed,
    AdaptersPage,
    BatchDone,
    CancelDone,
    CancelGeneration,
    Classify,
    DeactivateAdapter,
    Embed,
    EventsFetched,
    EventsReply,
    EventsTooOld,
    EvictAdapter,
    FetchEvents,
    Generate,
    GenerationDone,
    HoldAdapter,
    ListAdapters,
    LoadAdapter,
    PoolingDone,
    PrefetchAccepted,
    PrefetchAdapter,
    ReleaseAdapter,
    RemoveAdapter,
    Request,
    ShowAdapter,
    ShowStatus,
    SnapshotFetched,
    StageAdapter,
    StatusShown,
    TokensStreamed,
)
from loradock.messages.views import PrefetchTarget

C = TypeVar("C", bound=ClientCall)
R = TypeVar("R")

_MEBIBYTE: Final = 1 << 20
_SECOND_NS: Final = 1_000_000_000
_TIMEOUT_S_MIN: Final = 0.001


class Methods:
    """A method for each request of a client."""

    def __init__(self, port: Port) -> None:
        self._port = port

    async def load(
        self, adapter: str, path: str = "", replace: bool = False, timeout_s: float | None = None
    ) -> AdapterDone:
        """Load an adapter into host memory; with `replace`, a known name can get other content."""
        return await self._ask(LoadAdapter(NO_ID, adapter, path, replace), AdapterDone, timeout_s)

    async def stage(
        self, adapter: str, path: str = "", timeout_s: float | None = None
    ) -> AdapterDone:
        """Copy an adapter to page-locked memory, loading it first if needed."""
        return await self._ask(StageAdapter(NO_ID, adapter, path), AdapterDone, timeout_s)

    async def activate(
        self, adapter: str, path: str = "", timeout_s: float | None = None
    ) -> AdapterDone:
        """Copy an adapter into a device slot, loading and staging it first if needed."""
        return await self._ask(ActivateAdapter(NO_ID, adapter, path), AdapterDone, timeout_s)

    async def hold(
        self, adapter: str, path: str = "", timeout_s: float | None = None
    ) -> AdapterDone:
        """Exempt an adapter from every eviction, activating it first if needed."""
        return await self._ask(HoldAdapter(NO_ID, adapter, path), AdapterDone, timeout_s)

    async def prefetch(
        self,
        adapter: str,
        path: str = "",
        target: PrefetchTarget = "gpu-slot",
        timeout_s: float | None = None,
    ) -> PrefetchAccepted:
        """Move an adapter up to `target` ahead of its use; returns before it moves.

        It moves only if no use of another adapter is affected: a slot must be free, and on the host
        only idle adapters outside the slots are evicted for it.
        """
        return await self._ask(
            PrefetchAdapter(NO_ID, adapter, path, target), PrefetchAccepted, timeout_s
        )

    async def release(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """End a hold; the adapter stays where it is until the policy evicts it."""
        return await self._ask(ReleaseAdapter(NO_ID, adapter), AdapterDone, timeout_s)

    async def deactivate(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """Remove an adapter from its slot; it stays in page-locked memory."""
        return await self._ask(DeactivateAdapter(NO_ID, adapter), AdapterDone, timeout_s)

    async def evict(self, adapter: str, timeout_s: float | None = None) -> AdapterDone:
        """Drop an adapter's weights from all memory; its source and history are kept."""
        return await self._ask(EvictAdapter(NO_ID, adapter), AdapterDone, timeout_s)

    async def remove(
        self, adapter: str, force: bool = False, timeout_s: float | None = None
    ) -> AdapterDone:
        """Forget an adapter; `force` also ends a hold and waits for running requests."""
        return await self._ask(RemoveAdapter(NO_ID, adapter, force), AdapterDone, timeout_s)

    async def activate_batch(
        self, adapters: Iterable[str], timeout_s: float | None = None
    ) -> BatchDone:
        """Copy all adapters of a batch into slots, so that all are there at one moment."""
        return await self._ask(ActivateBatch(NO_ID, tuple(adapters)), BatchDone, timeout_s)

    async def list(self, timeout_s: float | None = None) -> AdaptersListed:
        """List every known adapter, ordered by name.

        A long list is fetched in pages, each true to its moment. A subscriber can continue from the
        event number of the result.
        """
        return await self._rest_of_list((), timeout_s)

    async def show(self, adapter: str, timeout_s: float | None = None) -> AdapterShown:
        """Return everything that is known about one adapter."""
        return await self._ask(ShowAdapter(NO_ID, adapter), AdapterShown, timeout_s)

    async def status(self, timeout_s: float | None = None, *, uses: bool = False) -> StatusShown:
        """Return the status of the controller, its engine and its budgets.

        `uses`: also count adapters by state, and list those that are in a slot or have requests.
        """
        return await self._ask(ShowStatus(NO_ID, uses), StatusShown, timeout_s)

    async def metrics(self, timeout_s: float | None = None) -> dict[str, Any]:
        """Return counts, sizes and durations under the keys of `LoRAModelManager.get_lora_metrics`.

        Sizes are in bytes, `adapter_memory_mb` and `gpu_memory_usage` in MiB; durations in seconds.
        `utilization` is the part of the slots in use, `memory_efficiency` that of the device's
        adapter memory. `avg_activation_time` is the mean time of a copy into a slot,
        `avg_switching_time` how long a request waited for an adapter that was not in a slot.
        `engine` is as of its last heartbeat, except for its requests, which are current. `counters`
        count all adapters since the start of the log.
        """
        return metrics_of(await self.status(timeout_s))

    async def cancel(self, request_id: str, timeout_s: float | None = None) -> CancelDone:
        """End a generation of this client; `found` is False if none was running."""
        return await self._ask(CancelGeneration(NO_ID, request_id), CancelDone, timeout_s)

    async def list_requests(self, timeout_s: float | None = None) -> RequestsListed:
        """List the requests in progress of all clients, the oldest first."""
        return await self._ask(ListRequests(NO_ID), RequestsListed, timeout_s)

    async def cancel_request(self, request_id: str, timeout_s: float | None = None) -> CancelDone:
        """End a generation of any client, by its id in `list_requests`."""
        return await self._ask(CancelRequest(NO_ID, request_id), CancelDone, timeout_s)

    async def list_slow(self, timeout_s: float | None = None) -> SlowListed:
        """List the slowest operations on adapters and the slowest requests of the last hour."""
        return await self._ask(ListSlow(NO_ID), SlowListed, timeout_s)

    async def settings(self, timeout_s: float | None = None) -> SettingsShown:
        """Return the server's limits and policy; those in `fixed` need a restart to change."""
        return await self._ask(ShowSettings(NO_ID), SettingsShown, timeout_s)

    async def change_settings(
        self, limits: dict[str, int] | None = None, policy: str = "", timeout_s: float | None = None
    ) -> SettingsShown:
        """Change limits and the policy while adapters stay where they are; empty values stay."""
        return await self._ask(
            ChangeSettings(NO_ID, limits or {}, policy), SettingsShown, timeout_s
        )

    async def stop_server(
        self, drain_s: float = 30.0, timeout_s: float | None = None
    ) -> ServerStopping:
        """End the server: new requests are refused, those in progress have `drain_s` to end."""
        return await self._ask(StopServer(NO_ID, round(drain_s * 1000)), ServerStopping, timeout_s)

    async def embed(  # noqa: PLR0913 - named options
        self,
        texts: str | Iterable[TextPrompt],
        adapter: str | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = 1,
        trace: str = "",
        truncation: Truncation | None = None,
        dimensions: int = 0,
        client: str = "",
    ) -> Embedding:
        """Compute a vector per text (or list of token ids), with an adapter or the base model.

        With `attempts` over 1, a retryable failure starts the request again under a new id. `trace`
        is the W3C `traceparent` of the span that causes the request. A text that is too long is
        refused without a `truncation`. `dimensions`: the length of the vectors, if the model has
        several. `client`: as in `generate`.
        """
        request = Embed(
            NO_ID,
            adapter,
            inputs_of(texts),
            trace=trace,
            truncation=truncation,
            dimensions=dimensions,
            client=client,
        )
        call = await self._settled(
            lambda session, now: session.begin(request, now, timeout_s, attempts)
        )
        done = answer_of(call, PoolingDone)
        # Millions of numbers take a second, in which the loop serves others.
        return await self._port.in_background(partial(call.embedding, done))

    async def classify(  # noqa: PLR0913 - named options
        self,
        texts: str | Iterable[TextPrompt],
        adapter: str | None = None,
        *,
        timeout_s: float | None = None,
        attempts: int = 1,
        trace: str = "",
        truncation: Truncation | None = None,
        client: str = "",
    ) -> Classification:
        """Compute a score per text and label of the model, with an adapter or the base model.

        With `attempts` over 1, a retryable failure starts the request again under a new id. `trace`
        is the W3C `traceparent` of the span that causes the request. A text that is too long is
        refused without a `truncation`. `client`: as in `generate`.
        """
        request = Classify(
            NO_ID, adapter, inputs_of(texts), trace=trace, truncation=truncation, client=client
        )
        call = await self._settled(
            lambda session, now: session.begin(request, now, timeout_s, attempts)
        )
        done = answer_of(call, PoolingDone)
        return await self._port.in_background(partial(call.classification, done))

    def generate(  # noqa: PLR0913 - named options
        self,
        prompt: TextPrompt,
        adapter: str | None = None,
        *,
        images: ImageSource | Iterable[ImageSource] = (),
        timeout_s: float | None = None,
        attempts: int = 1,
        trace: str = "",
        priority: int = 0,
        client: str = "",
        **sampling: Unpack[SamplingOptions],
    ) -> "AsyncGeneration":
        """Continue a prompt (text or token ids) with an adapter, or with the base model for None.

        `images` are image files, as bytes or as paths on this machine. The text contains the
        model's own placeholder once per image, in their order. Raises `Malformed` if a request
        can't hold the images.

        `sampling` is any of the fields of `Sampling` of `messages/prompts.py`. Of the requests
        whose adapters are in slots, those with the smallest `priority` start first. With `attempts`
        over 1, a retryable failure starts a new generation under a new id while no token has been
        delivered; `text()` delivers all tokens at the end. `trace` is the W3C `traceparent` of the
        span that causes the request. `client` names whom the request is for, by at most 64
        characters, if this process makes requests for several clients: an adapter's
        turns are shared equally among them.
        """

        async def begin() -> GenerationCall:
            port = self._port
            with port.use():
                whole: Prompt = prompt
                if images != ():
                    whole = await port.in_background(lambda: with_images(prompt, images))
                request = Generate(
                    NO_ID,
                    adapter,
                    whole,
                    Sampling(**sampling),
                    priority=priority,
                    trace=trace,
                    client=client,
                )
                call = port.session.begin(request, time.monotonic(), timeout_s, attempts)
                try:
                    port.flush()
                except BaseException:
                    # Nothing could cancel it later: an interrupted wait for the first answer.
                    port.session.abandon(call, time.monotonic())
                    port.flush()
                    raise
            return call

        return AsyncGeneration(self._port, begin)

    async def events(
        self, since: int | None = None, follow: bool = True, snapshot: bool = False
    ) -> AsyncEventStream:
        """Return the life-cycle events after number `since`, each once and in order.

        `since=0` starts with the oldest event in the log, None with the next new event. With
        `follow` False the stream ends with the newest event at that time.

        Events that the controller does not keep any more are reported: by a `Gap`, or with
        `snapshot` by a `Snapshot` of all adapters, from which the stream continues.
        """
        port = self._port
        subscription = port.subscribe() if follow else None
        last_seq = (await self.status()).events_seq if since is None else since
        cursor = EventCursor(last_seq + 1, since is not None, snapshot)
        is_remote = port.connection.keys is not None
        return AsyncEventStream(self._fetch, subscription, cursor, is_remote=is_remote)

    async def _ask(self, request: Request, reply_type: type[R], timeout_s: float | None) -> R:
        call = await self._settled(lambda session, now: session.begin(request, now, timeout_s))
        return answer_of(call, reply_type)

    async def _settled(self, begin: Callable[[Session, float], C]) -> C:
        port = self._port
        with port.use():
            return await _completed(port, begin(port.session, time.monotonic()))

    async def _fetch(self, request: FetchEvents) -> FetchReply:
        """Return the answer to a fetch of events; a long snapshot is completed to a list."""
        call = await self._settled(lambda session, now: session.begin(request, now))
        fetched = answer_of(call, *_FETCHED)
        if isinstance(fetched, SnapshotFetched):
            return await self._rest_of_list((fetched,))
        return fetched

    async def _rest_of_list(
        self, pages: "tuple[Page, ...]", timeout_s: float | None = None
    ) -> AdaptersListed:
        """Fetch the pages that follow; the time limit is for all of them together."""
        until: float | None = None
        while not pages or _has_more(pages[-1]):
            now = time.monotonic()
            left_s = timeout_s if until is None else max(_TIMEOUT_S_MIN, until - now)
            call = await self._page_after(pages, left_s)
            until = now + call.timeout_s if until is None else until
            pages = (*pages, answer_of(call, *_PAGES))
        return _joined(pages)

    async def _page_after(self, pages: "tuple[Page, ...]", timeout_s: float | None) -> ClientCall:
        last = pages[-1].adapters[-1] if pages else None
        after = ("", 0) if last is None else (last.adapter, last.adapter_id)
        request = ListAdapters(NO_ID, *after, LIST_PAGE_ADAPTERS_MAX)
        return await self._settled(lambda session, now: session.begin(request, now, timeout_s))


async def _completed(port: Port, call: C) -> C:
    """Send a call that has begun and wait until it is settled; it is then forgotten."""
    try:
        port.flush()
        await port.wait(call, lambda: call.settled)
    finally:
        port.session.forget(call)
    return call


Page = AdaptersPage | AdaptersListed | SnapshotFetched
"""A part of a list: one page, a short list as a whole, or the first page from a fetch of events."""

_PAGES: Final[tuple[type[AdaptersPage | AdaptersListed], ...]] = (AdaptersPage, AdaptersListed)
_FETCHED: Final[tuple[type[EventsReply], ...]] = (EventsFetched, EventsTooOld, SnapshotFetched)


def _has_more(page: Page) -> bool:
    return not isinstance(page, AdaptersListed) and page.more


def _joined(pages: tuple[Page, ...]) -> AdaptersListed:
    """Return all pages as one list, replaced versions after the current one.

    The number of its event is the first page's, from which all changes follow.
    """
    views = [view for page in pages for view in page.adapters]
    views.sort(key=lambda view: (view.adapter, view.retired))
    return AdaptersListed(pages[-1].request_id, tuple(views), pages[0].events_seq)


class AsyncGeneration:
    """A generation: `async for` its chunks as they arrive, or `await` its `text()`.

    It starts when it is awaited, which returns it, or used for the first time. A chunk is a
    `TokensStreamed`: `tokens[i]` is token `offset + i` of output `index`, each once. Only one task
    can read it. Leaving the `async with` block, `close()`, and dropping the last reference to it,
    as by leaving an `async for` loop over it, cancel a generation that was not read to its end.
    """

    def __init__(self, port: Port, begin: Callable[[], Awaitable[GenerationCall]]) -> None:
        self._port = port
        self._begin = begin
        self._begun: GenerationCall | None = None
        self._closed = False

    def __await__(self) -> Generator[Any, None, Self]:
        return self._start().__await__()

    async def _start(self) -> Self:
        await self._call()
        return self

    async def _call(self) -> GenerationCall:
        """Return the call, which begins with the first use."""
        if self._begun is None:
            self._begun = await self._begin()
        return self._begun

    def __del__(self) -> None:
        if self._begun is not None and not self._closed and not self._begun.settled:
            self._port.drop(self._begun)

    @property
    def request_id(self) -> str:
        """The id under which the controller knows it, empty before its start.

        A further attempt has another one.
        """
        return "" if self._begun is None else self._begun.request_id

    @property
    def result(self) -> GenerationDone | None:
        """The reason of its end and its numbers of tokens; None before the end, or if it failed."""
        return None if self._begun is None else self._begun.result

    def __aiter__(self) -> AsyncIterator[TokensStreamed]:
        return self

    async def __anext__(self) -> TokensStreamed:
        call = self._begun or await self._call()
        # `_wait` is a coroutine, which output that has arrived does not need.
        if not (call.chunks or self._closed or call.settled):
            await self._port.wait(call, lambda: bool(call.chunks) or call.settled)
        if call.chunks:
            return call.pop()
        if not self._closed:
            answer_of(call, GenerationDone)
        raise StopAsyncIteration

    async def read(self, on_chunk: Callable[[TokensStreamed], None]) -> GenerationDone:
        """Call a function with each further chunk as it arrives, and return how it ended.

        This costs less than iterating, because the task continues only at the end.
        """
        call = await self._call()

        def has_ended() -> bool:
            while call.chunks:
                on_chunk(call.pop())
            return call.settled

        if not self._closed:
            await self._port.wait(call, has_ended)
        has_ended()
        return answer_of(call, GenerationDone)

    async def text(self) -> str:
        """Wait for the end and return the whole text, including chunks iterated over before.

        Of several outputs (`n`) it is the first one's.
        """
        return (await self.texts())[0]

    async def texts(self) -> tuple[str, ...]:
        """Wait for the end and return the whole text of each output."""
        call = await self._call()
        if not self._closed:
            await self._port.wait(call, lambda: call.settled)
            answer_of(call, GenerationDone)
        return call.texts()

    async def cancel(self) -> bool:
        """End it early; its output can still be read. False if it was not running."""
        call = await self._call()
        with self._port.use():
            asked = self._port.session.begin_cancel(call, time.monotonic())
            if asked is None:
                return False
            await _completed(self._port, asked)
        return answer_of(asked, CancelDone).found

    async def close(self) -> None:
        """Stop reading; a running generation is cancelled without waiting for the answer."""
        if self._begun is not None and not self._closed and not self._begun.settled:
            with self._port.use():
                self._port.session.abandon(self._begun, time.monotonic())
                self._port.flush()
        self._closed = True

    async def __aenter__(self) -> Self:
        return await self

    async def __aexit__(self, *exception: object) -> None:
        await self.close()


def metrics_of(status: StatusShown) -> dict[str, Any]:
    """Return the metrics of a status, as `Methods.metrics` describes them."""
    tiers = {tier.name: tier for tier in status.tiers}
    host, pinned, device = tiers["host"], tiers["pinned"], tiers["device"]
    counters, engine = status.counters, status.engine
    activations = _durations(counters.activations, counters.write_ns)
    switches = _durations(counters.misses, counters.wait_ns)
    return {
        "adapters": {
            "registered": host.count,
            "active": device.count,
            "capacity": host.count_max,
            "utilization": _ratio(device.count, device.count_max),
            "host_utilization": _ratio(host.count, host.count_max),
        },
        "memory": {
            "adapter_memory_mb": (host.size_bytes + pinned.size_bytes) / _MEBIBYTE,
            "gpu_memory_usage": engine.allocated_bytes / _MEBIBYTE,
            "memory_efficiency": _ratio(device.size_bytes, device.size_bytes_max),
            "tiers": {name: msgspec.structs.asdict(tier) for name, tier in tiers.items()},
            "device": {
                "size_bytes": device.size_bytes_max,
                "free_bytes": device.size_bytes_max - device.size_bytes,
            },
        },
        "performance": {
            "avg_activation_time": activations["average_seconds"],
            "avg_switching_time": switches["average_seconds"],
            "activations": activations,
            "switches": switches,
            "loads": _durations(counters.loads, counters.load_ns),
            "hits": counters.hits,
            "misses": counters.misses,
            "evictions": counters.evictions,
            "punica_kernel_enabled": bool(engine.kernels),
            "punica_kernels": engine.kernels,
        },
        "engine": msgspec.structs.asdict(engine),
        "counters": msgspec.structs.asdict(counters),
    }


def _durations(count: int, total_ns: int) -> dict[str, float]:
    return {
        "count": count,
        "seconds": total_ns / _SECOND_NS,
        "average_seconds": _ratio(total_ns, count) / _SECOND_NS,
    }


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
