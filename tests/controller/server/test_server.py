"""A real controller process: its guarantees about its log, its disk and its events.

Where a test needs an engine, it is a stand-in.
"""

import os
import resource
import signal
from pathlib import Path
from typing import Any

import msgspec

from loradock.client import Client
from loradock.controller.core.limits import Limits
from loradock.controller.log.replay import replay
from loradock.controller.log.segments import read, verify
from loradock.messages import commands, records
from loradock.messages import requests as rq
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import unscoped
from loradock.processes.subprocesses import EXIT_LOG
from tests.support.parallel.processes import LIMITS, ControllerProcess, controller
from tests.support.simulation.log_examples import flip
from tests.support.simulation.shell_examples import (
    RawClient,
    StandInEngine,
    Subscriber,
    eventually,
    logged,
    set_file_limit,
)
from tests.support.waiting import HANG_S

ENGINE_PID = os.getpid()


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "log").glob("*.log"))


def ids_in_log(directory: Path) -> set[str]:
    """The ids, as clients chose them, of the requests in a log."""
    return {unscoped(getattr(message, "request_id", "")) for message in logged(directory)}


def test_a_reply_follows_its_record(directory: Path) -> None:
    with controller(directory) as _, RawClient(directory) as client:
        for count in (1, 1, 1, 50):
            sent_requests = [rq.CancelGeneration(client.new_id(), "nothing") for _ in range(count)]
            for request in sent_requests:
                client.send_request(request)
            for _ in sent_requests:
                reply = client.reply()
                assert not reply.found
                assert reply.request_id in ids_in_log(directory)


def test_requests_that_arrive_together_share_one_group(directory: Path) -> None:
    with controller(directory) as process, RawClient(directory) as client:
        client.status()
        os.kill(process.pid, signal.SIGSTOP)
        sent_requests = [rq.CancelGeneration(client.new_id(), "nothing") for _ in range(200)]
        for request in sent_requests:
            client.send_request(request)
        os.kill(process.pid, signal.SIGCONT)
        assert [client.reply().request_id for _ in sent_requests] == [
            r.request_id for r in sent_requests
        ]
    times = [record.time_ns for _, _, record in read(directory / "log")]
    assert max(times.count(time) for time in set(times)) > 20


def fill_disk(process: ControllerProcess, directory: Path) -> None:
    [segment] = segments(directory)
    set_file_limit(process, segment.stat().st_size + 10)


def test_a_full_disk_refuses_requests_and_nothing_else(directory: Path) -> None:
    # The process's own messages can't be written then either.
    directory.with_suffix(".controller.log").write_bytes(b"x" * (1 << 20))
    with (
        controller(directory, checked=True) as process,
        StandInEngine(directory, "e", ENGINE_PID) as engine,
        RawClient(directory) as client,
        Subscriber(directory) as subscriber,
    ):
        engine.delayed = {commands.LoadWeights}
        waits = rq.LoadAdapter(client.new_id(), "waits")
        done = rq.CancelGeneration(client.new_id(), "nothing")
        client.send_request(waits)
        first = client.call(done)
        eventually(lambda: engine.commands_of(commands.LoadWeights))
        fill_disk(process, directory)
        seq = client.status().seq
        refused = rq.LoadAdapter(client.new_id(), "refused")
        prompt = rq.Generate(client.new_id(), None, "hello")
        for request in (refused, prompt):
            assert client.call(request).code == ErrorCode.LOG_UNAVAILABLE
        # What is answered already is not refused. What waits is told soon, and goes on.
        assert client.call(done) == first
        engine.finish()
        told = client.final_reply(waits.request_id)
        assert (told.code, "was accepted" in told.message) == (ErrorCode.LOG_UNAVAILABLE, True)
        status = client.status()
        assert (status.unready, bool(status.log_error)) == ("the log can't be written", True)
        _assert_queries_are_answered(client, subscriber, seq)
        set_file_limit(process, resource.RLIM_INFINITY)
        eventually(lambda: [view.state for view in client.list()] == ["cpu-cached"])
        assert client.status().unready == ""
        # A repetition is refused again: its client has been answered. A new request is not.
        assert client.call(refused).code == ErrorCode.LOG_UNAVAILABLE
        again = rq.LoadAdapter(client.new_id(), "refused")
        assert client.call(again).state == "cpu-cached"
        prompt = rq.Generate(client.new_id(), None, "hello")
        assert client.call(prompt).finish_reason == "length"
    assert replay(directory / "log", checked=True).divergence is None


def _assert_queries_are_answered(client: RawClient, subscriber: Subscriber, seq: int) -> None:
    last = client.list().events_seq
    while subscriber.frame().seq < last:
        continue
    # Long enough for the reports to arrive, and for several attempts to write the log.
    for _ in range(5):
        assert subscriber.frame().seq == client.list().events_seq == last
    assert client.status().seq == seq
    assert client.call(rq.FetchEvents(client.new_id(), 1)).events


def test_a_start_on_a_full_disk_waits_for_space(directory: Path) -> None:
    with controller(directory) as process, RawClient(directory) as client:
        epoch = client.status().epoch
        process.kill()
        # Space for the file's name and nothing else; no second segment is begun.
        _start_limited(process, segments(directory)[0].stat().st_size)
        assert client.status().seq == 1
        assert client.load("a").code == ErrorCode.LOG_UNAVAILABLE
        with StandInEngine(directory, "e", ENGINE_PID) as engine, Subscriber(directory) as beats:
            # Another process may begin with the same epoch, as long as no log has it.
            for _ in range(5):
                assert beats.frame().epoch == epoch
            assert engine.epoch == 0
            set_file_limit(process, resource.RLIM_INFINITY)
            eventually(lambda: client.status().epoch > epoch, "the new epoch")
            eventually(lambda: client.status().engine_id == "e", "the engine")


def _start_limited(process: ControllerProcess, size_bytes: int) -> None:
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, own[1]))
    try:
        process.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)


def grow(directory: Path) -> None:
    """Write a log with some records; no process has it open afterwards."""
    with controller(directory) as process:
        with RawClient(directory) as client:
            for _ in range(5):
                client.call(rq.ReleaseAdapter(client.new_id(), "nobody"))
        assert process.stop() == 0


def test_a_corrupt_log_stops_the_start(directory: Path) -> None:
    grow(directory)
    [segment] = segments(directory)
    flip(segment, segment.stat().st_size // 2)
    corruption = verify(directory / "log").corruption
    with controller(directory) as process:
        assert process.wait() == EXIT_LOG
        output = process.output()
        assert f"{segment}: corrupt at offset {corruption.offset}" in output
        assert f"record {corruption.seq} should be" in output
    assert verify(directory / "log").corruption.offset == corruption.offset


def test_a_torn_tail_is_cut_and_reported(directory: Path) -> None:
    grow(directory)
    before = verify(directory / "log")
    [segment] = segments(directory)
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[-30:-3])
    with controller(directory) as process, RawClient(directory) as client:
        assert client.status().seq == before.last_seq + 1
        assert "an unfinished record was cut" in process.output()
        assert f"kept_in={segment}.0.cut" in process.output()
        assert "bytes=27" in process.output()
    assert verify(directory / "log").torn_bytes == 0


def test_a_second_controller_is_refused_and_changes_nothing(directory: Path) -> None:
    with controller(directory) as first, RawClient(directory) as client:
        before = client.status()
        with controller(directory) as second:
            assert second.wait() == EXIT_LOG
            assert "another process writes this log" in second.output()
        assert client.load("a", timeout_ms=1).code == ErrorCode.ENGINE_GONE
        with RawClient(directory) as newcomer:
            assert newcomer.status().epoch == before.epoch
        assert first.stop() == 0


def test_each_start_has_a_greater_epoch_and_logs_it(directory: Path) -> None:
    epochs = []
    with controller(directory) as process, RawClient(directory) as client:
        for _ in range(3):
            epochs.append(client.status().epoch)
            process.kill()
            process.start()
        epochs.append(client.status().epoch)
    assert epochs == sorted(set(epochs))
    started = [m.epoch for m in logged(directory) if isinstance(m, records.ControllerStarted)]
    assert started == epochs


def test_a_restart_with_other_limits_synchronises_with_the_engine(directory: Path) -> None:
    more = msgspec.structs.replace(LIMITS, max_loras=5, max_cpu_loras=9)
    with StandInEngine(directory, "e", ENGINE_PID) as engine, RawClient(directory) as client:
        with controller(directory, checked=True) as process:
            for name in "abc":
                assert client.activate(name).state == "gpu-slot"
            before, listed = client.status(), client.list()
            assert process.stop() == 0
        written = len(engine.commands_of(commands.WriteSlot))
        with controller(directory, limits=more, checked=True) as process:
            eventually(lambda: client.status().engine_id == engine.engine_id)
            assert places(client.list()) == places(listed)
            assert client.activate("b").state == "gpu-slot"
            after = client.status()
            assert {tier.name: tier.count_max for tier in after.tiers}["host"] == 9
            assert process.stop() == 0
        assert len(engine.commands_of(commands.WriteSlot)) == written
    result = replay(directory / "log", until=after.seq, checked=True)
    assert result.divergence is None
    assert result.digest == after.digest
    # The state before the change of limits can still be replayed.
    assert replay(directory / "log", until=before.seq).digest == before.digest


def places(listed: rq.AdaptersListed) -> list[tuple[str, str, int, int]]:
    return [(v.adapter, v.state, v.slot, v.generation) for v in listed.adapters]


def test_every_epoch_serves_events_from_the_first_one(directory: Path) -> None:
    with (
        StandInEngine(directory, "e", ENGINE_PID),
        controller(directory) as process,
        Client(directory, timeout_s=HANG_S) as client,
    ):
        for name in "abcd":
            client.activate(name)
        before = list(client.events(since=0, follow=False))
        process.kill()
        process.start()
        last = client.status().events_seq
        after = list(client.events(since=0, follow=False))
    assert [event.seq for event in before] == list(range(1, len(before) + 1))
    assert after[: len(before)] == before
    assert [event.seq for event in after][:last] == list(range(1, last + 1))


def test_a_gap_in_the_events_can_be_filled(directory: Path) -> None:
    with (
        StandInEngine(directory, "e", ENGINE_PID),
        controller(directory),
        RawClient(directory) as client,
        Subscriber(directory) as subscriber,
    ):
        newest = subscriber.frame().seq
        for name in "abc":
            client.activate(name)
        last = client.list().events_seq
        seen: list[Any] = []
        while newest < last:
            frame = subscriber.frame()
            seen += frame.message
            # A batch has the number of its last event, a heartbeat that of the last one published.
            newest = frame.message[-1].seq if frame.message else newest
            assert frame.seq == newest
        fetched = client.call(rq.FetchEvents(client.new_id(), seen[0].seq))
        assert list(fetched.events) == seen
        assert fetched.last_seq == last
        [one] = client.call(rq.FetchEvents(client.new_id(), last - 1, 1)).events
        assert one == seen[-2]
        for beyond in (last + 1, 2**63 - 1):
            assert client.call(rq.FetchEvents(client.new_id(), beyond)).events == ()


def test_a_client_that_does_not_read_and_many_connections_end_nothing(directory: Path) -> None:
    quick = Limits(requests_max=64)
    with controller(directory, limits=quick) as process, RawClient(directory) as client:
        client.status()
        peers = [RawClient(directory) for _ in range(60)]
        try:
            for peer in peers:
                for _ in range(100):
                    peer.send_request(rq.ListAdapters(peer.new_id()))
            limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert limits[0] == limits[1]
            assert client.status().seq
        finally:
            for peer in peers:
                peer.close()
        assert process.stop() == 0
