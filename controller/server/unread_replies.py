"""Replies that wait to be sent, and the bytes of long ones that clients have not read yet.

ZeroMQ bounds a client's unread replies in frames, whose sizes differ by a factor of a million. A
long reply is therefore sent with a tracker, which is done once the reply has left this process.
"""

from collections import deque
from itertools import islice
from typing import Final, Protocol

LONG_REPLY_BYTES: Final = 4096
"""Replies of this size and more are counted; the bound in frames suffices for shorter ones."""

UNREAD_BYTES_PER_CLIENT_MAX: Final = 32 << 20
"""Bound on one client's long replies; only a single reply may be longer."""

UNREAD_BYTES_MAX: Final = 512 << 20
"""Bound on the long replies of all clients; beyond it each client may have one."""

_FORGOTTEN_PER_REPLY: Final = 2
"""The clients whose read replies are forgotten with each reply: more than one reply adds."""

UNSENT_BYTES_PER_CLIENT_MAX: Final = 4 << 20
"""Bound on the replies to one client that wait until it has read others, in bytes."""


class UnsentReplies:
    """Replies to one client that were not sent yet, in order."""

    __slots__ = ("frames", "size_bytes")

    def __init__(self) -> None:
        self.frames: deque[bytes] = deque()
        self.size_bytes = 0

    def add(self, frame: bytes) -> None:
        """Add a reply."""
        self.frames.append(frame)
        self.size_bytes += len(frame)

    def remove_first(self) -> None:
        """Remove the first reply, which was sent."""
        self.size_bytes -= len(self.frames.popleft())

    def drop_beyond_bound(self) -> None:
        """Drop the last replies, so that the others are within the bound."""
        while self.size_bytes > UNSENT_BYTES_PER_CLIENT_MAX:
            self.size_bytes -= len(self.frames.pop())


class Tracker(Protocol):
    """Reports whether a reply has left this process."""

    @property
    def done(self) -> bool:
        """Whether ZeroMQ has released the reply."""


class UnreadReplies:
    """Long replies that were sent and have not left this process."""

    def __init__(self) -> None:
        self._sent: dict[bytes, deque[tuple[Tracker, int]]] = {}
        self._bytes: dict[bytes, int] = {}
        self.size_bytes = 0

    def __len__(self) -> int:
        """Return the number of clients with replies that are not known to be read."""
        return len(self._sent)

    def allows(self, client: bytes, size_bytes: int) -> bool:
        """Whether a reply of this size may be sent to a client now."""
        self._forget_read(client)
        unread = self._bytes.get(client, 0)
        if unread and self.size_bytes + size_bytes > UNREAD_BYTES_MAX:
            for other in tuple(self._sent):
                self._forget_read(other)
        return not unread or (
            unread + size_bytes <= UNREAD_BYTES_PER_CLIENT_MAX
            and self.size_bytes + size_bytes <= UNREAD_BYTES_MAX
        )

    def add(self, client: bytes, tracker: Tracker, size_bytes: int) -> None:
        """Count a reply that was sent.

        A client that has disconnected sends nothing more, so all clients are examined in turn.
        """
        self._sent.setdefault(client, deque()).append((tracker, size_bytes))
        self._bytes[client] = self._bytes.get(client, 0) + size_bytes
        self.size_bytes += size_bytes
        for other in tuple(islice(self._sent, _FORGOTTEN_PER_REPLY)):
            self._sent[other] = self._sent.pop(other)
            self._forget_read(other)

    def _forget_read(self, client: bytes) -> None:
        sent = self._sent.get(client)
        # A client reads its replies in order.
        while sent and sent[0][0].done:
            _, size_bytes = sent.popleft()
            self._bytes[client] -= size_bytes
            self.size_bytes -= size_bytes
        if sent is not None and not sent:
            del self._sent[client], self._bytes[client]
