"""Clients and subscribers: the real session and the real event cursor over links."""

import hashlib
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from loradock.client.calls import ClientCall, GenerationCall, PoolingCall, Timing
from loradock.client.session import Session
from loradock.client.streams import EventCursor, Gap
from loradock.messages import requests
from loradock.messages.errors import LoradockError
from loradock.messages.events import Published
from loradock.messages.ids import client_name, scoped
from loradock.messages.wire import TOKEN_BYTES
from tests.support.campaign.machine import MACHINE, SECOND
from tests.support.campaign.network import Link
from tests.support.campaign.scheduler import Scheduler, Wakeup

TIMING: Final = Timing(retry_s_min=0.1, retry_s_max=0.4, slack_s=0.3, lost_tokens_s=1.5)
TIMEOUT_S: Final = 1.0
GENERATION_TIMEOUT_S: Final = 1.5


class ClientProcess:
    """One life of a client: a session whose calls are observed."""

    def __init__(
        self,
        scheduler: Scheduler,
        name: str,
        to_controller: Link,
        on_begun: Callable[[str, requests.Request], None],
        on_settled: Callable[[str, ClientCall], None],
    ) -> None:
        token = hashlib.blake2b(name.encode(), digest_size=TOKEN_BYTES).digest()
        self.scope = client_name(token, "")
        self.session = Session(token, TIMING, TIMEOUT_S, GENERATION_TIMEOUT_S)
        self.calls: list[ClientCall] = []
        self._begun: set[str] = set()
        self.is_running = True
        self._link = to_controller
        self._on_begun = on_begun
        self._on_settled = on_settled
        self._wakeup = Wakeup(scheduler, self.advance)

    def begin(self, request: requests.Request) -> ClientCall:
        """Start a request with a new id."""
        now = MACHINE.now_s
        call = self.session.begin(request, now)
        self.calls.append(call)
        self._note_begun()
        self.advance()
        return call

    def _note_begun(self) -> None:
        """Note each new request: the session itself cancels generations that are too late."""
        for request_id, call in self.session._calls.items():
            if request_id not in self._begun:
                self._begun.add(request_id)
                self._on_begun(scoped(self.scope, request_id), call.request)

    def receive(self, frame: bytes) -> None:
        if self.is_running:
            self.session.receive(frame, MACHINE.now_s)
            self.advance()

    def advance(self) -> None:
        """Send what is due, and note what is settled."""
        if not self.is_running:
            return
        now = MACHINE.now_s
        for frame in self.session.due(now):
            self._link.send(frame)
        self._note_begun()
        if any(call.settled for call in self.calls):
            settled = [call for call in self.calls if call.settled]
            self.calls = [call for call in self.calls if not call.settled]
            for call in settled:
                self._on_settled(self.scope, call)
        wake_at = self.session.wake_at()
        if wake_at < float("inf"):
            # Rounded up, so that the call is due then.
            self._wakeup.request(max(0, int((wake_at - now) * SECOND)) + 1000)

    def end(self) -> None:
        """End the process at once."""
        self.is_running = False
        self._wakeup.end()


def is_success(call: ClientCall) -> bool:
    """Whether a settled call was answered with what it requested."""
    return call.outcome is not None and not isinstance(call.outcome, LoradockError)


def output_of(call: ClientCall) -> Any:
    """Return the tokens or vectors that a settled call received."""
    match call:
        case GenerationCall():
            tokens: list[int] = []
            for chunk in call.chunks:
                assert chunk.offset == len(tokens), f"{call.request_id} has a gap in its output"
                tokens += chunk.tokens
            return tuple(tokens)
        case PoolingCall():
            return tuple(call._vectors[index] for index in sorted(call._vectors))
    return None


class Subscriber:
    """A reader of all events: it follows the publication and fetches what it missed."""

    def __init__(self, client: ClientProcess, *, may_have_gaps: bool) -> None:
        self.client = client
        self._may_have_gaps = may_have_gaps
        self.events: list[Published] = []
        self._cursor = EventCursor(1, needs_fetch=True)
        # While a fetch is needed, the cursor requires that frames wait.
        self._frames: deque[bytes] = deque()
        self._fetch: ClientCall | None = None

    @property
    def next_seq(self) -> int:
        return self._cursor.next_seq

    def receive(self, frame: bytes) -> None:
        """Process a frame of the publication."""
        self._frames.append(frame)
        self.advance()

    def advance(self) -> None:
        """Take the events that are ready; fetch if some are missing."""
        fetch, cursor = self._fetch, self._cursor
        if fetch is not None and fetch.settled:
            self._fetch = None
            if isinstance(fetch.outcome, requests.EventsFetched | requests.EventsTooOld):
                cursor.on_fetched(fetch.outcome)
        while self._frames and not cursor.needs_fetch:
            cursor.on_frame(self._frames.popleft())
        while cursor.ready:
            item = cursor.pop()
            if isinstance(item, Gap):
                assert self._may_have_gaps, f"the subscriber has a gap: {item}"
            else:
                self.events.append(item)
        if cursor.needs_fetch and self._fetch is None:
            self._fetch = self.client.begin(cursor.fetch_request())
