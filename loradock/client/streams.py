"""Assembly of streams that may repeat, overlap or have gaps: output tokens and events.

`TokenOutput` yields each token and character of a generation once, `EventCursor` each event once
and in order. In any order of arrival and with any repetition, what they yield is a prefix of the
complete stream, or contains a `Gap` or a `Snapshot` where events are missing.
"""

from collections import deque
from typing import Final

import msgspec
from msgspec import Struct

from loradock.messages.events import EventWithheld, Published
from loradock.messages.requests import (
    AdaptersListed,
    EventsFetched,
    EventsTooOld,
    FetchEvents,
    GenerationDone,
    TokensStreamed,
)
from loradock.messages.views import AdapterView
from loradock.messages.wire import EVENTS, WireError

EVENTS_PER_FETCH: Final = 1024

SILENCE_S: Final = 1.0
"""A subscription to a remote controller without a frame for this long is not admitted, or lost.

A subscription receives beats, and a key that is limited to some adapters can only fetch events.
"""


class TokenOutput:
    """One output of a generation, assembled from chunks.

    After a request was sent again the engine streams everything again from offset 0, perhaps in
    other chunks. The text of n tokens is a function of those tokens alone, so a chunk is usable
    exactly if the text's length at its first token is known. It is known for every offset at which
    a usable chunk began or ended.
    """

    def __init__(self) -> None:
        self.tokens = 0
        self.has_ended = False
        self._has_prompt = False
        self._characters = 0
        self._characters_at = {0: 0}

    def add(self, chunk: TokensStreamed) -> TokensStreamed | None:
        """Return the new part of `chunk`; None if nothing is new or output before it is missing."""
        before = self._characters_at.get(chunk.offset)
        if before is None:
            return None
        end = chunk.offset + len(chunk.tokens)
        characters = before + len(chunk.text)
        # The smaller length is kept: text that arrived without a token (the end of a held-back
        # piece) must not count as known before a repeated chunk that contains it alone.
        self._characters_at[end] = min(characters, self._characters_at.get(end, characters))
        has_text = end > self.tokens or (end == self.tokens and characters > self._characters)
        is_end = chunk.finish_reason is not None and not self.has_ended
        if not has_text and not is_end:
            return None
        new = chunk
        # Most chunks are new as a whole.
        if chunk.offset < self.tokens or before < self._characters or self._has_prompt:
            known = self.tokens - chunk.offset
            new = msgspec.structs.replace(
                chunk,
                offset=self.tokens,
                tokens=chunk.tokens[known:],
                text=chunk.text[max(0, self._characters - before) :],
                logprobs=chunk.logprobs[known:],
                prompt_logprobs=() if self._has_prompt else chunk.prompt_logprobs,
            )
        self.tokens = max(self.tokens, end)
        self.has_ended = self.has_ended or is_end
        self._has_prompt = self._has_prompt or bool(chunk.prompt_logprobs)
        self._characters = max(self._characters, characters)
        return new

    def has_gap_before(self, chunk: TokensStreamed) -> bool:
        """Whether tokens before `chunk` have not arrived."""
        return chunk.offset not in self._characters_at


class GenerationOutput:
    """All outputs of a generation; `count` is their number."""

    def __init__(self, count: int) -> None:
        self._outputs = [TokenOutput() for _ in range(count)]

    @property
    def tokens(self) -> int:
        """The number of tokens that have arrived."""
        return sum(output.tokens for output in self._outputs)

    @property
    def has_ended(self) -> bool:
        """Whether the ends of all outputs have arrived."""
        return all(output.has_ended for output in self._outputs)

    def of(self, chunk: TokensStreamed) -> TokenOutput | None:
        """Return the output that a chunk belongs to; None for one that was not requested."""
        is_known = 0 <= chunk.index < len(self._outputs)
        return self._outputs[chunk.index] if is_known else None

    def has_all(self, final: GenerationDone) -> bool:
        """Whether everything that the final reply counts has arrived.

        Of several outputs the end of each is needed too, unless they were cancelled.
        """
        if self.tokens < final.output_tokens:
            return False
        return len(self._outputs) == 1 or final.finish_reason == "cancelled" or self.has_ended


class Gap(Struct, frozen=True, tag=True):
    """The event stream continues with number `found` where `expected` was due.

    `found > expected`: the controller does not keep the events between them any more.
    `found < expected`: the log was replaced or lost its end, and its numbers start again.
    """

    expected: int
    found: int


class Snapshot(Struct, frozen=True, tag=True):
    """All adapters as of event `seq`, in place of the events from number `expected` to `seq`.

    The stream continues with the next event. An adapter may already be as a later event leaves it:
    applying that event again leads to the same state.
    """

    expected: int
    seq: int
    adapters: tuple[AdapterView, ...]


EventItem = Published | Gap | Snapshot
"""An item of an event stream: an event, or what stands for events that are not kept."""

FetchReply = EventsFetched | EventsTooOld | AdaptersListed
"""The answer to a fetch of events; a snapshot is completed to a list."""


class EventCursor:
    """The position of one reader in the event stream.

    While `needs_fetch` is true, the reader fetches from `next_seq` and leaves the subscription's
    frames in their queue. They are read after the fetch, so that no frame has to be dropped and
    fetched again.
    """

    def __init__(self, next_seq: int, needs_fetch: bool, wants_snapshot: bool = False) -> None:
        self.next_seq = next_seq
        self.seq = next_seq - 1
        self.ready: deque[EventItem] = deque()
        self._wants_snapshot = wants_snapshot
        self._last_seq = next_seq if needs_fetch else next_seq - 1
        self._frame_seq = 0

    @property
    def needs_fetch(self) -> bool:
        """Whether events are known to be published that have not arrived."""
        return self._last_seq >= self.next_seq

    def pop(self) -> EventItem:
        """Return the next item of `ready` and set `seq` to its number."""
        item = self.ready.popleft()
        self.seq = item.found - 1 if isinstance(item, Gap) else item.seq
        return item

    def fetch_request(self) -> FetchEvents:
        """Return the request for the missing events, which the session has not numbered yet."""
        return FetchEvents("", self.next_seq, EVENTS_PER_FETCH, self._wants_snapshot)

    def expect_more(self) -> None:
        """Suppose that events were published, because the subscription has been silent."""
        self._last_seq = max(self._last_seq, self.next_seq)

    def on_frame(self, data: bytes) -> None:
        """Process a frame of the subscription; a malformed one is ignored like a lost one."""
        try:
            frame = EVENTS.decode(data)
        except WireError:
            return
        if frame.seq < self._frame_seq:
            self._restart_numbers()
        self._frame_seq = frame.seq
        self._last_seq = max(self._last_seq, frame.seq)
        self._append(frame.message)

    def on_fetched(self, reply: FetchReply) -> None:
        """Process the reply to `fetch_request`; `next_seq` or `needs_fetch` is then another one."""
        last_seq = reply.events_seq if isinstance(reply, AdaptersListed) else reply.last_seq
        if last_seq < self.next_seq - 1:
            self._restart_numbers()
            return
        self._last_seq = last_seq
        due = self.next_seq
        if isinstance(reply, AdaptersListed):
            self._append_snapshot(reply)
        elif isinstance(reply, EventsTooOld):
            self._skip_to(min(reply.oldest_seq, last_seq + 1))
        else:
            self._skip_to(max(due, reply.events[0].seq) if reply.events else last_seq + 1)
            self._append(reply.events)
        if self.next_seq == due and self.needs_fetch:
            self._skip_to(last_seq + 1)

    def _append_snapshot(self, listed: AdaptersListed) -> None:
        if listed.events_seq >= self.next_seq:
            self.ready.append(Snapshot(self.next_seq, listed.events_seq, listed.adapters))
            self.next_seq = listed.events_seq + 1

    def _append(self, batch: tuple[Published, ...]) -> None:
        for published in batch:
            if published.seq == self.next_seq:
                if not isinstance(published.event, EventWithheld):
                    self.ready.append(published)
                self.next_seq += 1

    def _skip_to(self, seq: int) -> None:
        if seq > self.next_seq:
            self.ready.append(Gap(self.next_seq, seq))
            self.next_seq = seq

    def _restart_numbers(self) -> None:
        self.ready.append(Gap(self.next_seq, 1))
        self.next_seq = 1
        self._last_seq = 1
        self._frame_seq = 0
