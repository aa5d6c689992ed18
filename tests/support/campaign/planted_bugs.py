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
    "changed_entry_not_hashed": 12,
    "checksum_not_compared": 42,
    "contradictory_inventory_accepted": 71,
    "engine_loss_ignored": 58,
    "engine_never_restarted": 184,
    "failed_input_not_undone": 87,
    "failed_sync_ignored": 18,
    "frames_to_earlier_starts_executed": 189,
    "full_disk_ignored": 110,
    "hold_ignored": 48,
    "lost_adapters_kept": 19,
    "names_not_synced": 28,
    "new_epoch_not_adopted": 1,
    "recorded_time_jumps": 19,
    "refused_group_kept_in_file": 100,
    "report_acknowledged_before_log": 148,
    "removed_before_its_requests": 595,
    "skips_not_replayed": 121,
    "timer_not_set": 31,
    "torn_tail_kept": 1074,
    "waiting_inference_refused_for_removal": 146,
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
