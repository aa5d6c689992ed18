"""An operation that was executed is not executed again, however long ago it was."""

from random import Random

import pytest
import torch

from loradock.engine.worker import seen_operations
from loradock.engine.worker.seen_operations import SeenOperations


def test_seen_operations_are_bounded_and_never_forgotten_as_new(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(seen_operations, "SEEN_MAX", 8)
    random = Random(seed := torch.seed() % 2**32)
    print(f"seed {seed}")
    seen = SeenOperations()
    executed: set[int] = set()
    for step in range(400):
        op = max(1, step // 2 + random.randint(-20, 4))
        if seen.add(op):
            assert op not in executed
            executed.add(op)
        assert seen.last == max(executed)
        assert not seen.add(op)
    assert len(seen._recent) <= 8
