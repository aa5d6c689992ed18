"""What prefetches were good for: each is useful, useless or harmful."""

from typing import Final, get_args

from msgspec import Struct, field

from loradock.controller.core.world import Adapter, World
from loradock.controller.states.table import RESIDENCY_LEVEL
from loradock.lab.traffic import adapters_of
from loradock.messages.ids import AdapterId
from loradock.messages.records import InferenceRequested, Input
from loradock.messages.requests import ActivateAdapter, ActivateBatch, HoldAdapter, PrefetchAdapter

_USES: Final = (*get_args(InferenceRequested), ActivateAdapter, ActivateBatch, HoldAdapter)


class _Prefetch(Struct):
    """A prefetch that is not judged: from where it moved and how far, and who left for it."""

    level: int
    reached: int
    evictions_caused: int
    evicted: set[AdapterId] = field(default_factory=set)


class PrefetchMeter:
    """Watches the world of a run: call `before` and `after` around each input.

    Useful: the adapter has moved, or is moving, when it is used. Useless: it was evicted before
    that, or never used. Harmful: an adapter that was evicted for it was used sooner. A prefetch
    that had nothing to move, or no room, is none of these.
    """

    def __init__(self, world: World) -> None:
        self._world: Final = world
        self._open: dict[AdapterId, _Prefetch] = {}
        self._demoting: set[AdapterId] = set()
        self._caused = 0
        self.useful = self.useless = self.harmful = 0

    def before(self, message: Input) -> None:
        """Judge by the adapters that an input uses, before it is handled."""
        if isinstance(message, _USES):
            for name in adapters_of(message):
                self._judge(self._world.names.get(name, 0))
        adapter = self._prefetched_by(message)
        self._caused = adapter.counters.evictions_caused if adapter else 0
        is_watching = bool(self._open) or isinstance(message, PrefetchAdapter)
        self._demoting = {*self._world.demoting} if is_watching else set()

    def after(self, message: Input) -> None:
        """Take what an input has changed."""
        adapter = self._prefetched_by(message)
        if adapter is not None and adapter.prefetched and adapter.id not in self._open:
            level = RESIDENCY_LEVEL[adapter.state]
            self._open[adapter.id] = _Prefetch(level, level, self._caused)
        for adapter_id, found in [*self._open.items()]:
            self._follow(adapter_id, found)

    def end(self) -> None:
        """Judge the prefetches of adapters that were not used any more."""
        self.useless += sum(found.reached > found.level for found in self._open.values())
        self._open.clear()

    def _prefetched_by(self, message: Input) -> Adapter | None:
        if not isinstance(message, PrefetchAdapter):
            return None
        return self._world.adapters.get(self._world.names.get(message.adapter, 0))

    def _judge(self, used: AdapterId) -> None:
        harmful = [one for one, found in self._open.items() if used in found.evicted]
        self.harmful += len(harmful)
        for adapter_id in harmful:
            del self._open[adapter_id]
        found = self._open.pop(used, None)
        if found is not None:
            is_moving = bool(self._world.adapters[used].op)
            self.useful += is_moving or found.reached > found.level

    def _follow(self, adapter_id: AdapterId, found: _Prefetch) -> None:
        adapter = self._world.adapters.get(adapter_id)
        level = -1 if adapter is None else RESIDENCY_LEVEL[adapter.state]
        if adapter is None or level < found.reached:
            self.useless += 1
            del self._open[adapter_id]
            return
        found.reached = level
        caused = adapter.counters.evictions_caused
        if caused > found.evictions_caused:
            found.evictions_caused = caused
            found.evicted |= self._world.demoting.keys() - self._demoting
