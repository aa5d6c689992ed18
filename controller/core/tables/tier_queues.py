"""Queues of the adapters that wait for room: one per memory tier, in order of priority.

The order is a function of the priorities alone, so it can be derived from the adapters' records.
"""

from bisect import bisect_left, insort
from typing import Final, Literal

from loradock.messages.ids import AdapterId, Seq

TierName = Literal["host", "pinned", "device"]

TIERS: Final[tuple[TierName, ...]] = ("host", "pinned", "device")


class TierQueues:
    """Adapters that wait for room in a tier; an adapter is in one queue at most.

    `by_tier` holds (priority, adapter) pairs in order, `members` each adapter's queue and priority.
    Both are for reading only.
    """

    __slots__ = ("by_tier", "members")

    def __init__(self) -> None:
        self.by_tier: Final[dict[TierName, list[tuple[Seq, AdapterId]]]] = {t: [] for t in TIERS}
        self.members: Final[dict[AdapterId, tuple[TierName, Seq]]] = {}

    def join(self, tier: TierName, adapter_id: AdapterId, priority: Seq) -> None:
        """Insert an adapter into a tier's queue, after those with a lower priority number."""
        insort(self.by_tier[tier], (priority, adapter_id))
        self.members[adapter_id] = (tier, priority)

    def leave(self, adapter_id: AdapterId) -> None:
        """Remove an adapter from its queue."""
        tier, priority = self.members.pop(adapter_id)
        queue = self.by_tier[tier]
        del queue[bisect_left(queue, (priority, adapter_id))]

    def reprioritize(self, adapter_id: AdapterId, priority: Seq) -> None:
        """Move an adapter to the position that its new priority has in the same queue."""
        tier, current = self.members[adapter_id]
        if current != priority:
            self.leave(adapter_id)
            self.join(tier, adapter_id, priority)

    def clear(self) -> None:
        """Remove all adapters from all queues."""
        for queue in self.by_tier.values():
            queue.clear()
        self.members.clear()
