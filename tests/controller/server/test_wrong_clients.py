"""Wrong clients and wrong engines: none is admitted, and the right ones notice nothing."""

import os
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import zmq

from loradock.client import Client, NotAllowed
from loradock.controller.server import listener
from loradock.controller.server.access import RIGHT_OF
from loradock.controller.server.keys import KeyStore, new_pair
from loradock.controller.server.transport import Transport
from loradock.messages import events, reports
from loradock.messages import requests as rq
from loradock.messages.addresses import endpoint
from loradock.messages.errors import ErrorCode
from loradock.messages.ids import GPU_SLOT
from loradock.messages.wire import REPORTS
from loradock.processes.key_files import KeyPair, read_key_pair
from loradock.processes.subprocesses import EXIT_CONFIG, EXIT_SOCKET
from tests.controller.server.test_access import EXAMPLES, LOADING, named
from tests.support.parallel.processes import ControllerProcess, controller
from tests.support.simulation.key_examples import allow, key_file, server_key
from tests.support.simulation.remote_examples import (
    RecordingProxy,
    Remote,
    engine_address,
    free_address,
    is_closed_by_peer,
    port_of,
    remote_client,
)
from tests.support.simulation.shell_examples import RawClient, StandInEngine
from tests.support.waiting import HANG_S, wait_until

ENGINE_ID = "the-engine"


class Served(NamedTuple):
    """A controller with a remote address, its engine, and the keys of two tenants."""

    directory: Path
    address: str
    process: ControllerProcess
    witness: Remote
    client: RawClient
    engine: StandInEngine

    def admitted(self, name: str, right: Any, *adapters: str) -> Remote:
        key = allow(self.directory, name, right, *adapters)
        return remote_client(self.directory, self.address, key)

    def with_key(self, pair: KeyPair, address: str = "", kind: int = zmq.DEALER) -> Remote:
        return Remote(address or self.address, pair, server_key(self.directory), kind)

    def events_address(self) -> str:
        return f"tcp://127.0.0.1:{port_of(self.address) + 1}"

    def local_engine_socket(self) -> str:
        return endpoint(self.directory, "engine.sock")

    def stolen(self) -> tuple[bytes, ...]:
        """Return frames of an engine that knows the attached engine's id and the epoch."""
        status = self.client.status()
        known = reports.EngineInventory(status.engine_id, status.engine_pid, "x", 1, 1)
        return tuple(
            REPORTS.encode(report, status.epoch, 1)
            for report in (known, reports.EngineBeat(status.engine_id, 1))
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    directory, address = tmp_path_factory.mktemp("wrong") / "d", free_address()
    witness_key = allow(directory, "witness", "administrate")
    with controller(directory, listen=address) as process:
        wait_until((directory / "run" / "engine.sock").exists)
        with (
            StandInEngine(directory, ENGINE_ID, process.pid) as engine,
            RawClient(directory) as raw,
            remote_client(directory, address, witness_key) as witness,
        ):
            wait_until(lambda: raw.status().engine_id == ENGINE_ID)
            for name in ("acme-1", "globex-1"):
                assert raw.activate(name).state == GPU_SLOT
            yield Served(directory, address, process, witness, raw, engine)


@pytest.fixture
def unharmed(served: Served) -> Iterator[None]:
    """What right peers see is as before; the wrong client has changed nothing."""
    before, listed = served.client.status(), served.client.list().adapters
    received, requested = len(served.engine.received), served.engine.inventory_requests
    yield
    # An engine that took the link over would lose it to the next beats of the right one.
    beats = served.engine.beats
    wait_until(lambda: served.engine.beats > beats + 2)
    served.client.status()
    assert served.engine.inventory_requests == requested
    after = served.client.status()
    kept = (before.engine_id, before.epoch, before.tiers)
    assert (after.engine_id, after.epoch, after.tiers) == kept
    assert served.client.list().adapters == listed
    assert len(served.engine.received) == received
    assert isinstance(served.witness.call(rq.ShowStatus("still-served")), rq.StatusShown)


def without_curve(served: Served) -> None:
    with Remote(served.address) as wrong:
        assert not wrong.is_admitted()


def with_a_password(served: Served) -> None:
    with Remote(served.address) as wrong:
        wrong.socket.plain_username, wrong.socket.plain_password = b"admin", b"admin"
        assert not wrong.is_admitted()


def with_the_key_of_another_server(served: Served) -> None:
    pair = read_key_pair(allow(served.directory, "witness", "administrate"))
    with Remote(served.address, pair, new_pair().public) as wrong:
        assert not wrong.is_admitted()


def with_an_unknown_key(served: Served) -> None:
    for address in (served.address, served.events_address(), engine_address(served.address)):
        with served.with_key(new_pair(), address) as wrong:
            assert not wrong.is_admitted()


def with_a_stolen_public_key(served: Served) -> None:
    public = KeyStore(served.directory).read()[0].public
    with served.with_key(KeyPair(public, new_pair().secret)) as wrong:
        assert not wrong.is_admitted()


def with_a_revoked_key(served: Served) -> None:
    key = allow(served.directory, "fired", "administrate")
    KeyStore(served.directory).revoke("fired")
    with served.with_key(read_key_pair(key)) as wrong:
        assert not wrong.is_admitted()


def with_the_key_of_an_engine(served: Served) -> None:
    pair = read_key_pair(allow(served.directory, "engine", "engine"))
    for address in (served.address, served.events_address()):
        with served.with_key(pair, address) as wrong:
            assert not wrong.is_admitted()


def with_raw_bytes(served: Served) -> None:
    connections = []
    for data in (b"", b"GET / HTTP/1.1\r\n\r\n", b"\xff" + bytes(8) + b"\x7f", bytes(4096)):
        for offset in range(3):
            target = ("127.0.0.1", port_of(served.address) + offset)
            connections.append(socket.create_connection(target))
            connections[-1].sendall(data)
    for connection in connections:
        with connection:
            assert is_closed_by_peer(connection)


def with_replayed_bytes(served: Served) -> None:
    key = read_key_pair(allow(served.directory, "witness", "administrate"))
    proxy = RecordingProxy(port_of(served.address))
    with Remote(proxy.address, key, server_key(served.directory)) as right:
        assert right.is_admitted()
        evicted = right.call(rq.EvictAdapter("replayed", "nobody"))
        assert evicted.code is ErrorCode.UNKNOWN_ADAPTER
    proxy.close()
    before = served.client.status().seq
    with socket.create_connection(("127.0.0.1", port_of(served.address))) as connection:
        connection.sendall(proxy.sent)
        assert is_closed_by_peer(connection)
    assert served.client.status().seq == before


def that_may_only_read(served: Served) -> None:
    with served.admitted("reader", "read") as reader:
        assert isinstance(reader.call(rq.ShowStatus("s")), rq.StatusShown)
        for kind, right in RIGHT_OF.items():
            if right != "read":
                assert reader.call(EXAMPLES[kind]).code is ErrorCode.NOT_ALLOWED


def that_may_not_administrate(served: Served) -> None:
    with served.admitted("operator", "operate") as operator:
        replacing = rq.LoadAdapter("r", "acme-1", "b", replace=True)
        assert operator.call(replacing).code is ErrorCode.NOT_ALLOWED
        for kind in [one for one, right in RIGHT_OF.items() if right == "administrate"]:
            has_name = "adapter" in kind.__struct_fields__
            request = named(EXAMPLES[kind], "acme-1") if has_name else EXAMPLES[kind]
            assert operator.call(request).code is ErrorCode.NOT_ALLOWED


def of_another_tenant(served: Served) -> None:
    with served.admitted("globex", "administrate", "globex-*") as tenant:
        for kind in RIGHT_OF:
            if {"adapter", "adapters"} & {*kind.__struct_fields__}:
                request = EXAMPLES[kind]
                if kind is rq.ActivateBatch:
                    request = rq.ActivateBatch("r", ("globex-1", "acme-1"))
                else:
                    request = named(request, "acme-1")
                code = ErrorCode.NOT_ALLOWED if kind in LOADING else ErrorCode.UNKNOWN_ADAPTER
                assert tenant.call(request).code is code, kind
        listed = tenant.call(rq.ListAdapters("l"))
        assert [view.adapter for view in listed.adapters] == ["globex-1"]
        page = tenant.call(rq.ListAdapters("l", limit=1))
        assert ([view.adapter for view in page.adapters], page.more) == (["globex-1"], False)
        own_name = rq.LoadAdapter("r", "globex-2", "acme-1")
        assert tenant.call(own_name).code is ErrorCode.NOT_ALLOWED


def that_follows_the_events_of_others(served: Served) -> None:
    key = allow(served.directory, "globex", "administrate", "globex-*")
    with served.with_key(read_key_pair(key), served.events_address(), zmq.SUB) as wrong:
        assert not wrong.is_admitted()
    with served.admitted("globex", "administrate", "globex-*") as tenant:
        fetched = tenant.call(rq.FetchEvents("e", 1, 4096)).events
    assert [one.seq for one in fetched] == [*range(1, len(fetched) + 1)]
    names = {getattr(one.event, "adapter", "globex-1") for one in fetched}
    assert names == {"globex-1"}
    assert any(isinstance(one.event, events.EventWithheld) for one in fetched)


def that_is_no_engine(served: Served) -> None:
    pair = read_key_pair(allow(served.directory, "witness", "administrate"))
    for address in (engine_address(served.address), served.local_engine_socket()):
        with served.with_key(pair, address) as wrong:
            assert not wrong.is_admitted()


def an_engine_without_the_secret(served: Served) -> None:
    for address in (engine_address(served.address), served.local_engine_socket()):
        for pair in (None, new_pair()):
            with Remote(address, pair, server_key(served.directory)) as wrong:
                # Queued now, they are sent by the connection once it is made.
                assert not wrong.is_admitted(*served.stolen())


def an_engine_with_a_revoked_key(served: Served) -> None:
    key = read_key_pair(allow(served.directory, "former", "engine"))
    with served.with_key(key, served.local_engine_socket()) as former:
        assert former.is_admitted()
        KeyStore(served.directory).revoke("former")
        # A local connection stays, and its frames are dropped.
        wait_until(lambda: "key=former" in served.process.output())
        for frame in served.stolen():
            former.socket.send(frame)
        with served.with_key(key, served.local_engine_socket()) as again:
            assert not again.is_admitted()


def an_engine_while_another_is_attached(served: Served) -> None:
    key = read_key_pair(allow(served.directory, "spare", "engine"))
    with served.with_key(key, engine_address(served.address)) as spare:
        assert spare.is_admitted()
        epoch = served.client.status().epoch
        for old in (epoch, epoch - 1, 0):
            spare.socket.send(REPORTS.encode(reports.EngineBeat("spare", 0), old))
            late = reports.OperationFailed(1, ErrorCode.CONFLICT, "x")
            spare.socket.send(REPORTS.encode(late, old, 1))
        assert isinstance(served.witness.call(rq.ShowStatus("s")), rq.StatusShown)


WRONG: tuple[Callable[[Served], None], ...] = (
    *(without_curve, with_a_password, with_the_key_of_another_server, with_an_unknown_key),
    *(with_a_stolen_public_key, with_a_revoked_key, with_the_key_of_an_engine, with_raw_bytes),
    *(with_replayed_bytes, that_may_only_read, that_may_not_administrate, of_another_tenant),
    *(that_follows_the_events_of_others, that_is_no_engine, an_engine_without_the_secret),
    *(an_engine_with_a_revoked_key, an_engine_while_another_is_attached),
)


@pytest.mark.usefixtures("unharmed")
@pytest.mark.parametrize("wrong", WRONG, ids=lambda wrong: wrong.__name__)
def test_no_wrong_client_is_admitted(served: Served, wrong: Callable[[Served], None]) -> None:
    wrong(served)


def test_a_revocation_ends_connections_and_no_other_client(served: Served) -> None:
    key = allow(served.directory, "leaver", "administrate")
    with remote_client(served.directory, served.address, key) as leaver:
        assert isinstance(leaver.call(rq.ShowStatus("s")), rq.StatusShown)
        KeyStore(served.directory).revoke("leaver")
        while leaver.next_event() != zmq.EVENT_DISCONNECTED:
            continue
        while leaver.next_event() != zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            continue
        leaver.send_if_possible(rq.EvictAdapter("r", "acme-1"))
        assert not leaver.socket.poll(0)
    witness = allow(served.directory, "witness", "administrate")
    server = KeyStore(served.directory).server_public_path
    with Client(address=served.address, key=witness, server_key=server, timeout_s=HANG_S) as client:
        assert client.show("acme-1").adapter.state == GPU_SLOT


def test_a_remote_client_sees_lists_events_and_refusals(served: Served) -> None:
    server = KeyStore(served.directory).server_public_path
    key = allow(served.directory, "acme", "operate", "acme-*")
    with Client(address=served.address, key=key, server_key=server, timeout_s=HANG_S) as client:
        assert [view.adapter for view in client.list().adapters] == ["acme-1"]
        with pytest.raises(NotAllowed):
            client.evict("acme-1")
        with client.events(since=0) as stream:
            found: Any = next(stream)
            assert isinstance(found.event, events.ControllerResumed)
            while getattr((found := next(stream)).event, "adapter", "") != "acme-1":
                assert not isinstance(found.event, events.EventWithheld)
        # This key is not admitted to the subscription: new events are fetched.
        with client.events() as stream:
            assert served.client.call(rq.RemoveAdapter("gone", "globex-1", force=True))
            client.load("acme-9")
            seen: Any = next(stream)
            assert seen.event.adapter == "acme-9"
    assert served.client.activate("globex-1").state == GPU_SLOT


def test_no_remote_address_is_served_without_allowed_keys(tmp_path: Path) -> None:
    directory = tmp_path / "d"
    for keys in ((), (("engine", "engine"),)):
        for name, right in keys:
            allow(directory, name, right)
        with controller(directory, listen=free_address()) as process:
            assert process.wait() == EXIT_CONFIG
        assert "no client is allowed" in process.output()


@pytest.mark.parametrize("listen", ["tcp://127.0.0.1:1", "tcp://127.0.0.1:70000", "udp://x:1"])
def test_an_address_that_can_not_be_bound_ends_the_start(tmp_path: Path, listen: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        if listen.endswith(":1"):
            listen = f"tcp://127.0.0.1:{taken.getsockname()[1]}"
        allow(tmp_path / "d", "client", "read")
        with controller(tmp_path / "d", listen=listen) as process:
            assert process.wait() == EXIT_SOCKET
    assert "can't be opened" in process.output()


def test_a_directory_with_a_linked_run_is_not_served(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "run").symlink_to(tmp_path / "elsewhere")
    with controller(tmp_path / "d") as process:
        assert process.wait() == EXIT_SOCKET
    assert "is a link" in process.output()


def test_a_local_connection_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(listener, "own_user", lambda: os.geteuid() + 1)
    with Transport(tmp_path):
        for name in ("requests.sock", "events.sock", "engine.sock"):
            with Remote(endpoint(tmp_path, name)) as wrong:
                assert not wrong.is_admitted()


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"address": "tcp://h:1"}, "needs the file of your key"),
        ({"address": "tcp://h", "key": "k", "server_key": "s"}, "No such file"),
        ({"key": "k"}, "need an address"),
        ({"directory": "d", "address": "tcp://h:1"}, "not by both"),
    ],
)
def test_a_client_without_its_keys_is_not_made(arguments: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        Client(**arguments)


@pytest.mark.parametrize("address", ["tcp://h", "tcp://h:0", "tcp://h:65535", "ipc://x:1", "h:1"])
def test_a_client_refuses_what_is_no_address(tmp_path: Path, address: str) -> None:
    key = key_file(tmp_path / "d", "k")
    with pytest.raises(ValueError, match="tcp://HOST:PORT"):
        Client(address=address, key=key, server_key=f"{key}.pub")
    assert msgspec.json.decode(key.read_bytes(), type=KeyPair)
