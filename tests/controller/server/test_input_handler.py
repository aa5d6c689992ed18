"""An input whose handling raises leaves the state as if it had never come: live and on replay."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from loradock.controller.core.actions import Action, PublishEvent
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.log.format import LogSyncFailed
from loradock.controller.log.replay import HandlingFailed, replay
from loradock.controller.log.retention import Retention
from loradock.controller.log.segments import read, verify
from loradock.controller.log.writer import Log
from loradock.controller.server.config import ServerConfig
from loradock.controller.server.event_stream import EventStream
from loradock.controller.server.inputs import (
    OWN_SKIPS_MAX,
    DivergedError,
    GroupInput,
    InputHandler,
    recover,
)
from loradock.controller.server.snapshot_process import SnapshotProcess
from loradock.messages.ids import Seq
from loradock.messages.records import (
    FORMAT,
    ControllerStarted,
    Header,
    InputSkipped,
    Record,
    TimerFired,
)
from loradock.messages.requests import LoadAdapter
from loradock.processes.progress import Progress
from tests.support.simulation.failing_handlers import Poison, failing
from tests.support.simulation.log_examples import Crash
from tests.support.simulation.memory_storage import MemoryStorage
from tests.support.simulation.workload import random_history

GROUP = 4
DIRECTORY = Path("/run/log")
LIMITS = Limits()
_decoder = msgspec.msgpack.Decoder(Record)


class CrashingLog(Log):
    """A log whose process ends before it writes that an input is skipped."""

    def append(self, records: Sequence[Record], epoch: int) -> Seq:
        if isinstance(records[0].input, InputSkipped):
            raise Crash
        return super().append(records, epoch)


def in_memory(storage: MemoryStorage) -> Log:
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    return Log(DIRECTORY, header, storage=storage)


def none_of(log: Log) -> SnapshotProcess:
    return SnapshotProcess(log.directory, 0, Retention())


def opened(directory: Path, limits: Limits, kind: type[Log] = Log) -> Log:
    header = Header(FORMAT, RULES, "lru", limits_to(limits), 0)
    return kind(directory, header, sync="never")


def log_and_handle(handler: InputHandler, records: Sequence[Record]) -> list[list[Action] | None]:
    """Log and handle a group, whose records have one time."""
    group = [GroupInput(one.input, one.body, one.report_seq) for one in records]
    first_seq = handler.log(group, records[0].time_ns)
    results = [handler.handle(seq, received) for seq, received in enumerate(group, first_seq)]
    handler.end_group()
    return results


def write_and_handle(log: Log, controller: Controller, history: Sequence[Record]) -> list[Action]:
    """Log and handle inputs in groups, as a server does; return the actions."""
    handler = InputHandler(controller, log, True, Progress())
    actions: list[Action] = []
    for start in range(0, len(history), GROUP):
        group = history[start : start + GROUP]
        group = [msgspec.structs.replace(r, time_ns=group[-1].time_ns) for r in group]
        for result in log_and_handle(handler, group):
            actions += result or []
    return actions


def without(directory: Path, limits: Limits, skipped: Sequence[Seq]) -> tuple[Controller, Any]:
    """Handle a log's inputs without some of them; return the state and the actions."""
    controller, actions = Controller(limits, checked=True), []
    for seq, _, record in read(directory):
        if seq in skipped or isinstance(record.input, InputSkipped):
            # Apart from the numbers of later inputs, nothing is left of it.
            controller.world.seq += 1
        else:
            actions += controller.handle(record.input, record.time_ns)
    return controller, actions


def assert_same(found: Controller, expected: Controller) -> None:
    expected.world.time_ns = found.world.time_ns
    assert found.digest() == expected.digest()


@settings(max_examples=25)
@given(
    seed=st.integers(0, 1_000_000),
    failures=st.dictionaries(st.integers(2, 90), st.integers(0, 6), min_size=1, max_size=4),
)
def test_a_history_with_failing_inputs_is_that_without_them(
    seed: int, failures: dict[int, int], tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("history") / "log"
    deployment = random_history(seed, 60).deployment
    history = [_decoder.decode(data) for data in deployment.inputs]
    controller = Controller(deployment.limits, checked=True)
    with opened(directory, deployment.limits) as log, failing(failures) as raised:
        actions = write_and_handle(log, controller, history)
    expected, expected_actions = without(directory, deployment.limits, raised)
    assert_same(controller, expected)
    published = [a for a in actions if isinstance(a, PublishEvent)]
    assert published == [a for a in expected_actions if isinstance(a, PublishEvent)]
    skipped = [r.input.seq for _, _, r in read(directory) if isinstance(r.input, InputSkipped)]
    assert skipped == raised
    # The handlers of this process do not fail, and skip all the same.
    assert replay(directory, checked=True).digest == controller.digest()


@settings(max_examples=15)
@given(seed=st.integers(0, 1_000_000), failing_seq=st.integers(2, 40), change=st.integers(0, 6))
def test_a_crash_before_the_skip_is_logged_ends_in_the_same_state(
    seed: int, failing_seq: int, change: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    directory = tmp_path_factory.mktemp("crash") / "log"
    deployment = random_history(seed, 60).deployment
    history = [_decoder.decode(data) for data in deployment.inputs]
    limits, controller = deployment.limits, Controller(deployment.limits, checked=True)
    with failing({failing_seq: change}) as raised:
        with opened(directory, limits, CrashingLog) as log:
            try:
                write_and_handle(log, controller, history)
            except Crash:
                assert raised == [failing_seq]
            else:
                return
        with pytest.raises(HandlingFailed, match=f"record {failing_seq} "):
            replay(directory)
        with opened(directory, limits) as log:
            recovered, skips = recover_from(log, limits)
            assert [skip.seq for skip in skips] == [failing_seq]
            group = [Record(recovered.world.time_ns, skip) for skip in skips]
            write_and_handle(log, recovered, group)
    expected, _ = without(directory, limits, [failing_seq])
    assert_same(recovered, expected)
    assert replay(directory, checked=True).digest == recovered.digest()


def test_a_crash_among_the_records_that_skip_a_group_leaves_the_others_to_the_next_start(
    log: Log,
) -> None:
    """A start skips two inputs of the last group, and ends before it has logged the second."""
    requests = [Record(2, LoadAdapter(str(number), f"a{number}")) for number in range(3)]
    log.append([Record(1, ControllerStarted(1)), *requests], 1)
    with failing({2: 0, 4: 0}):
        _, skips = recover_from(log, Limits())
        assert [skip.seq for skip in skips] == [2, 4]
        log.append([Record(5, skips[0])], 1)
        recovered, again = recover_from(log, Limits())
        assert again == skips[1:]
        assert [*recovered.world.names] == ["a1"]
        # Once anything else follows, all inputs before it have been handled.
        log.append([Record(6, TimerFired())], 1)
        with pytest.raises(DivergedError, match="a former process has handled it"):
            recover_from(log, Limits())


def recover_from(log: Log, limits: Limits) -> tuple[Controller, list[InputSkipped]]:
    events = EventStream(log.directory)
    try:
        return recover(ServerConfig("", limits, checked=True), log, events, none_of(log))
    finally:
        events.close()


@pytest.fixture
def log(tmp_path: Path) -> Iterator[Log]:
    with opened(tmp_path / "log", Limits()) as log:
        yield log


def test_a_recovery_keeps_each_event_once(log: Log) -> None:
    controller = Controller(Limits())
    history = [Record(1, ControllerStarted(1)), Record(2, LoadAdapter("r", "a"))]
    log.append(history, 0)
    events = EventStream(log.directory)
    with failing({2: 1}):
        recover(ServerConfig("", Limits()), log, events, none_of(log))
    assert list(events._kept) == [1]
    events.close()
    assert controller.world.seq == 0


def test_a_controller_that_does_not_start_ends(log: Log) -> None:
    controller = Controller(Limits())
    handler = InputHandler(controller, log, True, Progress())
    controller.handle = _raise  # type: ignore[method-assign]
    with pytest.raises(Poison):
        log_and_handle(handler, [Record(1, ControllerStarted(1))])


def _raise(*_: Any) -> list[Action]:
    raise Poison


def test_too_many_failing_inputs_of_the_server_itself_end_the_process(log: Log) -> None:
    controller = Controller(Limits())
    write_and_handle(log, controller, [Record(1, ControllerStarted(1))])
    timers = [Record(2, TimerFired())] * (2 * OWN_SKIPS_MAX)
    with failing(dict.fromkeys(range(2, 100), 0)) as raised, pytest.raises(Poison):
        write_and_handle(log, controller, timers)
    assert len(raised) == OWN_SKIPS_MAX + 1


def _logged(storage: MemoryStorage) -> int:
    """Return the number of records that are left after a loss of power."""
    storage.lose_power()
    return verify(DIRECTORY, storage).records


@pytest.mark.parametrize("size", [1, 24])
def test_a_group_is_handled_before_and_durable_after_its_end(size: int) -> None:
    storage = MemoryStorage()
    log = in_memory(storage)
    handler = InputHandler(Controller(LIMITS), log, True, Progress())
    group = [Record(1, LoadAdapter(f"client:{number}", "a")) for number in range(size)]
    results = log_and_handle(handler, group)
    assert len(results) == size
    assert None not in results
    assert storage.calls[-1][0] == "write"
    log.end_group()
    assert storage.calls[-1][0] == "sync_data"
    assert _logged(storage) == size


@pytest.mark.parametrize("size", [1, 24])
def test_a_group_whose_sync_fails_has_no_end(size: int) -> None:
    storage = MemoryStorage()
    log = in_memory(storage)
    handler = InputHandler(Controller(LIMITS), log, True, Progress())
    storage.fail_call(len(storage.calls) + 1)
    group = [Record(1, LoadAdapter(f"client:{number}", "a")) for number in range(size)]
    log_and_handle(handler, group)
    with pytest.raises(LogSyncFailed):
        log.end_group()
    with pytest.raises(LogSyncFailed):
        log.append(group, 1)
    assert _logged(storage) == 0
