"""Defects that are planted one at a time, to show that the campaign finds each of them.

`planted(name)` is a context in which the program has the defect; `find_bug` runs schedules in it.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final, NamedTuple
from unittest import mock

from tests.support.campaign import bugs_of_core, bugs_of_log, bugs_of_shell
from tests.support.campaign.bug_registry import BUGS
from tests.support.campaign.campaign import ScheduleFailed, run_schedule

__all__ = (
    "BUGS",
    "KNOWN_SEEDS",
    "Found",
    "bugs_of_core",
    "bugs_of_log",
    "bugs_of_shell",
    "find_bug",
    "planted",
)


KNOWN_SEEDS: Final = {
    "acknowledge_before_sync": 19,
    "changed_entry_not_hashed": 10,
    "checksum_not_compared": 79,
    "contradictory_inventory_accepted": 234,
    "engine_loss_ignored": 19,
    "engine_never_restarted": 181,
    "failed_input_not_undone": 54,
    "failed_sync_ignored": 32,
    "frames_to_earlier_starts_executed": 189,
    "full_disk_ignored": 110,
    "hold_ignored": 66,
    "lost_adapters_kept": 19,
    "names_not_synced": 43,
    "new_epoch_not_adopted": 1,
    "operation_executed_twice": 174,
    "overtaken_inventory_accepted": 345,
    "recorded_time_jumps": 63,
    "refused_group_kept_in_file": 132,
    "report_acknowledged_before_log": 148,
    "removed_before_its_requests": 693,
    "skips_not_replayed": 121,
    "timer_not_set": 181,
    "torn_tail_kept": 279,
    "waiting_inference_refused_for_removal": 693,
}
"""Schedules that found the bugs which few schedules find. They are tried first, and another
version of the program may need others: `make sim-bugs` searches."""


class Found(NamedTuple):
    """The check that found a bug, in a schedule, after a number of them."""

    check: str
    seed: int
    schedules: int


@contextmanager
def planted(name: str) -> Iterator[None]:
    """Plant a bug while the context lasts."""
    owner, attribute, replacement = BUGS[name]()
    with mock.patch.object(owner, attribute, replacement, create=True):
        yield


def find_bug(name: str, seeds: Iterable[int]) -> Found | None:
    """Run the schedules with a planted bug until one fails; None if none does."""
    with planted(name):
        for number, seed in enumerate(seeds, 1):
            try:
                run_schedule(seed)
            except ScheduleFailed as error:
                return Found(error.check, seed, number)
    return None
