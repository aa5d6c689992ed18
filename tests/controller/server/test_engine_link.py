"""The laws of the link under any failure of connections and processes; then single rules."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.server.engine_link import BEAT_INTERVAL_NS, LATE_FRAMES_NS, SYNC_RETRY_NS
from loradock.messages import commands, reports, requests
from loradock.messages.wire import REPORTS
from tests.support.simulation.link_bench import (
    DROP,
    EPOCH,
    LinkBench,
    beat,
    dropped,
    inventory,
    is_inventory_request,
    ops,
)
from tests.support.simulation.link_simulation import SECOND_NS, TIMEOUT_NS, Simulation

ACTIONS = (
    *(["run"] * 6 + ["add a task"] * 2 + ["engine"] * 5 + ["controller"] * 5),
    *("wait", "cut", "kill the controller", "start the controller", "kill the engine"),
)
LOGS = (*["ok"] * 5, "full", "crash before the log", "crash after the log")
FEW = st.integers(0, 6)
STEPS = st.tuples(*(st.sampled_from(ACTIONS), FEW, FEW, st.booleans(), st.sampled_from(LOGS)))
HISTORIES = st.lists(STEPS, min_size=25, max_size=50)


def run_without_failures(simulation: Simulation, rounds: int, tasks: int) -> None:
    """Make progress; without this, few histories would get past the synchronisation."""
    simulation.start_controller()
    for _ in range(tasks):
        simulation.add_task()
    for _ in range(rounds):
        simulation.run_engine(100, works=tasks > 0, beat=True)
        simulation.run_controller(100)
        simulation.now_ns += SECOND_NS // 10


def perform(simulation: Simulation, step: tuple[Any, ...]) -> None:
    action, one, other, that, log = step
    match action:
        case "run":
            run_without_failures(simulation, one, other)
        case "add a task":
            simulation.add_task()
        case "engine":
            simulation.run_engine(count=one, works=that, beat=other > 3)
        case "controller":
            simulation.run_controller(one, log)
        case "wait":
            simulation.now_ns += (1, 2, 3, 5, 11, 30, 110)[one] * SECOND_NS // 10
        case "cut":
            simulation.reconnect(one, other)
        case "kill the controller":
            simulation.kill_controller(one)
        case "start the controller":
            simulation.start_controller()
        case "kill the engine":
            simulation.kill_engine()


def no_command_is_executed_twice(simulation: Simulation) -> None:
    executed = [op for engine in simulation.engines for op in engine.executed]
    assert len(executed) == len(set(executed))


def no_report_is_skipped(simulation: Simulation) -> None:
    """The log has each engine's reports in order and without a gap, while it is attached."""
    for engine in simulation.engines:
        ops = [op for name, _, op in simulation.state.inputs if name == engine.engine_id]
        before = simulation.state.before.get(engine.engine_id, 0)
        last = 1 + engine.reported.index(ops[-1]) if ops else 0
        reported = enumerate(engine.reported[:last])
        assert ops == [op for place, op in reported if place >= before or op in ops]


def no_report_is_logged_twice(simulation: Simulation) -> None:
    """In however many epochs the controller starts again, and the engine is attached again."""
    inputs = [(engine, op) for engine, _, op in simulation.state.inputs]
    assert len(inputs) == len(set(inputs))


def no_report_is_dropped_before_it_is_logged(simulation: Simulation) -> None:
    engine = simulation.engine
    kept = {REPORTS.decode(frame).message.op for frame in engine.link.unacknowledged_frames()}
    logged = {op for _, _, op in simulation.state.inputs}
    before = engine.reported[: simulation.state.before.get(engine.engine_id, 0)]
    outbox = {report.op for report in engine.outbox}
    assert set(engine.reported) - outbox <= logged | kept | set(before)


def what_an_inventory_lacks_is_never_executed(simulation: Simulation) -> None:
    """An inventory covers every command that was sent before its request."""
    for engine in simulation.engines:
        lost = simulation.state.lost.get(engine.engine_id, ())
        assert not set(engine.executed) & set(lost)


def nothing_is_sent_between_a_request_and_its_inventory(simulation: Simulation) -> None:
    controller = simulation.controller
    assert controller is None or controller.overtaken == []


def every_task_is_in_one_place(simulation: Simulation) -> None:
    state = simulation.state
    tasks = [*state.open.values(), *state.unsent, *state.done]
    assert sorted(tasks) == list(range(1, state.tasks + 1))


LAWS = (
    no_command_is_executed_twice,
    no_report_is_skipped,
    no_report_is_logged_twice,
    no_report_is_dropped_before_it_is_logged,
    what_an_inventory_lacks_is_never_executed,
    nothing_is_sent_between_a_request_and_its_inventory,
    every_task_is_in_one_place,
)


@settings(max_examples=400)
@given(history=HISTORIES)
def test_the_laws_hold_under_failures_and_every_task_is_done_in_the_end(
    history: list[tuple[Any, ...]],
) -> None:
    simulation = Simulation()
    run_without_failures(simulation, rounds=4, tasks=2)
    for step in history:
        perform(simulation, step)
        for law in LAWS:
            law(simulation)
    simulation.settle()
    for law in LAWS:
        law(simulation)
    assert simulation.controller.link.is_open
    assert simulation.controller.link.engine_id == simulation.engine.engine_id
    assert sorted(simulation.state.done) == list(range(1, simulation.state.tasks + 1))
    assert simulation.engine.link.unacknowledged_frames() == []


def test_commands_are_numbered_and_beats_are_not() -> None:
    bench = LinkBench().opened()
    for _ in range(2):
        bench.link.send(DROP, bench.now_ns)
        bench.now_ns += BEAT_INTERVAL_NS
        bench.link.tick(bench.now_ns)
    sent = bench.take_sent()
    assert [(peer, frame.epoch, frame.seq) for peer, frame in sent] == [
        (b"a", EPOCH, seq) for seq in (2, 2, 3, 3)
    ]


def test_the_link_opens_only_when_the_requested_inventory_is_handled() -> None:
    bench = LinkBench()
    bench.receive(beat("e", 0))
    request = bench.inventory_request()
    bench.link.open()
    assert not bench.link.is_open
    assert bench.receive(inventory("e", 0, 0)) == []
    assert len(bench.receive(inventory("e", request, 0))) == 1
    bench.link.send(DROP, bench.now_ns)
    assert bench.take_sent() == []
    bench.link.open()
    bench.link.send(DROP, bench.now_ns)
    assert len(bench.take_sent()) == 1


def test_an_answer_to_an_earlier_epoch_is_ignored() -> None:
    bench = LinkBench("e")
    bench.receive(beat("e", 0), epoch=EPOCH - 1)
    request = bench.inventory_request()
    assert bench.receive(inventory("e", request, 0), epoch=EPOCH - 1) == []
    assert len(bench.receive(inventory("e", request, 0))) == 1


@pytest.mark.parametrize("report", [inventory("e", 0, 3), inventory("e", 1, 3), beat("e", 4)])
def test_a_gap_that_either_side_detects_closes_the_link(report: tuple[reports.Report, int]) -> None:
    bench = LinkBench().opened(3)
    assert bench.receive(report) == []
    assert not bench.link.is_open
    assert bench.receive(inventory("e", 1, 3)) == []
    assert len(bench.receive(inventory("e", bench.inventory_request(), 3))) == 1


def test_a_report_after_a_gap_waits_for_those_before_it() -> None:
    bench = LinkBench().opened(3)
    assert ops(bench.receive(dropped(4), dropped(6))) == [4]
    assert ops(bench.receive(dropped(7), dropped(5), dropped(6), dropped(7))) == []
    assert ops(bench.receive(inventory("e", bench.inventory_request(), 7))) == [5, 6, 7]
    assert ops(bench.receive(dropped(5), dropped(7), dropped(8))) == [8]


def test_another_inventory_after_the_answer_starts_a_new_round() -> None:
    bench = LinkBench()
    bench.receive(beat("e", 0))
    request = bench.inventory_request()
    assert len(bench.receive(inventory("e", request, 0), inventory("e", 0, 0))) == 1
    bench.link.open()
    assert not bench.link.is_open
    assert bench.inventory_request() > request


def test_only_what_is_in_the_log_is_acknowledged() -> None:
    bench = LinkBench().opened(3)
    numbered = (dropped(4), inventory("e", 0, 4))
    frames = [(b"a", REPORTS.encode(report, EPOCH, seq)) for report, seq in numbered]
    received = bench.link.receive(frames, bench.now_ns).inputs
    assert [(report.op - 100, seq) for report, seq in received] == [(4, 4)]
    [(_, frame)] = bench.take_sent()
    assert frame.message.acknowledged == 3
    bench.link.forget_unlogged(bench.now_ns)
    bench.now_ns += BEAT_INTERVAL_NS
    bench.link.tick(bench.now_ns)
    assert [frame.message.acknowledged for _, frame in bench.take_sent()] == [3]


@pytest.mark.parametrize("count", [0, 1])
def test_what_could_not_be_logged_is_requested_again_after_a_delay(count: int) -> None:
    bench = LinkBench("e")
    bench.receive(beat("e", 0))
    numbered = [dropped(seq) for seq in range(1, count + 1)]
    numbered.append(inventory("e", bench.inventory_request(), count))
    frames = [(b"a", REPORTS.encode(report, EPOCH, seq)) for report, seq in numbered]
    assert len(bench.link.receive(frames, bench.now_ns).inputs) == count + 1
    bench.link.forget_unlogged(bench.now_ns)
    bench.link.open()
    assert not bench.link.is_open
    bench.now_ns += SYNC_RETRY_NS
    bench.receive(beat("e", count))
    bench.link.tick(bench.now_ns)
    numbered[-1] = inventory("e", bench.inventory_request(), count)
    assert len(bench.receive(*numbered)) == count + 1


def test_no_request_is_repeated_to_a_silent_engine() -> None:
    bench = LinkBench()
    bench.receive(beat("e", 0))
    bench.inventory_request()
    bench.now_ns += 2 * SYNC_RETRY_NS
    bench.link.tick(bench.now_ns)
    assert not any(is_inventory_request(frame) for _, frame in bench.take_sent())
    bench.receive(beat("e", 0))
    bench.link.tick(bench.now_ns)
    assert bench.inventory_request()


def test_any_answer_of_a_round_is_valid() -> None:
    bench = LinkBench()
    bench.receive(beat("e", 0))
    first = bench.inventory_request()
    bench.now_ns += SYNC_RETRY_NS
    bench.receive(beat("e", 0))
    bench.link.tick(bench.now_ns)
    assert bench.inventory_request() > first
    assert len(bench.receive(inventory("e", first, 0))) == 1


def test_a_later_epoch_acknowledges_what_the_log_has() -> None:
    bench = LinkBench("e", reported=7)
    bench.receive(beat("e", 8))
    [(_, frame)] = bench.take_sent()
    assert frame.message == commands.RequestInventory(7)
    answer = inventory("e", frame.seq, 8)
    assert ops(bench.receive(dropped(6), dropped(7), dropped(8), answer)) == [8]


def test_a_second_engine_waits_for_the_first_ones_end() -> None:
    bench = LinkBench().opened(3)
    assert bench.receive(beat("f", 9), inventory("f", 1, 9), dropped(4), peer=b"b") == []
    assert bench.take_sent() == []
    bench.link.detach(bench.now_ns, ended=True)
    bench.receive(beat("f", 9), peer=b"b")
    [(_, frame)] = bench.take_sent()
    # The numbers of one engine mean nothing for another.
    assert frame.message == commands.RequestInventory(0)


def test_late_frames_of_an_ended_engine_do_not_attach_it() -> None:
    bench = LinkBench().opened()
    bench.link.detach(bench.now_ns, ended=True)
    bench.now_ns += LATE_FRAMES_NS - 1
    assert bench.receive(dropped(1), beat("e", 1), inventory("e", 0, 1)) == []
    assert bench.link.engine_id == ""
    assert bench.take_sent() == []


def test_an_engine_that_was_only_silent_is_attached_again() -> None:
    bench = LinkBench().opened()
    bench.now_ns += TIMEOUT_NS + 1
    assert bench.link.is_overdue(bench.now_ns)
    bench.link.detach(bench.now_ns, ended=False)
    assert not bench.link.is_overdue(bench.now_ns)
    assert bench.receive(dropped(1)) == []
    bench.receive(beat("e", 1))
    assert len(bench.receive(inventory("e", bench.inventory_request(), 1))) == 1
    assert bench.link.engine_id == "e"


def test_silence_during_a_step_is_no_loss_but_silence_before_it_is() -> None:
    bench = LinkBench().opened()
    received_ns = bench.now_ns
    bench.now_ns += 100 * TIMEOUT_NS
    assert bench.link.is_overdue(bench.now_ns)
    for silent_ns in (-TIMEOUT_NS, 0, TIMEOUT_NS):
        assert not bench.link.is_overdue(bench.now_ns, received_ns + silent_ns)
    assert bench.link.is_overdue(bench.now_ns, received_ns + TIMEOUT_NS + 1)


def test_a_pause_of_the_controller_is_no_silence_of_the_engine() -> None:
    bench = LinkBench().opened()
    bench.now_ns += 100 * TIMEOUT_NS
    bench.link.extend_deadline(99 * TIMEOUT_NS)
    assert not bench.link.is_overdue(bench.now_ns)
    assert bench.link.is_overdue(bench.now_ns + 1)


def test_a_new_connection_of_the_same_engine_continues_its_numbers() -> None:
    bench = LinkBench().opened(3)
    bench.link.send(DROP, bench.now_ns)
    bench.receive(dropped(4))
    bench.take_sent()
    assert bench.receive(dropped(5), peer=b"b") == []
    assert bench.receive(beat("e", 5), peer=b"b") == []
    [(peer, frame)] = bench.take_sent()
    assert (peer, frame.seq) == (b"b", 3)
    assert frame.message == commands.RequestInventory(4)


def test_frames_of_connections_that_were_replaced_do_not_bring_them_back() -> None:
    bench = LinkBench().opened(3)
    for peer in (b"b", b"c"):
        bench.receive(beat("e", 3), peer=peer)
        bench.take_sent()
    for peer in (b"a", b"b"):
        assert bench.receive(beat("e", 3), inventory("e", 0, 3), peer=peer) == []
    assert (bench.link.peer, bench.take_sent()) == (b"c", [])


@pytest.mark.parametrize(("seq", "epoch"), [(2, EPOCH), (3, EPOCH - 1)])
def test_late_frames_of_an_unknown_connection_do_not_attach_it(seq: int, epoch: int) -> None:
    bench = LinkBench().opened(3)
    assert bench.receive(inventory("e", 0, seq), beat("e", seq), peer=b"b", epoch=epoch) == []
    assert (bench.link.peer, bench.take_sent()) == (b"a", [])


def test_a_connection_that_lives_on_is_taken_again_once_nothing_can_be_late() -> None:
    """Frames with equal numbers were late, and have replaced it."""
    bench = LinkBench().opened(3)
    bench.receive(beat("e", 3), peer=b"b")
    bench.now_ns += LATE_FRAMES_NS - 1
    bench.receive(beat("e", 3))
    assert bench.link.peer == b"b"
    bench.now_ns += 1
    bench.receive(beat("e", 3))
    assert bench.link.peer == b"a"


def test_an_engine_is_known_once_its_inventory_is_logged_whatever_followed_it() -> None:
    bench = LinkBench()
    bench.receive(beat("e", 0))
    bench.receive(inventory("e", bench.inventory_request(), 0), inventory("e", 0, 0))
    request = bench.inventory_request()
    assert ops(bench.receive(dropped(1), inventory("e", request, 1))) == [1]


@pytest.mark.parametrize("engine_id", ["", "f"])
def test_an_expected_engine_has_the_timeout_to_connect(engine_id: str) -> None:
    bench = LinkBench("e")
    assert not bench.link.is_overdue(bench.now_ns + TIMEOUT_NS)
    bench.now_ns += TIMEOUT_NS + 1
    bench.receive(beat(engine_id, 0))
    assert bench.link.is_overdue(bench.now_ns)


def test_frames_without_a_valid_sender_are_ignored() -> None:
    bench = LinkBench().opened(3)
    assert bench.receive(dropped(4), peer=b"b") == []
    assert bench.receive(dropped(4), epoch=EPOCH + 1) == []
    assert bench.receive(inventory("e", 0, 3), epoch=EPOCH + 1, peer=b"b") == []
    assert bench.link.receive([(b"a", b"garbage"), (b"a", b"")], bench.now_ns).inputs == []
    assert bench.take_sent() == []
    assert bench.link.is_open


def test_tokens_are_forwarded_in_any_phase() -> None:
    bench = LinkBench()
    bench.receive(beat("e", 0))
    tokens = requests.TokensStreamed("r", 0, (1,), "x")
    frame = REPORTS.encode(tokens, EPOCH, 0)
    assert bench.link.receive([(b"a", frame), (b"b", frame)], bench.now_ns).private == [tokens]
