"""Copies that end at different times on different ranks end alike on all of them."""

import pytest
import torch

from loradock.engine.errors import Conflict, EngineError
from loradock.engine.residency.copier import CollectiveCopier
from loradock.messages.errors import ErrorCode
from tests.support.parallel.threads import RANKS, SharedGroup, on_all_ranks


class ManualCopy:
    """A copy that is done, or fails, as the test sets it."""

    def __init__(self, done: bool, error: Exception | None) -> None:
        self.done, self.error = done, error

    def is_done(self) -> bool:
        return self.done

    def wait(self) -> None:
        if self.error:
            raise self.error

    def start(self, target: torch.Tensor, source: torch.Tensor) -> "ManualCopy":
        return self


def test_a_copy_ends_once_it_has_ended_on_all_ranks() -> None:
    def run_rank(group: SharedGroup) -> list[bool]:
        manual = ManualCopy(group.rank > 0, None)
        copy = CollectiveCopier(manual, group).start(torch.empty(0), torch.empty(0))
        early = copy.is_done()
        manual.done = True
        return [early, copy.is_done()]

    assert on_all_ranks(run_rank) == [[False, True]] * RANKS


def test_a_copy_that_fails_on_one_rank_fails_on_all() -> None:
    def run_rank(group: SharedGroup) -> tuple[ErrorCode, str]:
        manual = ManualCopy(True, Conflict("gone") if group.rank == 1 else None)
        copy = CollectiveCopier(manual, group).start(torch.empty(0), torch.empty(0))
        with pytest.raises(EngineError) as failed:
            copy.wait()
        return failed.value.code, failed.value.message

    assert on_all_ranks(run_rank) == [(Conflict.code, "gone")] * RANKS
