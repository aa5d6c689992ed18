"""A model of the manager's calls in a few lists: the oracle of its tests.

It has no operations, queues or budgets, so it shares no logic with the core.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from loradock.messages.errors import ErrorCode
from tests.support.engine.manager_examples import Content


class Refused(Exception):  # noqa: N818 - an expected outcome
    """The call should be refused with one of these codes."""

    def __init__(self, *codes: ErrorCode) -> None:
        super().__init__(*codes)
        self.codes = codes


@dataclass
class ManagerOracle:
    """The adapters on the host and in slots; `evicts`: whether the manager has a policy.

    `recency`: every adapter on the host, the one that was used last at the end; a move is no use.
    """

    slots: int
    capacity: int
    evicts: bool
    contents: dict[int, Content] = field(default_factory=dict)
    recency: list[int] = field(default_factory=list)
    active: set[int] = field(default_factory=set)
    pinned: set[int] = field(default_factory=set)
    evictions: int = 0

    def touch(self, adapter_id: int) -> None:
        if adapter_id in self.recency:
            self.recency.remove(adapter_id)
        self.recency.append(adapter_id)

    def add(self, adapter_id: int, content: Content) -> bool:
        if adapter_id in self.contents:
            self.touch(adapter_id)
            return False
        self._make_host_space()
        self.contents[adapter_id] = content
        self.touch(adapter_id)
        return True

    def activate(self, adapter_id: int) -> bool:
        if adapter_id not in self.contents:
            raise Refused(ErrorCode.UNKNOWN_ADAPTER)
        self.touch(adapter_id)
        if adapter_id in self.active:
            return False
        self._make_slot()
        self.active.add(adapter_id)
        return True

    def pin(self, adapter_id: int) -> bool:
        self.activate(adapter_id)
        self.pinned.add(adapter_id)
        return True

    def unpin(self, adapter_id: int) -> bool:
        was_pinned = adapter_id in self.pinned
        self.pinned.discard(adapter_id)
        return was_pinned

    def deactivate(self, adapter_id: int) -> bool:
        if adapter_id not in self.active:
            return False
        self.pinned.discard(adapter_id)
        self.active.remove(adapter_id)
        return True

    def remove(self, adapter_id: int) -> bool:
        if adapter_id not in self.contents:
            return False
        self.contents.pop(adapter_id)
        self.recency.remove(adapter_id)
        self.active.discard(adapter_id)
        self.pinned.discard(adapter_id)
        return True

    def remove_oldest(self) -> bool:
        oldest = self._oldest(self.recency)
        if oldest is None and self.contents:
            raise Refused(ErrorCode.NO_ROOM)
        return oldest is not None and self.remove(oldest)

    def activate_batch(
        self, wanted: Sequence[int], contents: dict[int, Content], only: bool
    ) -> None:
        """Activate a batch that fits; `contents` were read for it, `only` removes all others."""
        for adapter_id in self.recency.copy() if only else ():
            if adapter_id not in wanted and adapter_id not in self.pinned:
                self.remove(adapter_id)
        for adapter_id in wanted:
            if adapter_id in self.contents:
                self.contents[adapter_id] = contents.get(adapter_id, self.contents[adapter_id])
                self.touch(adapter_id)
        for adapter_id in wanted:
            if adapter_id in self.contents:
                self.activate(adapter_id)
        for adapter_id in wanted:
            if adapter_id not in self.contents:
                self._add_and_activate(adapter_id, contents[adapter_id])
        for adapter_id in wanted:
            self.touch(adapter_id)

    def _add_and_activate(self, adapter_id: int, content: Content) -> None:
        self.add(adapter_id, content)
        try:
            self.activate(adapter_id)
        except Refused:
            self.remove(adapter_id)
            raise

    def _oldest(self, among: Sequence[int]) -> int | None:
        return next((adapter_id for adapter_id in among if adapter_id not in self.pinned), None)

    def _make_slot(self) -> None:
        if len(self.active) < self.slots:
            return
        oldest = self._oldest([a for a in self.recency if a in self.active])
        if oldest is None or not self.evicts:
            raise Refused(ErrorCode.NO_ROOM)
        self.active.remove(oldest)
        self.evictions += 1

    def _make_host_space(self) -> None:
        if len(self.contents) < self.capacity:
            return
        oldest = self._oldest(self.recency)
        if oldest is None or not self.evicts:
            raise Refused(ErrorCode.NO_ROOM)
        self.remove(oldest)
        self.evictions += 1
