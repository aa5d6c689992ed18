"""The link's numbers: gaps are seen, lives are told apart, and no report is lost by lost frames."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.worker.controller_link import Link
from messages.commands import Command, ControllerBeat, DropWeights, RequestInventory, ResendTokens
from messages.reports import EngineBeat, EngineInventory, TokensGenerated, WeightsDropped
from messages.wire import REPORTS, Frame

DROP = DropWeights(op=1, adapter_id=1)
BEAT, ASK, RESEND = ControllerBeat(0), RequestInventory(0), ResendTokens("r")


def attached(epoch: int = 3, seq: int = 5) -> Link:
    """A link that has heard `seq` commands of a controller's life and lacks nothing."""
    link = Link()
    for number in range(1, seq + 1):
        assert link.accept(Frame(epoch, number, DROP))
    link.synchronised()
    return link


def test_a_new_link_has_to_introduce_itself() -> None:
    assert Link().needs_sync


@pytest.mark.parametrize(
    ("epoch", "seq", "message", "accepted", "needs_sync"),
    [
        (3, 6, DROP, True, False),
        (3, 6, RESEND, True, False),
        (3, 5, BEAT, True, False),
        (3, 7, DROP, True, True),
        (3, 7, RESEND, True, True),
        (3, 6, BEAT, True, True),
        (3, 6, ASK, True, True),
        (3, 9, ASK, True, True),
        # What was seen before is done once by its `op`; it is no gap.
        (3, 5, DROP, True, False),
        (3, 4, BEAT, True, False),
        # Another life counts from 1 again.
        (4, 1, DROP, True, False),
        (4, 0, BEAT, True, False),
        (4, 2, DROP, True, True),
        (4, 6, DROP, True, True),
        (4, 1, BEAT, True, True),
        # A former life has nothing to say.
        (2, 6, DROP, False, False),
        (2, 9, ASK, False, False),
        (0, 9, BEAT, False, False),
    ],
)
def test_what_a_frame_tells(
    epoch: int, seq: int, message: Command, accepted: bool, needs_sync: bool
) -> None:
    link = attached()
    assert link.accept(Frame(epoch, seq, message)) is accepted
    assert link.needs_sync is needs_sync
    assert link.epoch == max(epoch, 3)


def test_a_gap_is_told_once() -> None:
    link = attached()
    link.accept(Frame(3, 8, BEAT))
    link.synchronised()
    link.accept(Frame(3, 8, BEAT))
    link.accept(Frame(3, 9, DROP))
    assert not link.needs_sync


def test_a_former_life_can_not_acknowledge() -> None:
    link = attached()
    link.encode(WeightsDropped(1))
    assert not link.accept(Frame(2, 6, ControllerBeat(1)))
    assert len(link.unacknowledged()) == 1


def test_reports_of_operations_are_counted_and_the_others_carry_the_last_number() -> None:
    link = attached(epoch=3)
    inventory = EngineInventory("e", 1, "m", 1, 1)
    tokens, beat = TokensGenerated("r", 0, (1,)), EngineBeat("e", 0)
    numbers = []
    for report in (inventory, WeightsDropped(1), tokens, WeightsDropped(2), beat, inventory):
        frame = REPORTS.decode(link.encode(report))
        assert frame.message == report
        assert frame.epoch == 3
        numbers.append(frame.seq)
    assert numbers == [0, 1, 1, 2, 2, 2]


def test_kept_reports_have_their_old_numbers_in_a_new_life() -> None:
    link = attached(epoch=3)
    for op in range(1, 5):
        link.encode(WeightsDropped(op))
    link.accept(Frame(4, 1, RequestInventory(2)))
    frames = [REPORTS.decode(frame) for frame in link.unacknowledged()]
    assert frames == [Frame(4, 3, WeightsDropped(3)), Frame(4, 4, WeightsDropped(4))]


@pytest.mark.parametrize("kind", [ControllerBeat, RequestInventory])
def test_an_acknowledgement_beyond_what_was_said_counts_for_nothing(kind: type) -> None:
    link = attached()
    link.encode(WeightsDropped(1))
    link.accept(Frame(3, 5, kind(2)))
    assert len(link.unacknowledged()) == 1
    link.accept(Frame(3, 5, kind(1)))
    assert link.unacknowledged() == []
    link.accept(Frame(3, 5, kind(0)))
    assert link.unacknowledged() == []


STEPS = st.lists(
    st.tuples(st.sampled_from(["report", "beat", "restart"]), st.booleans()), max_size=40
)


@given(steps=STEPS)
def test_whatever_is_lost_every_report_arrives_once_and_in_order(
    steps: list[tuple[str, bool]],
) -> None:
    """A controller that logs what it gets in order, and asks when it sees a gap."""
    link, logged, epoch, reported = Link(), [], 1, 0

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
            link.accept(Frame(epoch, 1, RequestInventory(len(logged))))
            deliver(link.unacknowledged() if arrives else [])
        elif arrives:
            link.accept(Frame(epoch, 0, ControllerBeat(len(logged))))
    link.accept(Frame(epoch + 1, 1, RequestInventory(len(logged))))
    deliver(link.unacknowledged())
    assert logged == list(range(1, reported + 1))
