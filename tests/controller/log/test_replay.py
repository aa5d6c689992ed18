"""A replay stops at a given record or at the first divergence, and applies changed limits."""

from pathlib import Path

import msgspec
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from loradock.controller.core.actions import Action, PublishEvent
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.invariants import check
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.format import LogForeign
from loradock.controller.log.replay import replay
from loradock.controller.log.writer import Log
from loradock.messages.base import Message
from loradock.messages.events import AdapterReleased
from loradock.messages.records import FORMAT, ControllerStarted, Header, Record
from tests.support.simulation.logged_histories import HISTORY, LIMITS
from tests.support.simulation.workload import random_history


def header(limits: Limits = LIMITS, rules: int = RULES) -> Header:
    return Header(FORMAT, rules, "lru", limits_to(limits), 0)


def written(directory: Path, *, wrong_at: int = 0) -> list[str]:
    """Write the history with a digest in each record; returns the digests."""
    controller, digests = Controller(LIMITS, checked=True), []
    with Log(directory, header()) as log:
        for seq, message in enumerate(HISTORY, start=1):
            digests.append(controller.digest())
            digest = "0" * 32 if seq == wrong_at else digests[-1]
            log.append([Record(seq, message, digest)], 1)
            controller.handle(message, seq)
    return [*digests, controller.digest()]


def test_the_whole_log_leads_to_the_last_digest(tmp_path: Path) -> None:
    digests = written(tmp_path / "log")
    result = replay(tmp_path / "log", checked=True)
    assert (result.digest, result.inputs) == (digests[-1], len(HISTORY))
    assert result.digests_compared == len(HISTORY)
    assert result.divergence is None


@pytest.mark.parametrize("until", range(1, len(HISTORY) + 1))
def test_until_stops_after_that_record(tmp_path: Path, until: int) -> None:
    digests = written(tmp_path / "log")
    result = replay(tmp_path / "log", until)
    assert (result.digest, result.position.link.seq) == (digests[until], until)


@pytest.mark.parametrize("wrong_at", [1, 4, len(HISTORY)])
def test_the_first_divergence_stops_the_replay(tmp_path: Path, wrong_at: int) -> None:
    digests = written(tmp_path / "log", wrong_at=wrong_at)
    result = replay(tmp_path / "log")
    assert result.divergence == (wrong_at, "0" * 32, digests[wrong_at - 1])
    assert result.inputs == wrong_at - 1


def test_a_replay_has_the_same_actions_each_time(tmp_path: Path) -> None:
    written(tmp_path / "log")
    actions: list[Action] = []
    replay(tmp_path / "log", sink=actions.extend)
    events = [action.message.event for action in actions if isinstance(action, PublishEvent)]
    assert AdapterReleased("upper") in events
    again: list[Action] = []
    replay(tmp_path / "log", sink=again.extend)
    assert actions == again


def test_other_limits_count_the_engine_as_lost(tmp_path: Path) -> None:
    written(tmp_path / "log")
    with Log(tmp_path / "log", header(Limits(max_loras=1, max_cpu_loras=4))) as log:
        log.append([Record(99, ControllerStarted(2))], 2)
    result = replay(tmp_path / "log", checked=True)
    assert result.controller is not None
    assert result.controller.limits.max_loras == 1
    assert result.controller.world.engine is None
    assert [a.state for a in result.controller.world.adapters.values()] == ["evicted"]


@pytest.mark.parametrize("rules", [RULES - 1, RULES + 1])
def test_other_rules_are_refused(tmp_path: Path, rules: int) -> None:
    with Log(tmp_path / "log", header(rules=rules)) as log:
        log.append([Record(1, ControllerStarted(1))], 1)
    for read in (replay, lambda directory: Log(directory, header())):
        with pytest.raises(LogForeign, match=f"rules {rules}; .* rules {RULES}; .*log export"):
            read(tmp_path / "log")


def test_a_record_of_another_version_ends_the_replay_after_those_before_it(tmp_path: Path) -> None:
    class Unknown(Message, frozen=True):
        pass

    records = [Record(seq, message) for seq, message in enumerate([*HISTORY, Unknown()], start=1)]
    with Log(tmp_path / "log", header()) as log:
        log.append(records, 1)
    handled: list[list[Action]] = []
    with pytest.raises(LogForeign, match=f"record {len(records)} is intact"):
        replay(tmp_path / "log", sink=handled.append)
    assert len(handled) == len(HISTORY)
    assert replay(tmp_path / "log", len(HISTORY)).inputs == len(HISTORY)


def test_a_log_with_an_unknown_policy_is_refused(tmp_path: Path) -> None:
    with Log(tmp_path / "log", msgspec.structs.replace(header(), policy="mru")) as log:
        log.append([Record(1, HISTORY[0])], 1)
    with pytest.raises(LogForeign, match="'mru'"):
        replay(tmp_path / "log")


@settings(max_examples=4)
@given(seed=st.integers(0, 1_000_000), policy=st.sampled_from(sorted(POLICIES)))
@example(seed=0, policy="none")
@example(seed=7, policy="none")
def test_every_history_can_be_handled_under_another_policy(seed: int, policy: str) -> None:
    """Reports no longer fit then; they are refused, and every invariant but the bounds holds.

    An inventory of adapters that would not have been loaded may exceed the bounds.
    """
    deployment = random_history(seed, 150).deployment
    controller = Controller(deployment.limits, policy)
    for data in deployment.inputs:
        record = msgspec.msgpack.decode(data, type=Record)
        controller.handle(record.input, record.time_ns)
        check(controller.world, deployment.limits, None)
