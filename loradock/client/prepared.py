"""Conversion of the functions of `loradock.client.methods` into methods of both clients.

Such a function has a method's arguments and docstring, and returns what is to be sent. `method`
joins it with the function of one client that sends this and waits: in a thread or on an event loop.
"""

import functools
import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Concatenate, Final, Generic, ParamSpec, TypeVar, cast, get_args

from msgspec import Struct

from loradock.client.calls import NO_ID, ClientCall
from loradock.client.images import ImageSource, with_images
from loradock.client.session import SamplingOptions, Session, answer_of, generate_request
from loradock.client.streams import EventCursor
from loradock.messages.prompts import TextPrompt
from loradock.messages.requests import (
    LIST_PAGE_ADAPTERS_MAX,
    AdaptersListed,
    AdaptersPage,
    EventsFetched,
    EventsReply,
    EventsTooOld,
    FetchEvents,
    Generate,
    ListAdapters,
    Request,
    SnapshotFetched,
)
from loradock.messages.views import AdapterView

C = TypeVar("C", bound=ClientCall)
P = ParamSpec("P")
R = TypeVar("R")
ClientT = TypeVar("ClientT")
PreparedT = TypeVar("PreparedT")
ResultT = TypeVar("ResultT")

_TIMEOUT_S_MIN: Final = 0.001


@dataclass(frozen=True)
class PreparedCall(Generic[C, R]):
    """A request whose result is known when its call is settled.

    `begin` starts the call in a session at a time. `result` returns the result of the settled
    call, or raises its error.
    """

    begin: Callable[[Session, float], C]
    result: Callable[[C], R]


UnaryCall = PreparedCall[ClientCall, R]
"""A request that is answered by one reply of type `R`."""


def unary(request: Request, reply_type: type[R], timeout_s: float | None = None) -> UnaryCall[R]:
    """Return the call of a request that is answered by one reply."""
    return PreparedCall(
        lambda session, now: session.begin(request, now, timeout_s),
        lambda call: answer_of(call, reply_type),
    )


class PreparedGeneration(Struct, frozen=True):
    """The arguments of a generation whose images have not been read yet."""

    prompt: TextPrompt
    adapter: str | None
    images: ImageSource | Iterable[ImageSource]
    timeout_s: float | None
    attempts: int
    priority: int
    sampling: SamplingOptions
    trace: str = ""

    def request(self) -> Generate:
        """Read the images and return the request."""
        prompt = with_images(self.prompt, self.images)
        return generate_request(prompt, self.adapter, self.sampling, self.priority, self.trace)


Page = AdaptersPage | AdaptersListed | SnapshotFetched
"""A part of a list: one page, a short list as a whole, or the first page from a fetch of events."""


class PreparedList:
    """A list of adapters that is fetched page by page; `timeout_s` is for all of them together."""

    def __init__(self, timeout_s: float | None) -> None:
        self._timeout_s = timeout_s
        self._deadline: float | None = None
        self._views: list[AdapterView] = []
        self._events_seq: int | None = None
        self._request_id = NO_ID
        self.is_complete = False

    def page(self) -> PreparedCall[ClientCall, Page]:
        """Return the request of the next page."""
        return PreparedCall(self._begin, _page_of)

    def _begin(self, session: Session, now: float) -> ClientCall:
        last = self._views[-1] if self._views else None
        after, after_id = ("", 0) if last is None else (last.adapter, last.adapter_id)
        request = ListAdapters(NO_ID, after, after_id, LIST_PAGE_ADAPTERS_MAX)
        if self._deadline is not None:
            return session.begin(request, now, max(_TIMEOUT_S_MIN, self._deadline - now))
        call = session.begin(request, now, self._timeout_s)
        self._deadline = now + call.timeout_s
        return call

    def add(self, page: Page) -> None:
        """Add the next part."""
        self._views += page.adapters
        self._request_id = page.request_id
        if self._events_seq is None:
            self._events_seq = page.events_seq
        self.is_complete = isinstance(page, AdaptersListed) or not page.more

    def result(self) -> AdaptersListed:
        """Return all pages as one list, replaced versions after the current one.

        The number of its event is the first page's, from which all changes follow.
        """
        ordered = sorted(self._views, key=lambda view: (view.adapter, view.retired))
        return AdaptersListed(self._request_id, tuple(ordered), self._events_seq or 0)


def _page_of(call: ClientCall) -> Page:
    # A short list may be answered whole.
    if isinstance(call.outcome, AdaptersListed):
        return call.outcome
    return answer_of(call, AdaptersPage)


@dataclass(frozen=True)
class PreparedEvents:
    """The arguments of an event stream."""

    since: int | None
    follow: bool
    snapshot: bool

    def cursor(self, events_seq: int) -> EventCursor:
        """Return the position at the start; `events_seq` is the last event's number now."""
        next_seq = (events_seq if self.since is None else self.since) + 1
        return EventCursor(next_seq, self.since is not None, self.snapshot)


def fetch(
    request: FetchEvents,
) -> PreparedCall[ClientCall, EventsReply]:
    """Return the call of a fetch of events."""
    return PreparedCall(lambda session, now: session.begin(request, now, None), _fetched)


def _fetched(call: ClientCall) -> EventsReply:
    if isinstance(call.outcome, EventsTooOld | SnapshotFetched):
        return call.outcome
    return answer_of(call, EventsFetched)


def method(
    prepare: Callable[P, PreparedT], perform: Callable[[ClientT, PreparedT], ResultT]
) -> Callable[Concatenate[ClientT, P], ResultT]:
    """Return a method with the arguments and the docstring of `prepare`.

    The method passes what `prepare` returns for its arguments to `perform`, which is a function of
    the blocking client or a coroutine function of the asyncio client.
    """

    async def run_async(client: Any, /, *args: P.args, **kwargs: P.kwargs) -> Any:
        return await cast(Any, perform)(client, prepare(*args, **kwargs))

    def run(client: ClientT, /, *args: P.args, **kwargs: P.kwargs) -> ResultT:
        return perform(client, prepare(*args, **kwargs))

    joined: Any = run_async if inspect.iscoroutinefunction(perform) else run
    functools.update_wrapper(joined, prepare)
    joined.__signature__ = _signature(prepare, perform)
    return cast("Callable[Concatenate[ClientT, P], ResultT]", joined)


def _signature(prepare: Callable[..., Any], perform: Callable[..., Any]) -> inspect.Signature:
    """Return the arguments of `prepare` after `self`, and the type of the result."""
    prepared, performed = inspect.signature(prepare), inspect.signature(perform)
    client = next(iter(performed.parameters.values()))
    result = performed.return_annotation
    if isinstance(result, TypeVar):
        *_, result = get_args(prepared.return_annotation)
    parameters = [client, *prepared.parameters.values()]
    return inspect.Signature(parameters, return_annotation=result)
