"""A real controller's process: what it promises about its log, its disk and its events.

Its engine, where it needs one, is a stand-in that only says what engines say.
"""

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.client import Client
from controller.core.limits import Limits
from controller.log.format import LogSyncFailed
from controller.log.replay import replay
from controller.log.segments import read, verify
from controller.shell import server
from controller.shell.server import EXIT_CONFIG, EXIT_FAILED, EXIT_LOG, EXIT_SOCKET, ServerConfig
from messages import commands, records
from messages import requests as rq
from messages.errors import ErrorCode
from tests.support.parallel.processes import LIMITS, ROOT, ControllerProcess, controller
from tests.support.simulation.log_examples import flip
from tests.support.simulation.shell_examples import (
    RawClient,
    StandInEngine,
    Subscriber,
    eventually,
    logged,
    set_file_limit,
)

ENGINE_PID = os.getpid()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    found = tmp_path / "d"
    found.mkdir()
    return found


def segments(directory: Path) -> list[Path]:
    return sorted((directory / "log").glob("*.log"))


def ids_in_log(directory: Path) -> set[str]:
    return {getattr(message, "request_id", "") for message in logged(directory)}


def test_a_reply_follows_its_record(directory: Path) -> None:
    with controller(directory) as _, RawClient(directory) as client:
        for count in (1, 1, 1, 50):
            asked = [rq.ReleaseAdapter(client.new_id(), "nobody") for _ in range(count)]
            for request in asked:
                client.put(request)
            for _ in asked:
                reply = client.reply()
                assert reply.code == ErrorCode.UNKNOWN_ADAPTER
                assert reply.request_id in ids_in_log(directory)


def test_what_arrives_together_shares_one_group(directory: Path) -> None:
    with controller(directory) as process, RawClient(directory) as client:
        client.status()
        os.kill(process.pid, signal.SIGSTOP)
        asked = [rq.ReleaseAdapter(client.new_id(), "nobody") for _ in range(200)]
        for request in asked:
            client.put(request)
        os.kill(process.pid, signal.SIGCONT)
        assert [client.reply().request_id for _ in asked] == [r.request_id for r in asked]
    times = [record.time_ns for _, _, record in read(directory / "log")]
    assert max(times.count(time) for time in set(times)) > 20


def fill_disk(process: ControllerProcess, directory: Path) -> None:
    [segment] = segments(directory)
    set_file_limit(process, segment.stat().st_size + 10)


def test_a_full_disk_refuses_requests_and_nothing_else(directory: Path) -> None:
    # What it says to people can't be written then either.
    directory.with_suffix(".controller.log").write_bytes(b"x" * (1 << 20))
    with (
        controller(directory, checked=True) as process,
        StandInEngine(directory, "e", ENGINE_PID) as engine,
        RawClient(directory) as client,
        Subscriber(directory) as subscriber,
    ):
        engine.keep = {commands.LoadWeights}
        waits = rq.LoadAdapter(client.new_id(), "waits")
        done = rq.ReleaseAdapter(client.new_id(), "nobody")
        client.put(waits)
        first = client.ask(done)
        eventually(lambda: engine.got(commands.LoadWeights))
        fill_disk(process, directory)
        seq = client.status().seq
        refused = rq.LoadAdapter(client.new_id(), "refused")
        prompt = rq.Generate(client.new_id(), None, "hello")
        for request in (refused, prompt):
            assert client.ask(request).code == ErrorCode.LOG_UNAVAILABLE
        # Who was taken up or answered before is not told otherwise now.
        client.put(waits)
        assert client.ask(done) == first
        engine.finish()
        _reads_go_on(client, subscriber, seq)
        set_file_limit(process, resource.RLIM_INFINITY)
        assert client.answer(waits.request_id).state == "cpu-cached"
        assert client.ask(refused).state == "cpu-cached"
        assert client.ask(prompt).finish_reason == "length"
    assert replay(directory / "log", checked=True).divergence is None


def _reads_go_on(client: RawClient, subscriber: Subscriber, seq: int) -> None:
    last = client.list().events_seq
    while subscriber.frame().seq < last:
        continue
    # Long enough for the reports to have come, and for more than one look at the disk.
    for _ in range(5):
        assert subscriber.frame().seq == client.list().events_seq == last
    assert client.status().seq == seq
    assert client.ask(rq.FetchEvents(client.new_id(), 1)).events


def test_a_disk_that_is_full_at_the_start_is_waited_for(directory: Path) -> None:
    with controller(directory) as process, RawClient(directory) as client:
        epoch = client.status().epoch
        process.kill()
        # Room for the names and nothing else; the log itself is not begun anew.
        _start_limited(process, segments(directory)[0].stat().st_size)
        assert client.status().seq == 1
        assert client.load("a").code == ErrorCode.LOG_UNAVAILABLE
        set_file_limit(process, resource.RLIM_INFINITY)
        eventually(lambda: client.status().epoch > epoch, "the new life")


def _start_limited(process: ControllerProcess, size_bytes: int) -> None:
    own = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, own[1]))
    try:
        process.start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, own)


def grow(directory: Path) -> None:
    """A log with some records, and nobody writing it."""
    with controller(directory) as process:
        with RawClient(directory) as client:
            for _ in range(5):
                client.ask(rq.ReleaseAdapter(client.new_id(), "nobody"))
        assert process.stop() == 0


def test_a_damaged_log_stops_the_start(directory: Path) -> None:
    grow(directory)
    [segment] = segments(directory)
    flip(segment, segment.stat().st_size // 2)
    damage = verify(directory / "log").damage
    with controller(directory) as process:
        assert process.wait() == EXIT_LOG
        said = process.output()
        assert f"{segment}: damaged at offset {damage.offset}" in said
        assert f"record {damage.seq} should be" in said
    assert verify(directory / "log").damage.offset == damage.offset


def test_a_torn_tail_is_cut_and_told(directory: Path) -> None:
    grow(directory)
    before = verify(directory / "log")
    [segment] = segments(directory)
    with segment.open("ab") as file:
        file.write(segment.read_bytes()[-30:-3])
    with controller(directory) as process, RawClient(directory) as client:
        assert client.status().seq == before.last_seq + 1
        assert "a torn tail was cut" in process.output()
        assert "bytes=27" in process.output()
    assert verify(directory / "log").torn_bytes == 0


def test_a_second_controller_is_refused_and_harms_nobody(directory: Path) -> None:
    with controller(directory) as first, RawClient(directory) as client:
        before = client.status()
        with controller(directory) as second:
            assert second.wait() == EXIT_LOG
            assert "another process writes this log" in second.output()
        assert client.load("a", timeout_ms=1).code == ErrorCode.ENGINE_GONE
        with RawClient(directory) as newcomer:
            assert newcomer.status().epoch == before.epoch
        assert first.stop() == 0


def test_each_life_has_a_greater_epoch_and_tells_so(directory: Path) -> None:
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


def test_a_restart_with_other_limits_begins_anew_with_the_engine(directory: Path) -> None:
    more = msgspec.structs.replace(LIMITS, slots_max=5, host_adapters_max=9)
    with StandInEngine(directory, "e", ENGINE_PID) as engine, RawClient(directory) as client:
        with controller(directory, checked=True) as process:
            for name in "abc":
                assert client.activate(name).state == "gpu-slot"
            before, listed = client.status(), client.list()
            assert process.stop() == 0
        written = len(engine.got(commands.WriteSlot))
        with controller(directory, limits=more, checked=True) as process:
            eventually(lambda: client.status().engine_id == engine.engine_id)
            assert places(client.list()) == places(listed)
            assert client.activate("b").state == "gpu-slot"
            after = client.status()
            assert {tier.name: tier.count_max for tier in after.tiers}["host"] == 9
            assert process.stop() == 0
        assert len(engine.got(commands.WriteSlot)) == written
    result = replay(directory / "log", until=after.seq, checked=True)
    assert result.divergence is None
    assert result.digest == after.digest
    # The moment before is still there, although other limits follow it.
    assert replay(directory / "log", until=before.seq).digest == before.digest


def places(listed: rq.AdaptersListed) -> list[tuple[str, str, int, int]]:
    return [(v.adapter, v.state, v.slot, v.generation) for v in listed.adapters]


def test_events_are_told_from_the_first_one_in_every_life(directory: Path) -> None:
    with (
        StandInEngine(directory, "e", ENGINE_PID),
        controller(directory) as process,
        Client(directory, timeout_s=60) as client,
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
            # A batch is numbered by its own last event, a beat says what the last one was.
            newest = frame.message[-1].seq if frame.message else newest
            assert frame.seq == newest
        fetched = client.ask(rq.FetchEvents(client.new_id(), seen[0].seq))
        assert list(fetched.events) == seen
        assert fetched.last_seq == last
        [one] = client.ask(rq.FetchEvents(client.new_id(), last - 1, 1)).events
        assert one == seen[-2]
        for beyond in (last + 1, 2**63 - 1):
            assert client.ask(rq.FetchEvents(client.new_id(), beyond)).events == ()


def start(*arguments: str, **options: Any) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "controller.shell.server", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


def test_it_ends_with_its_parent(directory: Path) -> None:
    parent, child = os.pipe()
    config = msgspec.json.encode(ServerConfig(str(directory), LIMITS)).decode()
    process = start(config, str(parent), pass_fds=(parent,))
    os.close(parent)
    try:
        with RawClient(directory) as client:
            assert client.status().controller_pid == process.pid
            # A terminal's Ctrl-C is the parent's to pass on.
            process.send_signal(signal.SIGINT)
            assert client.status().seq
        os.close(child)
        assert process.wait(60) == 0
    finally:
        process.kill()
        process.wait()
    assert verify(directory / "log").torn_bytes == 0


@pytest.mark.parametrize(
    "changes",
    [
        {"policy": "nobody"},
        {"limits": {"slots_max": 0}},
        {"limits": {"slots_max": 3, "host_adapters_max": 2}},
        {"sync": "sometimes"},
        {"default_mm_loras": {"audio": "a"}},
        {"default_mm_loras": {"image": ""}},
    ],
)
def test_wrong_options_leave_no_trace(directory: Path, changes: dict[str, Any]) -> None:
    config = {"directory": str(directory), **changes}
    process = start(msgspec.json.encode(config).decode())
    _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_CONFIG, said
    assert b"wrong configuration" in said
    assert list(directory.iterdir()) == []


def test_a_path_that_is_too_long_is_told(tmp_path: Path) -> None:
    directory = tmp_path / ("x" * 120)
    process = start(msgspec.json.encode(ServerConfig(str(directory))).decode())
    _, said = process.communicate(timeout=60)
    assert process.returncode == EXIT_SOCKET, said
    assert b"choose a shorter directory" in said


def test_a_failed_disk_is_worth_a_restart(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise LogSyncFailed("a sync failed")

    monkeypatch.setattr(server, "_serve", fail)
    monkeypatch.setattr(sys, "argv", ["server", '{"directory": "d"}'])
    assert server.main() == EXIT_FAILED


def test_a_poor_reader_and_many_connections_end_nobody(directory: Path) -> None:
    quick = Limits(requests_max=64)
    with controller(directory, limits=quick) as process, RawClient(directory) as client:
        client.status()
        peers = [RawClient(directory) for _ in range(60)]
        try:
            for peer in peers:
                for _ in range(100):
                    peer.put(rq.ListAdapters(peer.new_id()))
            limits = resource.prlimit(process.pid, resource.RLIMIT_NOFILE)
            assert limits[0] == limits[1]
            assert client.status().seq
        finally:
            for peer in peers:
                peer.close()
        assert process.stop() == 0
