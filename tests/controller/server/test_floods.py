"""What a remote key of the lowest right can make the controller hold, measured."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest
import zmq

from loradock.controller.server import clients, event_stream, listener, queries, transport
from loradock.controller.server.connection_guard import SUBSCRIBER_BYTES_MAX
from loradock.controller.server.transport import Transport
from loradock.messages.addresses import EVENTS_PORT_OFFSET
from loradock.messages.wire import REPORTS
from loradock.processes.key_files import read_key_pair
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation.key_examples import allow, server_key, use_keys
from tests.support.simulation.remote_examples import free_address, port_of
from tests.support.sources import ROOT
from tests.support.waiting import HANG_S, wait_until

FLOOD_BYTES = 4 << 20
"""Subscriptions of this size held 250 MB."""

GROWTH_BYTES_MAX = 64 << 20


class Flooder:
    """A process with an allowed key that sends what it likes to one of the sockets."""

    def __init__(self, directory: Path, address: str, key: Path, kind: int) -> None:
        self._context = zmq.Context()
        self.socket = self._context.socket(kind)
        self.monitor = self.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        use_keys(self.socket, read_key_pair(key), server_key(directory))
        self.socket.linger = 0
        self.socket.connect(address)

    def close(self) -> None:
        self._context.destroy(linger=0)


@pytest.fixture
def served(tmp_path: Path) -> Iterator[tuple[Path, str, ControllerProcess]]:
    directory, address = tmp_path / "d", free_address()
    allow(directory, "witness", "administrate")
    with controller(directory, listen=address) as process:
        wait_until((directory / "run" / "engine.sock").exists)
        yield directory, address, process


def test_the_table_of_bounds_has_the_bounds() -> None:
    page = (ROOT / "docs" / "operating.md").read_text()
    table = page.split("What a peer can make the controller hold:")[1].split("Local clients")[0]
    mib = 1 << 20
    stated = {
        f"{SUBSCRIBER_BYTES_MAX >> 10} KiB sent, in frames of at most "
        f"{listener.SUBSCRIPTION_BYTES_MAX >> 10} KiB",
        f"{listener.UNREAD_REQUESTS_BYTES_MAX // mib} MiB a connection (an engine: "
        f"{2 * REPORTS.bytes_max // mib} MiB)",
        f"{listener._REQUEST_BYTES_HARD_MAX // mib} MiB; {REPORTS.bytes_max // mib} MiB",
        f"{listener._LOCAL_REQUESTS_QUEUED_MAX} local, "
        f"{listener._REMOTE_REQUESTS_QUEUED_MAX} remote",
        f"{clients.PAYLOAD_BYTES_MAX >> 30} GiB of all",
        f"{clients.CLIENTS_MAX:,}; {clients.CLIENTS_PER_ROUTE_MAX}",
        f"{transport.UNREAD_BYTES_PER_CLIENT_MAX // mib} MiB a client, "
        f"{transport.UNREAD_BYTES_MAX // mib} MiB of all",
        f"{transport.UNSENT_BYTES_PER_CLIENT_MAX // mib} MiB each, for "
        f"{transport.UNSENT_CLIENTS_MAX} clients",
        f"{listener._QUEUE_FRAMES_MAX:,}",
        f"{queries.QUERIES_PER_CLIENT_MAX} a client, {queries.QUERIES_MAX:,} of all",
        f"{event_stream.FETCHES_PER_CLIENT_MAX} a client, {event_stream.FETCHES_MAX} of all",
        f"{listener._HANDSHAKE_MS // 1000} s",
    }
    bounds = {line.split("|")[2].strip() for line in table.splitlines() if line.startswith("| ")}
    assert stated <= bounds, stated - bounds


def memory_bytes(process: ControllerProcess) -> int:
    fields = Path(f"/proc/{process.pid}/statm").read_text().split()
    return int(fields[1]) * os.sysconf("SC_PAGE_SIZE")


def test_the_parts_of_a_message_are_bounded_and_whole_messages_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a smaller bound than a controller has."""
    bound, part = 1 << 20, bytes(64 << 10)
    monkeypatch.setattr(listener, "UNREAD_REQUESTS_BYTES_MAX", bound)
    address = free_address()
    key = allow(tmp_path, "reader", "read")
    with Transport(tmp_path, remote_address=address) as opened:
        client = Flooder(tmp_path, address, key, zmq.DEALER)
        for _ in range(8 * bound // len(part)):
            client.socket.send(part)
            opened.poll(1000)
            assert sum(len(frame) for _, _, frame in opened.receive_requests()) % len(part) == 0
        assert not client.monitor.poll(0)
        # A peer that has ended the connection reads nothing of the rest.
        sent = 64 * bound
        client.socket.send_multipart([part] * (sent // len(part)))
        assert client.monitor.poll(1000 * HANG_S), "the parts were all accepted"
        opened.poll(0)
        assert not [*opened.receive_requests()]
        client.close()
    print(f"sent {sent} bytes in parts of one message, bound {bound}")


def test_subscriptions_are_bounded_and_their_memory_is_returned(
    served: tuple[Path, str, ControllerProcess],
) -> None:
    directory, address, process = served
    key = allow(directory, "reader", "read")
    events = f"tcp://127.0.0.1:{port_of(address) + EVENTS_PORT_OFFSET}"
    before = memory_bytes(process)
    flooder = Flooder(directory, events, key, zmq.XSUB)
    most = sent = 0
    while not flooder.monitor.poll(0) and sent < FLOOD_BYTES:
        flooder.socket.send(b"\1" + secrets.token_bytes(900))
        sent += 900
        most = max(most, memory_bytes(process) - before)
    wait_until(lambda: "a remote connection is ended" in process.output())
    flooder.close()
    wait_until(lambda: memory_bytes(process) - before < GROWTH_BYTES_MAX // 4)
    print(
        f"sent {sent} bytes of subscriptions, held {most >> 20} MiB, bound {SUBSCRIBER_BYTES_MAX}"
    )
    assert most < GROWTH_BYTES_MAX
