"""The link's laws, whatever is cut and whoever dies; then its rules, one by one."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from controller.shell.engine_link import BEAT_INTERVAL_NS, GHOST_NS, SYNC_RETRY_NS, EngineLink
from messages import commands, reports
from messages.wire import COMMANDS, REPORTS, Frame
from tests.support.simulation.link_simulation import SECOND_NS, TIMEOUT_NS, Simulation

WHAT = (
    *(["go on"] * 6 + ["want"] * 2 + ["engine"] * 5 + ["controller"] * 5),
    *("wait", "cut", "kill the controller", "start the controller", "kill the engine"),
)
LOGS = (*["ok"] * 5, "full", "crash before the log", "crash behind the log")
FEW = st.integers(0, 6)
STEPS = st.tuples(
    *(st.sampled_from(WHAT), FEW, FEW, st.booleans(), st.booleans(), st.sampled_from(LOGS))
)
HISTORIES = st.lists(STEPS, min_size=25, max_size=50)


def go_on(simulation: Simulation, rounds: int, wants: int) -> None:
    """Nothing breaks; without this, few histories would come far."""
    simulation.start_controller()
    for _ in range(wants):
        simulation.want()
    for _ in range(rounds):
        simulation.engine_turn(False, 100, works=wants > 0, beat=True)
        simulation.controller_turn(100)
        simulation.now_ns += SECOND_NS // 10


def take(simulation: Simulation, step: tuple[Any, ...]) -> None:
    what, one, other, this, that, log = step
    match what:
        case "go on":
            go_on(simulation, one, other)
        case "want":
            simulation.want()
        case "engine":
            simulation.engine_turn(newest_first=this, count=one, works=that, beat=other > 3)
        case "controller":
            simulation.controller_turn(one, log)
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


def no_command_is_done_twice(simulation: Simulation) -> None:
    executed = [op for engine in simulation.engines for op in engine.executed]
    assert len(executed) == len(set(executed))


def no_report_is_passed_over(simulation: Simulation) -> None:
    """The log has each engine's reports from the first one on, in order and without a gap."""
    for engine in simulation.engines:
        ops = [op for name, _, op in simulation.books.inputs if name == engine.engine_id]
        found = list(dict.fromkeys(ops))
        assert found == engine.told[: len(found)]


def no_report_is_logged_twice(simulation: Simulation) -> None:
    """While neither side is lost; afterwards, what was not acknowledged comes again."""
    inputs = simulation.books.inputs
    assert len(inputs) == len(set(inputs))


def no_report_is_dropped_before_it_is_logged(simulation: Simulation) -> None:
    engine = simulation.engine
    kept = {REPORTS.decode(frame).message.op for frame in engine.link.unacknowledged()}
    logged = {op for _, _, op in simulation.books.inputs}
    assert set(engine.told) - {report.op for report in engine.outbox} <= logged | kept


def what_an_inventory_lacks_is_never_done(simulation: Simulation) -> None:
    """It took every command that was sent before it into account."""
    for engine in simulation.engines:
        lost = simulation.books.lost.get(engine.engine_id, ())
        assert not set(engine.executed) & set(lost)


def nothing_is_sent_from_question_to_inventory(simulation: Simulation) -> None:
    controller = simulation.controller
    assert controller is None or controller.overtaken == []


def every_wish_is_in_one_place(simulation: Simulation) -> None:
    books = simulation.books
    wishes = [*books.open.values(), *books.unsent, *books.done]
    assert sorted(wishes) == list(range(1, books.wishes + 1))


LAWS = (
    no_command_is_done_twice,
    no_report_is_passed_over,
    no_report_is_logged_twice,
    no_report_is_dropped_before_it_is_logged,
    what_an_inventory_lacks_is_never_done,
    nothing_is_sent_from_question_to_inventory,
    every_wish_is_in_one_place,
)


@settings(max_examples=400, deadline=None)
@given(history=HISTORIES)
def test_whatever_breaks_the_laws_hold_and_in_the_end_all_is_done(
    history: list[tuple[Any, ...]],
) -> None:
    simulation = Simulation()
    go_on(simulation, rounds=4, wants=2)
    for step in history:
        take(simulation, step)
        for law in LAWS:
            law(simulation)
    simulation.settle()
    for law in LAWS:
        law(simulation)
    assert simulation.controller.link.is_open
    assert simulation.controller.link.engine_id == simulation.engine.engine_id
    assert sorted(simulation.books.done) == list(range(1, simulation.books.wishes + 1))
    assert simulation.engine.link.unacknowledged() == []


EPOCH = 7
DROP = commands.DropWeights(1, 1)


class Talk:
    """A link, and what it said to whom; time stands still unless it is told to go on."""

    def __init__(self, engine_id: str = "") -> None:
        self.said: list[tuple[bytes, Frame[commands.Command]]] = []
        self.link = EngineLink(self._hear, TIMEOUT_NS)
        self.now_ns = 100 * SECOND_NS
        self.link.start(EPOCH, engine_id, self.now_ns)

    def _hear(self, peer: bytes, data: bytes) -> None:
        self.said.append((peer, COMMANDS.decode(data)))

    def hear(
        self, *told: tuple[reports.Report, int], peer: bytes = b"a", epoch: int = EPOCH
    ) -> list[reports.Report]:
        """What the link hands out for the log, all of which is then logged."""
        frames = [(peer, REPORTS.encode(report, epoch, seq)) for report, seq in told]
        output = self.link.receive(frames, self.now_ns)
        self.link.note_logged()
        return output.inputs

    def take_said(self) -> list[tuple[bytes, Frame[commands.Command]]]:
        said, self.said = self.said, []
        return said

    def question(self, peer: bytes = b"a") -> int:
        """The number of the one question that was said since the last look."""
        [(to, frame)] = [said for said in self.take_said() if _asks(said[1])]
        assert to == peer
        return frame.seq

    def opened(self, seq: int = 0) -> "Talk":
        """Engine `e` is there and has told `seq` reports."""
        self.hear(beat("e", seq))
        self.hear(inventory("e", self.question(), seq))
        self.link.open()
        assert self.link.is_open
        return self


def _asks(frame: Frame[commands.Command]) -> bool:
    return isinstance(frame.message, commands.RequestInventory)


def beat(engine_id: str, seq: int) -> tuple[reports.Report, int]:
    return reports.EngineBeat(engine_id, 0), seq


def inventory(engine_id: str, answers: int, seq: int) -> tuple[reports.Report, int]:
    return reports.EngineInventory(engine_id, 1, "m", 1, 1, answers=answers), seq


def dropped(seq: int) -> tuple[reports.Report, int]:
    return reports.WeightsDropped(100 + seq), seq


def ops(inputs: list[reports.Report]) -> list[int]:
    return [report.op - 100 for report in inputs if isinstance(report, reports.WeightsDropped)]


def test_commands_are_numbered_and_beats_are_not() -> None:
    talk = Talk().opened()
    for _ in range(2):
        talk.link.send(DROP, talk.now_ns)
        talk.now_ns += BEAT_INTERVAL_NS
        talk.link.tick(talk.now_ns)
    said = talk.take_said()
    assert [(peer, frame.epoch, frame.seq) for peer, frame in said] == [
        (b"a", EPOCH, seq) for seq in (2, 2, 3, 3)
    ]


def test_it_opens_only_for_the_answer_that_is_being_handled() -> None:
    talk = Talk()
    talk.hear(beat("e", 0))
    asked = talk.question()
    talk.link.open()
    assert not talk.link.is_open
    assert talk.hear(inventory("e", 0, 0)) == []
    assert len(talk.hear(inventory("e", asked, 0))) == 1
    talk.link.send(DROP, talk.now_ns)
    assert talk.take_said() == []
    talk.link.open()
    talk.link.send(DROP, talk.now_ns)
    assert len(talk.take_said()) == 1


def test_an_answer_to_a_former_life_is_no_answer() -> None:
    talk = Talk("e")
    talk.hear(beat("e", 0), epoch=EPOCH - 1)
    asked = talk.question()
    assert talk.hear(inventory("e", asked, 0), epoch=EPOCH - 1) == []
    assert len(talk.hear(inventory("e", asked, 0))) == 1


@pytest.mark.parametrize("told", [inventory("e", 0, 3), inventory("e", 1, 3), beat("e", 4)])
def test_a_gap_that_either_side_sees_closes_it(told: tuple[reports.Report, int]) -> None:
    talk = Talk().opened(3)
    assert talk.hear(told) == []
    assert not talk.link.is_open
    assert talk.hear(inventory("e", 1, 3)) == []
    assert len(talk.hear(inventory("e", talk.question(), 3))) == 1


def test_a_report_behind_a_gap_waits_for_those_before_it() -> None:
    talk = Talk().opened(3)
    assert ops(talk.hear(dropped(4), dropped(6))) == [4]
    assert ops(talk.hear(dropped(7), dropped(5), dropped(6), dropped(7))) == []
    assert ops(talk.hear(inventory("e", talk.question(), 7))) == [5, 6, 7]
    assert ops(talk.hear(dropped(5), dropped(7), dropped(8))) == [8]


def test_another_inventory_behind_the_answer_asks_again() -> None:
    talk = Talk()
    talk.hear(beat("e", 0))
    asked = talk.question()
    assert len(talk.hear(inventory("e", asked, 0), inventory("e", 0, 0))) == 1
    talk.link.open()
    assert not talk.link.is_open
    assert talk.question() > asked


def test_what_is_acknowledged_is_in_the_log() -> None:
    talk = Talk().opened(3)
    told = (dropped(4), inventory("e", 0, 4))
    frames = [(b"a", REPORTS.encode(report, EPOCH, seq)) for report, seq in told]
    assert ops(talk.link.receive(frames, talk.now_ns).inputs) == [4]
    [(_, question)] = talk.take_said()
    assert question.message.acknowledged == 3
    talk.link.forget_unlogged(talk.now_ns)
    talk.now_ns += BEAT_INTERVAL_NS
    talk.link.tick(talk.now_ns)
    assert [frame.message.acknowledged for _, frame in talk.take_said()] == [3]


@pytest.mark.parametrize("count", [0, 1])
def test_what_could_not_be_logged_is_asked_for_again_after_a_while(count: int) -> None:
    talk = Talk()
    talk.hear(beat("e", 0))
    told = [dropped(seq) for seq in range(1, count + 1)]
    told.append(inventory("e", talk.question(), count))
    frames = [(b"a", REPORTS.encode(report, EPOCH, seq)) for report, seq in told]
    assert len(talk.link.receive(frames, talk.now_ns).inputs) == count + 1
    talk.link.forget_unlogged(talk.now_ns)
    talk.link.open()
    assert not talk.link.is_open
    talk.now_ns += SYNC_RETRY_NS
    talk.hear(beat("e", count))
    talk.link.tick(talk.now_ns)
    told[-1] = inventory("e", talk.question(), count)
    assert len(talk.hear(*told)) == count + 1


def test_nothing_is_asked_again_of_an_engine_that_is_silent() -> None:
    talk = Talk()
    talk.hear(beat("e", 0))
    talk.question()
    talk.now_ns += 2 * SYNC_RETRY_NS
    talk.link.tick(talk.now_ns)
    assert not any(_asks(frame) for _, frame in talk.take_said())
    talk.hear(beat("e", 0))
    talk.link.tick(talk.now_ns)
    assert talk.question()


def test_any_answer_of_a_round_will_do() -> None:
    talk = Talk()
    talk.hear(beat("e", 0))
    first = talk.question()
    talk.now_ns += SYNC_RETRY_NS
    talk.hear(beat("e", 0))
    talk.link.tick(talk.now_ns)
    assert talk.question() > first
    assert len(talk.hear(inventory("e", first, 0))) == 1


def test_a_second_engine_waits_for_the_first_ones_end() -> None:
    talk = Talk().opened(3)
    assert talk.hear(beat("f", 9), inventory("f", 1, 9), dropped(4), peer=b"b") == []
    assert talk.take_said() == []
    talk.link.lose(talk.now_ns, ended=True)
    talk.hear(beat("f", 9), peer=b"b")
    [(_, question)] = talk.take_said()
    # The numbers of another life are another's.
    assert question.message == commands.RequestInventory(0)


def test_frames_of_a_dead_engine_do_not_bring_it_back() -> None:
    talk = Talk().opened()
    talk.link.lose(talk.now_ns, ended=True)
    talk.now_ns += GHOST_NS - 1
    assert talk.hear(dropped(1), beat("e", 1), inventory("e", 0, 1)) == []
    assert talk.link.engine_id == ""
    assert talk.take_said() == []


def test_an_engine_that_was_only_silent_is_taken_again() -> None:
    talk = Talk().opened()
    talk.now_ns += TIMEOUT_NS + 1
    assert talk.link.is_overdue(talk.now_ns)
    talk.link.lose(talk.now_ns, ended=False)
    assert not talk.link.is_overdue(talk.now_ns)
    assert talk.hear(dropped(1)) == []
    talk.hear(beat("e", 1))
    assert ops(talk.hear(dropped(1), inventory("e", talk.question(), 1))) == [1]


def test_a_new_line_of_the_same_engine_goes_on_where_it_was() -> None:
    talk = Talk().opened(3)
    talk.link.send(DROP, talk.now_ns)
    talk.hear(dropped(4))
    talk.take_said()
    assert talk.hear(dropped(5), peer=b"b") == []
    assert talk.hear(beat("e", 5), peer=b"b") == []
    [(peer, question)] = talk.take_said()
    assert (peer, question.seq) == (b"b", 3)
    assert question.message == commands.RequestInventory(4)


@pytest.mark.parametrize("engine_id", ["", "f"])
def test_who_is_expected_has_the_timeout_to_turn_up(engine_id: str) -> None:
    talk = Talk("e")
    assert not talk.link.is_overdue(talk.now_ns + TIMEOUT_NS)
    talk.now_ns += TIMEOUT_NS + 1
    talk.hear(beat(engine_id, 0))
    assert talk.link.is_overdue(talk.now_ns)


def test_what_nobody_can_have_said_is_passed_over() -> None:
    talk = Talk().opened(3)
    assert talk.hear(dropped(4), peer=b"b") == []
    assert talk.hear(dropped(4), epoch=EPOCH + 1) == []
    assert talk.hear(inventory("e", 0, 3), epoch=EPOCH + 1, peer=b"b") == []
    assert talk.link.receive([(b"a", b"garbage"), (b"a", b"")], talk.now_ns).inputs == []
    assert talk.take_said() == []
    assert talk.link.is_open


def test_tokens_pass_by_in_any_phase() -> None:
    talk = Talk()
    talk.hear(beat("e", 0))
    tokens = reports.TokensGenerated("r", 0, (1,), "x")
    frame = REPORTS.encode(tokens, EPOCH, 0)
    assert talk.link.receive([(b"a", frame), (b"b", frame)], talk.now_ns).private == [tokens]
