"""What a client makes of streams that may repeat, overlap or skip: output tokens and events.

What it is: `TokenOutput` (each token and character of a generation once) and `EventCursor` (each
event once, in order). What it is not: requests, sockets or time. One rule: whatever order and
however often the pieces come, what is handed out is a prefix of the true stream, or says so.
"""

from collections import deque
from typing import Final

from msgspec import Struct

from messages.events import Published
from messages.requests import EventsFetched, FetchEvents, TokensStreamed
from messages.wire import EVENTS, WireError

EVENTS_PER_FETCH: Final = 1024


class TokenOutput:
    """A generation's output put together from chunks.

    After a request was sent again the engine streams everything again from offset 0, in other
    chunks if it likes. The text of n tokens is a function of those tokens alone, so a chunk is
    usable exactly if the text's length at its first token is known: that is so for every offset
    at which a usable chunk began or ended.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self._characters = 0
        self._characters_at = {0: 0}

    def add(self, chunk: TokensStreamed) -> TokensStreamed | None:
        """What is new in `chunk`; None if nothing is, or if what came before it is missing."""
        before = self._characters_at.get(chunk.offset)
        if before is None:
            return None
        end = chunk.offset + len(chunk.tokens)
        characters = before + len(chunk.text)
        # The smaller one wins: text that came without a token (the end of a held-back piece)
        # must not count as known before it where a repeat brings it on its own.
        self._characters_at[end] = min(characters, self._characters_at.get(end, characters))
        if end < self.tokens or (end == self.tokens and characters <= self._characters):
            return None
        fresh = TokensStreamed(
            chunk.request_id,
            self.tokens,
            chunk.tokens[self.tokens - chunk.offset :],
            chunk.text[max(0, self._characters - before) :],
        )
        self.tokens = end
        self._characters = max(self._characters, characters)
        return fresh

    def misses(self, chunk: TokensStreamed) -> bool:
        """Whether tokens before `chunk` never came."""
        return chunk.offset not in self._characters_at


class Gap(Struct, frozen=True, tag=True):
    """The event stream goes on at number `found` where `expected` was due.

    `found > expected`: the events between are older than what the controller's log still tells.
    `found < expected`: the log was replaced or lost its end, and its numbers begin again.
    """

    expected: int
    found: int


class EventCursor:
    """One reader's place in the event stream.

    While `behind`, the reader fetches from `next_seq` and leaves the subscription's frames where
    they are: they are read after it, so a fetch is never chased by frames that had to be dropped.
    """

    def __init__(self, next_seq: int, behind: bool) -> None:
        self.next_seq = next_seq
        self.seq = next_seq - 1
        self.ready: deque[Published | Gap] = deque()
        self._last_seq = next_seq if behind else next_seq - 1
        self._frame_seq = 0

    @property
    def behind(self) -> bool:
        """Whether events are known to be published that have not come."""
        return self._last_seq >= self.next_seq

    def pop(self) -> Published | Gap:
        """The next item of `ready`; `seq` is then the number that the stream goes on after."""
        item = self.ready.popleft()
        self.seq = item.seq if isinstance(item, Published) else item.found - 1
        return item

    def fetch(self) -> FetchEvents:
        """The request for what is missing; it is not numbered yet."""
        return FetchEvents("", self.next_seq, EVENTS_PER_FETCH)

    def on_frame(self, data: bytes) -> None:
        """Take a frame of the subscription; one that can't be read is as good as lost."""
        try:
            frame = EVENTS.decode(data)
        except WireError:
            return
        if frame.seq < self._frame_seq:
            self._begin_again()
        self._frame_seq = frame.seq
        self._last_seq = max(self._last_seq, frame.seq)
        self._deliver(frame.message)

    def on_fetched(self, reply: EventsFetched) -> None:
        """Take the answer to a fetch from `next_seq`; afterwards `next_seq` or `behind` moved."""
        if reply.last_seq < self.next_seq - 1:
            self._begin_again()
            return
        self._last_seq = reply.last_seq
        first = max(self.next_seq, reply.events[0].seq) if reply.events else reply.last_seq + 1
        self._skip_to(first)
        self._deliver(reply.events)
        if self.next_seq == first and self.behind:
            self._skip_to(reply.last_seq + 1)

    def _deliver(self, batch: tuple[Published, ...]) -> None:
        for published in batch:
            if published.seq == self.next_seq:
                self.ready.append(published)
                self.next_seq += 1

    def _skip_to(self, seq: int) -> None:
        if seq > self.next_seq:
            self.ready.append(Gap(self.next_seq, seq))
            self.next_seq = seq

    def _begin_again(self) -> None:
        self.ready.append(Gap(self.next_seq, 1))
        self.next_seq = 1
        self._last_seq = 1
        self._frame_seq = 0
