"""A front before three docks, all real processes: where requests go, and what a loss costs."""

import asyncio
import json
import os
import signal
import socket
import ssl
import threading
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from loradock.cli.main import app
from loradock.fleet.catalogue import Catalogue, CatalogueError
from loradock.fleet.catalogue import Dock as CatalogueDock
from loradock.fleet.envoy import RELAYED
from loradock.messages.errors import ErrorCode
from tests.support.fleet.etcd import free_ports
from tests.support.fleet.fleets import (
    LORADOCK,
    Answer,
    Clients,
    Dock,
    Fleet,
    Process,
    pids_of_session,
)
from tests.support.fleet.proxies import Proxy
from tests.support.waiting import HANG_S, wait_until


def test_the_dock_that_was_chosen_is_the_one_that_answers(fleet: Fleet) -> None:
    # With `request_header_mode: SKIP` the proxy ignores the choice, and says nothing.
    for number in range(12):
        answer = fleet.complete(f"adapter-{number % 4}")
        decision = fleet.status()["decisions"][-1]
        assert decision["adapter"] == answer.adapter
        assert decision["docks"][0] == f"127.0.0.1:{answer.text}", decision
        assert {*decision["docks"]} == {dock.address for dock in fleet.docks}


def test_an_adapter_stays_where_it_is(fleet: Fleet) -> None:
    homes = {fleet.complete("adapter-4").text for _ in range(10)}
    assert len(homes) == 1
    wait_until(lambda: fleet.status()["copies"].get("adapter-4") == [f"127.0.0.1:{min(homes)}"])


def test_a_header_decides_and_a_client_cannot(fleet: Fleet) -> None:
    home = fleet.complete("adapter-5").text
    other = next(dock.address for dock in fleet.docks if str(dock.port) != home)
    headers = {"x-gateway-destination-endpoint": f"{RELAYED}{other}"}
    for more in ({}, {"x-loradock-adapter": "adapter-5"}, {"x-loradock-adapter": "base:adapter-5"}):
        body = {"model": "adapter-5", "prompt": "x", "max_tokens": 1}
        found = fleet.http.post("/v1/completions", json=body, headers=headers | more)
        assert found.json()["choices"][0]["text"] == home


def test_a_request_that_does_not_arrive_is_given_up(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("loradock.fleet.envoy.RECEIVE_S", 1)
    (port,) = free_ports(1)
    docks = [dock.address for dock in fleet.docks]
    proxy = Proxy(fleet.directory / "slow", port, docks)
    head = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 50\r\n"
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as http:
            wait_until(lambda: fleet.serves(http), proxy.log.read_text)
        for part in (head, head + b"content-type: application/json\r\n\r\n{"):
            with socket.create_connection(("127.0.0.1", port), timeout=HANG_S) as connection:
                connection.sendall(part)
                assert connection.recv(1000).startswith(b"HTTP/1.1 408")
    finally:
        proxy.kill()


@pytest.mark.parametrize("kind", ["application/json", "text/plain", None])
@pytest.mark.parametrize("padding", [0, 95_000, 120_000, 5_000_000])
@pytest.mark.parametrize("is_chunked", [False, True])
def test_the_model_of_any_body_decides(
    fleet: Fleet, kind: str | None, padding: int, is_chunked: bool
) -> None:
    # The proxy reads short bodies of a declared length, the picker the others.
    body = json.dumps({"user": "x" * padding, "nested": {"model": "no"}, "model": "adapter-4"})
    request = fleet.http.build_request(
        "POST",
        "/v1/completions",
        content=iter([body.encode()]) if is_chunked else body.encode(),
        headers={"content-type": kind} if kind else {},
    )
    status = fleet.http.send(request).status_code
    assert fleet.status()["decisions"][-1]["adapter"] == "adapter-4", status


@pytest.mark.parametrize(("count", "length"), [(200, 10), (3, 20_600)])
def test_a_head_that_a_dock_accepts_passes(fleet: Fleet, count: int, length: int) -> None:
    headers = {f"x-{number}": "v" * length for number in range(count)}
    body = {"model": "adapter-4", "prompt": "x", "max_tokens": 1}
    for url in (f"http://{fleet.docks[0].address}", fleet.url):
        assert httpx.post(f"{url}/v1/completions", json=body, headers=headers).status_code == 200


def test_what_is_wrong_with_a_request_says_a_dock(fleet: Fleet) -> None:
    assert fleet.complete("unknown").status == 404
    headers = {"content-type": "application/json"}
    malformed = fleet.http.post("/v1/completions", content=b"{", headers=headers)
    assert malformed.status_code == 400
    assert fleet.http.get("/v1/models").status_code == 200


def test_the_status_needs_the_key_of_the_fleet(fleet: Fleet) -> None:
    for headers in ({}, {"Authorization": "Bearer other"}):
        answer = httpx.get(f"{fleet.url}/fleet/status", headers=headers)
        assert answer.status_code == 401
    (front,) = fleet.fronts()
    assert front == fleet.url


def refused_by(fleet: Fleet, code: ErrorCode) -> tuple[Answer, list[str]]:
    """Let a dock refuse; return the answer to a request that it got first, and its decision."""
    dock = fleet.dock_of(fleet.complete("adapter-2").text)
    dock.refuse(code)
    while True:
        answer = fleet.complete("adapter-2")
        order = fleet.status()["decisions"][-1]["docks"]
        assert dock.is_asked() == (order[0] == dock.address)
        if dock.is_asked():
            return answer, order


@pytest.mark.parametrize(
    "code",
    [
        # No slot or memory; no engine; stopping; and what is wrong with the dock's own files.
        *(ErrorCode.NO_ROOM, ErrorCode.DEVICE_OUT_OF_MEMORY, ErrorCode.ENGINE_GONE),
        *(ErrorCode.STOPPING, ErrorCode.NOT_FOUND, ErrorCode.CONFLICT, ErrorCode.DOES_NOT_FIT),
    ],
)
def test_what_a_dock_cannot_serve_is_answered_by_the_next(fleet: Fleet, code: ErrorCode) -> None:
    answer, order = refused_by(fleet, code)
    assert answer.status == 200, answer.text
    assert f"127.0.0.1:{answer.text}" == order[1]


@pytest.mark.parametrize(
    ("code", "status"), [(ErrorCode.CONTEXT_EXCEEDED, 400), (ErrorCode.OVERLOADED, 429)]
)
def test_what_another_dock_would_refuse_too_is_tried_once(
    fleet: Fleet, code: ErrorCode, status: int
) -> None:
    answer, _ = refused_by(fleet, code)
    assert answer.status == status


def test_what_no_dock_can_serve_says_why(fleet: Fleet) -> None:
    for dock in fleet.docks:
        dock.refuse(ErrorCode.NO_ROOM)
    answer = fleet.complete("adapter-2")
    assert (answer.status, ErrorCode.NO_ROOM.value in answer.text) == (503, True)
    assert all(dock.is_asked() for dock in fleet.docks)


def test_a_front_with_a_certificate_serves_https_alone(fleet: Fleet) -> None:
    (port,) = free_ports(1)
    keys = fleet.etcd.directory
    options = ("--ssl-certfile", f"{keys}/etcd.pem", "--ssl-keyfile", f"{keys}/etcd.key")
    front = fleet.start_front(port, *options)
    trusted = ssl.create_default_context(cafile=keys / "ca.pem")
    try:
        with httpx.Client(
            base_url=f"https://127.0.0.1:{port}", timeout=HANG_S, verify=trusted, trust_env=False
        ) as http:
            wait_until(lambda: fleet.serves(http), front.log.read_text)
        # Clients that trust others, or speak HTTP, get nothing.
        with pytest.raises(httpx.ConnectError, match="CERTIFICATE_VERIFY_FAILED"):
            httpx.get(f"https://127.0.0.1:{port}/live")
        with pytest.raises(httpx.HTTPError):
            httpx.get(f"http://127.0.0.1:{port}/live")
        wait_until(lambda: f"https://127.0.0.1:{port}" in fleet.fronts())
        # The command trusts the certificate that the catalogue has.
        assert fleet.fronts()[f"https://127.0.0.1:{port}"] == ""
    finally:
        front.kill()


def test_a_dock_that_is_killed_costs_no_request(fleet: Fleet) -> None:
    with Clients(fleet) as clients:
        clients.wait_for(20)
        dock = next(d for d in fleet.docks if any(a.text == str(d.port) for a in clients.answers))
        dock.kill()
        clients.wait_for(40)
        # It has no home any more for any of the adapters.
        assert dock.address not in {one["docks"][0] for one in fleet.status()["decisions"][-8:]}
        fleet.restart(dock)
        wait_until(fleet.is_whole)
        # The proxy sends requests to it again, too.
        wait_until(lambda: fleet.complete("").text == str(dock.port))
    assert clients.statuses().keys() == {200}


def test_without_the_picker_docks_take_turns(fleet: Fleet) -> None:
    with Clients(fleet) as clients:
        clients.wait_for(20)
        picker = fleet.front.child("picker")
        os.kill(picker, signal.SIGSTOP)
        os.kill(picker, signal.SIGKILL)
        before = len(clients.answers)
        clients.wait_for(60)
        after = clients.answers[before:]
        wait_until(lambda: fleet.front.child("picker") not in (0, picker), clients.answers.__len__)
        wait_until(fleet.is_whole, clients.answers.__len__)
    assert clients.statuses().keys() == {200}
    assert after


def test_docks_that_have_all_lost_their_leases_are_served(fleet: Fleet) -> None:
    async def registered() -> int | None:
        try:
            async with Catalogue(fleet.etcd.config) as catalogue:
                return len(await catalogue.read(CatalogueDock))
        except CatalogueError:
            # A busy machine lets etcd answer too late.
            return None

    for dock in fleet.docks:
        os.kill(dock.child("member"), signal.SIGSTOP)
    with Clients(fleet) as clients:
        wait_until(lambda: asyncio.run(registered()) == 0, lambda: len(clients.answers))
        clients.wait_for(40)
        for dock in fleet.docks:
            os.kill(dock.child("member"), signal.SIGCONT)
        wait_until(lambda: asyncio.run(registered()) == 3, lambda: len(clients.answers))
        clients.wait_for(40)
    assert clients.statuses().keys() == {200}


def asked(fleet: Fleet) -> Dock:
    """Wait until a request is in one of the silent docks, and let the others answer."""
    dock = wait_until(lambda: next((one for one in fleet.docks if one.is_asked()), None))
    assert dock is not None
    for other in fleet.docks:
        if other is not dock:
            other.be_silent(False)
    return dock


def test_a_request_in_a_dock_that_hangs_is_answered_elsewhere(fleet: Fleet) -> None:
    for one in fleet.docks:
        one.be_silent()
    with Clients(fleet, 1, "adapter-3") as clients:
        dock = asked(fleet)
        # It is in the dock, which has not answered it, when all its processes stop.
        dock.signal(signal.SIGSTOP)
        clients.wait_for(5)
    assert clients.statuses().keys() == {200}
    assert str(dock.port) not in {one.text for one in clients.answers}


def test_a_dock_that_leaves_ends_its_requests(fleet: Fleet) -> None:
    for one in fleet.docks:
        one.be_silent()
    with Clients(fleet, 1, "adapter-0") as clients:
        dock = asked(fleet)
        os.kill(dock.child("member"), signal.SIGTERM)
        wait_until(lambda: dock.address not in fleet.status()["docks"])
        # It ends a moment later, and a dock that still has it is not started again.
        wait_until(lambda: not dock.child("member"))
        dock.be_silent(False)
        clients.wait_for(5)
    assert clients.statuses().keys() == {200}
    assert clients.answers[0].text == str(dock.port)
    assert clients.answers[-1].text != str(dock.port)


def test_a_front_that_is_stopped_ends_its_requests(fleet: Fleet) -> None:
    (port,) = free_ports(1)
    front = fleet.start_front(port)
    answers: list[Answer] = []
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as http:
        wait_until(lambda: fleet.serves(http))
        # Whichever dock gets the request.
        for dock in fleet.docks:
            dock.be_silent()
        thread = threading.Thread(target=lambda: answers.append(fleet.complete("adapter-1", http)))
        thread.start()
        wait_until(lambda: any(dock.is_asked() for dock in fleet.docks))
        front.process.terminate()
        wait_until(lambda: _refuses(port))
        for dock in fleet.docks:
            dock.be_silent(False)
        thread.join()
    assert [one.status for one in answers] == [200]
    assert front.process.wait(HANG_S) == 0


def test_a_gateway_of_kubernetes_asks_the_same_picker(fleet: Fleet) -> None:
    port, asked = free_ports(2)
    command = [*LORADOCK, "fleet", "picker", "--grpc", f"127.0.0.1:{asked}"]
    command += ["--fleet", str(fleet.etcd.file)]
    picker = Process(command, fleet.directory / "picker.log")
    docks = [dock.address for dock in fleet.docks]
    socket_address = {"socket_address": {"address": "127.0.0.1", "port_value": asked}}
    directory = fleet.directory / "gateway"
    gateway = Proxy(directory, port, docks, socket_address, is_streamed=True)
    try:
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=HANG_S) as http:
            wait_until(lambda: fleet.ready(http) == 3, gateway.log.read_text)
            for padding in (0, 50_000, 1_000_000):
                body = {"prompt": "x", "max_tokens": 1, "user": "x" * padding}
                for number in range(12):
                    name = f"adapter-{number % 4}"
                    answer = http.post("/v1/completions", json={"model": name} | body)
                    decision = fleet.status(http)["decisions"][-1]
                    assert decision["adapter"] == name
                    assert answer.status_code == 200, answer.text
                    text = answer.json()["choices"][0]["text"]
                    assert decision["docks"][0] == f"127.0.0.1:{text}"
            assert http.get("/v1/models").status_code == 200
            body = {"model": "adapter-0", "prompt": "x", "stream": True}
            streamed = http.post("/v1/completions", json=body)
            assert streamed.text.endswith("data: [DONE]\n\n"), streamed.text
    finally:
        gateway.kill()
        picker.kill()


def test_a_front_that_is_killed_leaves_no_process(fleet: Fleet) -> None:
    (port,) = free_ports(1)
    front = fleet.start_front(port)
    try:
        wait_until(lambda: not _refuses(port))
        pids = pids_of_session(front.process.pid)
        assert ("envoy" in map(name_of, pids), len(pids)) == (True, 3)
        os.kill(front.process.pid, signal.SIGKILL)
        front.process.wait()
        wait_until(lambda: not any(map(name_of, pids)))
    finally:
        front.kill()


def name_of(pid: int) -> str:
    """Return the name of a process; empty for one that has ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    name, _, state = fields.partition("(")[2].rpartition(") ")
    return "" if state.startswith("Z") else name


def test_a_front_needs_envoy(fleet: Fleet, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    command = ["fleet", "front", "--fleet", str(fleet.etcd.file)]
    refused = CliRunner().invoke(app, command)
    assert refused.exit_code == 2
    assert "/nowhere/envoy is missing" in refused.output


def _refuses(port: int) -> bool:
    try:
        httpx.get(f"http://127.0.0.1:{port}/live")
    except httpx.ConnectError:
        return True
    return False
