"""The link's laws, whatever is cut and whoever dies, and each rule of it for itself."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from messages.wire import REPORTS
from tests.link_simulation import SECOND_NS, Simulation

FEW = st.integers(0, 6)
LOGS = st.sampled_from(["ok", "full", "crash before the log", "crash behind the log"])
STEPS: dict[str, tuple[st.SearchStrategy[Any], ...]] = {
    "go on": (st.integers(1, 4), st.integers(0, 3)),
    "go on again": (st.integers(1, 4), st.integers(0, 3)),
    "want": (),
    "engine turn": (st.booleans(), FEW, st.booleans(), st.booleans()),
    "controller turn": (FEW, LOGS),
    "wait": (st.sampled_from([1, 5, 11, 110]),),
    "cut the line": (FEW, FEW),
    "kill the controller": (FEW,),
    "start the controller": (),
    "kill the engine": (),
}
HISTORIES = st.lists(
    st.one_of(*(st.tuples(st.just(name), *arguments) for name, arguments in STEPS.items())),
    max_size=60,
)


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
    match step:
        case ("go on" | "go on again", rounds, wants):
            go_on(simulation, rounds, wants)
        case ("want",):
            simulation.want()
        case ("engine turn", newest_first, count, works, beat):
            simulation.engine_turn(newest_first, count, works, beat)
        case ("controller turn", count, log):
            simulation.controller_turn(count, log)
        case ("wait", tenths):
            simulation.now_ns += tenths * SECOND_NS // 10
        case ("cut the line", to_controller, to_engine):
            simulation.reconnect(to_controller, to_engine)
        case ("kill the controller", kept):
            simulation.kill_controller(kept)
        case ("start the controller",):
            simulation.start_controller()
        case ("kill the engine",):
            simulation.kill_engine()


def no_command_is_done_twice(simulation: Simulation) -> None:
    executed = [op for engine in simulation.engines for op in engine.executed]
    assert len(executed) == len(set(executed))


def no_report_is_passed_over(simulation: Simulation) -> None:
    """The log has each engine's reports from the first one on, in order and without a gap."""
    for engine in simulation.engines:
        ops = [op for name, op in simulation.books.inputs if name == engine.engine_id]
        found = list(dict.fromkeys(ops))
        assert found == engine.told[: len(found)]


def no_report_is_dropped_before_it_is_logged(simulation: Simulation) -> None:
    engine = simulation.engine
    kept = {REPORTS.decode(frame).message.op for frame in engine.link.unacknowledged()}
    logged = {op for _, op in simulation.books.inputs}
    assert set(engine.told) - {report.op for report in engine.outbox} <= logged | kept


def what_an_inventory_lacks_is_never_done(simulation: Simulation) -> None:
    """It took every command that was sent before it into account."""
    for engine in simulation.engines:
        lost = simulation.books.lost.get(engine.engine_id, ())
        assert not set(engine.executed) & set(lost)


def nothing_is_sent_from_question_to_inventory(simulation: Simulation) -> None:
    controller = simulation.controller
    assert controller is None or controller.broken_silence == []


def every_wish_is_in_one_place(simulation: Simulation) -> None:
    books = simulation.books
    wishes = [*books.open.values(), *books.unsent, *books.done]
    assert sorted(wishes) == list(range(1, simulation.wishes + 1))


LAWS = (
    no_command_is_done_twice,
    no_report_is_passed_over,
    no_report_is_dropped_before_it_is_logged,
    what_an_inventory_lacks_is_never_done,
    nothing_is_sent_from_question_to_inventory,
    every_wish_is_in_one_place,
)


@settings(max_examples=300, deadline=None)
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
    assert sorted(simulation.books.done) == list(range(1, simulation.wishes + 1))
    assert simulation.engine.link.unacknowledged() == []
