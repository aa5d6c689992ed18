"""The link's numbers: gaps and epochs are detected, and lost frames lose no report."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loradock.engine.worker.controller_link import ControllerLink
from loradock.messages.commands import (
    Command,
    ControllerBeat,
    DropWeights,
    RequestInventory,
    ResendTokens,
)
from loradock.messages.reports import EngineBeat, EngineInventory, WeightsDropped
from loradock.messages.requests import TokensStreamed
from loradock.messages.wire import REPORTS, DecodedFrame

DROP = DropWeights(op=1, adapter_id=1)
BEAT, INVENTORY_REQUEST, RESEND = ControllerBeat(0), RequestInventory(0), ResendTokens("r")


def attached(epoch: int = 3, seq: int = 5) -> ControllerLink:
    """Return a link that has received `seq` commands of an epoch and lacks nothing."""
    link = ControllerLink()
    for number in range(1, seq + 1):
        assert link.accept(DecodedFrame(epoch, number, DROP))
    link.mark_synchronised()
    return link


@pytest.mark.parametrize(
    ("epoch", "seq", "message", "accepted", "needs_sync"),
    [
        (3, 6, DROP, True, False),
        (3, 6, RESEND, True, False),
        (3, 5, BEAT, True, False),
        (3, 7, DROP, True, True),
        (3, 7, RESEND, True, True),
        (3, 6, BEAT, True, True),
        (3, 6, INVENTORY_REQUEST, True, True),
        (3, 9, INVENTORY_REQUEST, True, True),
        # A command that is repeated or late is no gap.
        (3, 5, DROP, False, False),
        (3, 4, RESEND, False, False),
        (3, 4, INVENTORY_REQUEST, False, False),
        (3, 4, BEAT, True, False),
        # Another epoch counts from 1 again.
        (4, 1, DROP, True, False),
        (4, 0, BEAT, True, False),
        (4, 2, DROP, True, True),
        (4, 6, DROP, True, True),
        (4, 1, BEAT, True, True),
        # Commands of an earlier epoch are ignored.
        (2, 6, DROP, False, False),
        (2, 9, INVENTORY_REQUEST, False, False),
        (0, 9, BEAT, False, False),
    ],
)
def test_a_frame_is_accepted_and_may_need_a_sync(
    epoch: int, seq: int, message: Command, accepted: bool, needs_sync: bool
) -> None:
    link = attached()
    assert link.accept(DecodedFrame(epoch, seq, message)) is accepted
    assert link.needs_sync is needs_sync
    assert link.epoch == max(epoch, 3)


@given(st.permutations(range(1, 9)), st.lists(st.integers(0, 8), max_size=4), st.integers(1, 8))
def test_commands_are_executed_in_the_order_in_which_they_were_sent(
    order: list[int], lost: list[int], repeated: int
) -> None:
    link = attached(seq=0)
    arriving = [number for number in order if number not in lost]
    frames = [DecodedFrame(3, number, DROP) for number in (*arriving, repeated)]
    executed = [frame.seq for frame in frames if link.accept(frame)]
    assert executed == sorted(set(executed))
    assert link.needs_sync is (executed != list(range(1, len(executed) + 1)))


def test_a_gap_is_reported_once() -> None:
    link = attached()
    link.accept(DecodedFrame(3, 8, BEAT))
    link.mark_synchronised()
    link.accept(DecodedFrame(3, 8, BEAT))
    link.accept(DecodedFrame(3, 9, DROP))
    assert not link.needs_sync


def test_an_earlier_epoch_can_not_acknowledge() -> None:
    link = attached()
    link.encode(WeightsDropped(1))
    assert not link.accept(DecodedFrame(2, 6, ControllerBeat(1)))
    assert len(link.unacknowledged_frames()) == 1


def test_reports_of_operations_are_counted_and_the_others_carry_the_last_number() -> None:
    link = attached(epoch=3)
    inventory = EngineInventory("e", 1, "m", 1, 1)
    tokens, beat = TokensStreamed("r", 0, (1,)), EngineBeat("e", 0)
    numbers = []
    for report in (inventory, WeightsDropped(1), tokens, WeightsDropped(2), beat, inventory):
        frame = REPORTS.decode(link.encode(report))
        assert frame.message == report
        assert frame.epoch == 3
        numbers.append(frame.seq)
    assert numbers == [0, 1, 1, 2, 2, 2]


@pytest.mark.parametrize("kind", [ControllerBeat, RequestInventory])
def test_an_acknowledgement_of_a_report_never_sent_is_ignored(kind: type) -> None:
    link = attached()
    link.encode(WeightsDropped(1))
    link.accept(DecodedFrame(3, 6, kind(2)))
    assert len(link.unacknowledged_frames()) == 1
    link.accept(DecodedFrame(3, 7, kind(1)))
    assert link.unacknowledged_frames() == []
    link.accept(DecodedFrame(3, 8, kind(0)))
    assert link.unacknowledged_frames() == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["report", "beat", "restart"]), st.booleans()), max_size=40
)


@given(steps=STEPS)
def test_every_report_arrives_once_and_in_order_despite_lost_frames(
    steps: list[tuple[str, bool]],
) -> None:
    """A controller that logs reports in order, and requests the inventory after a gap."""
    link, logged, epoch, reported = ControllerLink(), [], 1, 0

    def deliver(frames: list[bytes]) -> None:
        for frame in map(REPORTS.decode, frames):
            if isinstance(frame.message, WeightsDropped) and frame.seq == len(logged) + 1:
                logged.append(frame.message.op)

    for kind, arrives in steps:
        if kind == "report":
            reported += 1
            frame = link.encode(WeightsDropped(reported))
            deliver([frame] if arrives else [])
        elif kind == "restart":
            epoch += 1
            link.accept(DecodedFrame(epoch, 1, RequestInventory(len(logged))))
            deliver(link.unacknowledged_frames() if arrives else [])
        elif arrives:
            link.accept(DecodedFrame(epoch, 0, ControllerBeat(len(logged))))
    link.accept(DecodedFrame(epoch + 1, 1, RequestInventory(len(logged))))
    deliver(link.unacknowledged_frames())
    assert logged == list(range(1, reported + 1))
