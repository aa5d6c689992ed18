"""Who waits for room: one line a tier, the oldest claim first.

What it is: three sorted lists and an index over them. What it is not: a decision who may wait or
whom to let in (`drive`). One rule: the order is a function of the claims alone, so that it can be
told from the adapters' records.
"""

from bisect import bisect_left, insort
from typing import Final, Literal

from messages.ids import AdapterId, Seq

TierName = Literal["host", "pinned", "device"]

TIERS: Final[tuple[TierName, ...]] = ("host", "pinned", "device")


class Queues:
    """Adapters that wait for room in a tier; an adapter waits in one line at most.

    `lines` are pairs of claim and adapter, `members` says where each one waits; both are for
    reading only.
    """

    __slots__ = ("lines", "members")

    def __init__(self) -> None:
        self.lines: Final[dict[TierName, list[tuple[Seq, AdapterId]]]] = {t: [] for t in TIERS}
        self.members: Final[dict[AdapterId, tuple[TierName, Seq]]] = {}

    def join(self, tier: TierName, adapter_id: AdapterId, claim: Seq) -> None:
        """Wait in a tier's line behind those with older claims."""
        insort(self.lines[tier], (claim, adapter_id))
        self.members[adapter_id] = (tier, claim)

    def leave(self, adapter_id: AdapterId) -> None:
        """Wait no longer."""
        tier, claim = self.members.pop(adapter_id)
        line = self.lines[tier]
        del line[bisect_left(line, (claim, adapter_id))]

    def renew(self, adapter_id: AdapterId, claim: Seq) -> None:
        """Take the place in line that another claim gives."""
        tier, current = self.members[adapter_id]
        if current != claim:
            self.leave(adapter_id)
            self.join(tier, adapter_id, claim)

    def clear(self) -> None:
        """Send everybody away."""
        for line in self.lines.values():
            line.clear()
        self.members.clear()
