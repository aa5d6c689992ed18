"""The operations that were executed already, in bounded memory."""

from typing import Final

from loradock.messages.ids import OpId

SEEN_MAX: Final = 4096
"""The number of operations that are remembered one by one; every older one counts as seen."""


class SeenOperations:
    """The operations that were executed already, in bounded memory.

    Ids increase, but a lost frame may be sent again after later ones were executed, so the newest
    ids are remembered one by one. `last`: the highest id.
    """

    def __init__(self) -> None:
        self._recent: dict[OpId, None] = {}
        self._forgotten_up_to: OpId = 0
        self.last: OpId = 0

    def add(self, op: OpId) -> bool:
        """Remember `op`; return whether it is new."""
        if op <= self._forgotten_up_to or op in self._recent:
            return False
        self._recent[op] = None
        self.last = max(self.last, op)
        if len(self._recent) > SEEN_MAX:
            oldest = next(iter(self._recent))
            del self._recent[oldest]
            self._forgotten_up_to = max(self._forgotten_up_to, oldest)
        return True
