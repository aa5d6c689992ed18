"""Ranks in lockstep: the digest of outcomes, and what an inventory of several ranks covers."""

from threading import Semaphore, Thread
from types import SimpleNamespace
from typing import Any

import zmq

from loradock.engine.worker.leader import Leader, OutcomeDigest
from loradock.engine.worker.worker import Wakeup, Worker
from loradock.messages import commands as cm
from loradock.messages import reports as rp
from loradock.messages import requests
from loradock.messages.errors import ErrorCode
from loradock.messages.views import EngineStatistics
from loradock.messages.wire import COMMANDS, REPORTS
from tests.support.waiting import HANG_S


def test_digests_differ_where_operations_ended_differently() -> None:
    def digest(*reports: rp.Report) -> int:
        outcomes = OutcomeDigest()
        for report in reports:
            outcomes.add(report)
        return outcomes.value

    done = rp.SlotReset(1)
    failed = rp.OperationFailed(1, ErrorCode.CONFLICT, "here")
    assert digest(done) != digest(failed)
    assert digest(done, rp.SlotReset(2)) != digest(rp.SlotReset(2), done)
    # Texts and private reports may differ between ranks, so they are left out.
    assert digest(failed) == digest(rp.OperationFailed(1, ErrorCode.CONFLICT, "there"))
    assert digest(done) == digest(done, requests.TokensStreamed("r", 0, (1,), "x"))


class HeldEngine:
    """An engine whose steps end when a test lets them."""

    engine_id, is_idle, is_copying, has_jobs, running = "e", True, False, False, ()

    def __init__(self) -> None:
        self.last_op = 0
        self.steps = Semaphore(0)
        self.began = Semaphore(0)

    def submit(self, command: cm.Operation) -> None:
        self.last_op = max(self.last_op, command.op)

    def step(self) -> None:
        self.began.release()
        assert self.steps.acquire(timeout=HANG_S)

    def poll(self, _now_s: float) -> list[rp.Report]:
        return []

    def statistics(self) -> EngineStatistics:
        return EngineStatistics()

    def inventory(self) -> rp.EngineInventory:
        return rp.EngineInventory("e", 1, "m", 1, 1, self.last_op)


def test_an_inventory_covers_the_commands_before_its_request_whatever_step_they_arrive_in() -> None:
    engine, wakeup = HeldEngine(), Wakeup()
    group: Any = SimpleNamespace(broadcast_bytes=lambda data: data)
    leader = Leader(engine, group)  # type: ignore[arg-type]
    with zmq.Context() as context:
        ours, theirs = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        ours.bind("inproc://leader")
        theirs.connect("inproc://leader")
        worker = Worker(leader, theirs, wakeup, ())
        thread = Thread(target=worker.run)
        thread.start()
        ours.send(COMMANDS.encode(cm.DropWeights(1, 1), 1, 1))
        assert engine.began.acquire(timeout=HANG_S)
        for seq, command in enumerate((cm.DropWeights(2, 1), cm.RequestInventory(0)), 2):
            ours.send(COMMANDS.encode(command, 1, seq))
        try:
            covered = -1
            while covered < 0:
                engine.steps.release()
                report = REPORTS.decode(ours.recv()).message
                if isinstance(report, rp.EngineInventory) and report.answers == 3:
                    covered = report.last_op
        finally:
            worker.stop()
            engine.steps.release(9)
            wakeup.wake()
            thread.join(HANG_S)
            context.destroy(linger=0)
    assert covered == 2
