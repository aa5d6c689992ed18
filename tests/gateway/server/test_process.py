"""The process: its exit statuses, its address, and its end with requests in flight."""

import asyncio
import json
import shutil
import socket
import ssl
import subprocess
import threading
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from msgspec.structs import replace

from loradock.client import async_client, sockets
from loradock.gateway.address import parse_address
from loradock.gateway.options import GatewayConfig
from loradock.gateway.server import gateway, process
from loradock.messages import requests as rq
from loradock.messages.errors import NotAllowed
from loradock.processes.progress import Progress, Step
from loradock.processes.subprocesses import EXIT_CONFIG, EXIT_SOCKET
from tests.support.gateway.served import Served, post_bytes, read_all, serve_gateway
from tests.support.plain_logs import reset_logs
from tests.support.simulation.message_examples import example_of
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import HANG_S, wait_until


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("0.0.0.0:8000", ("0.0.0.0", 8000)),
        ("[::1]:80", ("::1", 80)),
        ("9000", ("127.0.0.1", 9000)),
        (":9000", ("127.0.0.1", 9000)),
    ],
)
def test_addresses_are_read(text: str, address: Any) -> None:
    assert parse_address(text) == address


@pytest.mark.parametrize("text", ["", "host", "host:", "host:x", "host:70000", "host:-1"])
def test_wrong_addresses_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        parse_address(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "x",
        '{"log_format": "xml"}',
        '{"directory": "d", "http_timeout_s": 9999}',
        '{"directory": "d", "port": "x"}',
    ],
)
def test_a_wrong_configuration_ends_the_process(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr("sys.argv", ["gateway", text])
    try:
        assert process.main() == EXIT_CONFIG
    finally:
        reset_logs()


@pytest.mark.parametrize(
    "options",
    [
        {"api_key_file": "/nothing"},
        {"lora_modules": ("x",)},
        {"lora_resolver_roots": ("/nothing",)},
        {"lora_resolvers": ("nothing",)},
        {"ssl_certfile": "/nothing", "ssl_keyfile": "/nothing"},
        {"model": "examples/tiny/model", "chat_template": "/nothing"},
    ],
)
def test_options_that_can_not_be_served_end_the_process(tmp_path: Path, options: Any) -> None:
    config = GatewayConfig(directory=str(tmp_path), port=0, **options)
    page = Progress.share()
    assert process.run(msgspec.structs.replace(config, progress=page.path)) == EXIT_CONFIG
    assert page.reason().startswith("can't serve with these options: ")


def test_an_address_in_use_ends_the_process(tmp_path: Path) -> None:
    page = Progress.share()
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        config = GatewayConfig(directory=str(tmp_path), port=port)
        assert process.run(msgspec.structs.replace(config, progress=page.path)) == EXIT_SOCKET
    # It is the last line of `serve`.
    assert page.reason() == f"--http 127.0.0.1:{port} can't be used: Address already in use"


def test_a_module_that_can_not_be_loaded_ends_the_process(tmp_path: Path) -> None:
    with StandIn(tmp_path) as controller:
        # The stand-in knows no other adapters, and refuses to load one.
        config = GatewayConfig(
            directory=str(controller.directory), port=0, lora_modules=("new=roots/new",)
        )
        assert process.run(config) == EXIT_CONFIG


def test_a_server_can_start_for_the_first_time_after_its_gateway(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sockets, "FIRST_START_S", 0.01)
    monkeypatch.setattr(gateway, "_SERVER_RETRY_S", 0.01)
    warnings: list[str] = []
    monkeypatch.setattr(gateway.log, "warning", lambda text, **_: warnings.append(text))
    with ExitStack() as stack:

        def start() -> None:
            wait_until(lambda: "waiting for a server" in warnings)
            stack.enter_context(StandIn(tmp_path / "later"))

        starting = threading.Thread(target=start)
        starting.start()
        directory = str(tmp_path / "later")
        config = GatewayConfig(directory=directory, port=0, lora_modules=("new=roots/new",))
        # The server has answered that it does not know the module.
        assert process.run(config) == EXIT_CONFIG
        starting.join()


def test_the_model_has_its_name_with_the_first_status_that_has_it(tmp_path: Path) -> None:
    async def main() -> None:
        served = gateway.Gateway(GatewayConfig(directory=str(tmp_path)))
        named = asyncio.create_task(served._wait_for_model())
        for model in ("", "tiny"):
            served.table.set_status(replace(example_of(rq.StatusShown), model=model))
            await served.follower.notify()
            for _ in range(10):
                await asyncio.sleep(0)
            assert named.done() == bool(model)
        assert served.names.base == "tiny"
        await served.client.close()

    asyncio.run(main())


def test_a_refused_key_ends_the_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: Any) -> None:
        raise NotAllowed("the server does not know this key")

    monkeypatch.setattr(async_client, "check_place", refuse)
    page = Progress.share()
    config = GatewayConfig(directory=str(tmp_path), port=0, progress=page.path)
    assert process.run(config) == EXIT_CONFIG
    assert page.reason().endswith("the server does not know this key")


def refuses(gateway: Served) -> bool:
    try:
        gateway.connect().close()
    except ConnectionRefusedError:
        return True
    return False


def test_requests_in_flight_end_before_the_gateway(tmp_path: Path) -> None:
    answers = []
    with StandIn(tmp_path) as controller:
        may_end = threading.Event()
        usual = controller._generate

        def slow(request: Any) -> Any:
            assert may_end.wait(HANG_S)
            return usual(request)

        controller.answers[rq.Generate] = slow
        with serve_gateway(controller) as gateway:
            connection = gateway.connect()
            body = json.dumps({"prompt": "p"}).encode()
            connection.sendall(post_bytes("/v1/completions", body))
            wait_until(lambda: controller.requests(rq.Generate))
            reader = threading.Thread(target=lambda: answers.append(read_all(connection)))
            reader.start()
            # The gateway begins to end when the context does, and the answer follows that.

            def end() -> None:
                wait_until(lambda: refuses(gateway))
                may_end.set()

            ending = threading.Thread(target=end)
            ending.start()
        ending.join(HANG_S)
        reader.join(HANG_S)
        connection.close()
    assert answers[0].startswith(b"HTTP/1.1 200")


def step_of(page: Progress) -> Step:
    step = page.read()
    assert step is not None
    return step


def is_later(page: Progress, than: Step) -> bool:
    return step_of(page).number > than.number


def test_steps_are_reported_while_the_loop_runs(tmp_path: Path) -> None:
    """A supervisor ends a process that reports none for an hour."""
    page = Progress.share()
    with StandIn(tmp_path) as controller:
        with serve_gateway(controller, progress=page, drain_timeout_s=7):
            for _ in range(3):
                first = step_of(page)
                wait_until(partial(is_later, page, first))
                assert (first.name, first.bound_ns) == ("serve", process.STEP_BOUND_S * 10**9)
        # The end takes as long as its requests may take.
        last = step_of(page)
        assert (last.name, last.bound_ns) == ("stop", (7 + process.STEP_BOUND_S) * 10**9)


def test_readers_of_events_do_not_delay_the_end(tmp_path: Path) -> None:
    with StandIn(tmp_path) as controller:
        with serve_gateway(controller, drain_timeout_s=3600) as gateway:
            connection = gateway.connect()
            connection.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
            assert connection.recv(16).startswith(b"HTTP/1.1 200")
        assert read_all(connection).endswith(b"0\r\n\r\n")
        connection.close()


def test_a_head_that_does_not_arrive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "HEAD_TIMEOUT_S", 0.2)
    with StandIn(tmp_path) as controller, serve_gateway(controller) as gateway:
        for data in (b"", b"GET / HTTP/1.1\r\nhost: localhost\r\n"):
            with gateway.connect() as connection:
                connection.sendall(data)
                assert read_all(connection).startswith(b"HTTP/1.1 408")


@pytest.mark.parametrize("early", [b"\r\n", b"GET /version HTTP/1.1\r\n"])
def test_the_time_of_a_head_begins_after_the_answer_before_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, early: bytes
) -> None:
    """A client can send an empty line, or its next request, while it reads an answer."""
    monkeypatch.setattr(process, "HEAD_TIMEOUT_S", 0.2)
    may_end = threading.Event()
    with StandIn(tmp_path) as controller, serve_gateway(controller) as gateway:
        usual = controller._generate

        def slow(request: Any) -> Any:
            assert may_end.wait(HANG_S)
            return usual(request)

        controller.answers[rq.Generate] = slow
        with gateway.connect() as connection:
            body = json.dumps({"prompt": "p", "stream": True}).encode()
            request = post_bytes("/v1/completions", body).replace(b"connection: close\r\n", b"")
            connection.sendall(request)
            wait_until(lambda: controller.requests(rq.Generate))
            connection.sendall(early)
            # The time has passed, because it has for those that came later.
            for _ in range(2):
                assert gateway.raw(b"\r\n").startswith(b"HTTP/1.1 408")
            may_end.set()
            answer, end, refusal = read_all(connection).partition(b"\r\n0\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200")
    assert b"[DONE]" in answer
    assert end
    assert refusal.startswith(b"HTTP/1.1 408")


def test_a_refusal_is_not_written_into_an_answer(tmp_path: Path) -> None:
    with (
        StandIn(tmp_path) as controller,
        serve_gateway(controller) as gateway,
        gateway.connect() as connection,
    ):
        connection.sendall(b"GET /events HTTP/1.1\r\nhost: localhost\r\n\r\n")
        assert connection.recv(16).startswith(b"HTTP/1.1 200")
        connection.sendall(b"GET / HTTP/1.1\r\n" + b"x: y\r\n" * 20_000)
        with suppress(ConnectionResetError):
            assert b"HTTP" not in read_all(connection)


def test_a_client_that_does_not_read_its_answer_loses_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "UNREAD_TIMEOUT_S", 0.2)
    # More than the buffers of both sides hold.
    output = tuple((number, "x" * (1 << 20)) for number in range(16))
    with (
        StandIn(tmp_path, output) as controller,
        serve_gateway(controller) as gateway,
        gateway.connect() as connection,
    ):
        body = json.dumps({"prompt": "p", "stream": True, "max_tokens": 16}).encode()
        connection.sendall(post_bytes("/v1/completions", body))
        wait_until(lambda: controller.requests(rq.Generate))
        wait_until(lambda: gateway.get("/load").json() == {"server_load": 0})
        # What is read now is not the whole.
        with suppress(ConnectionResetError):
            assert b"[DONE]" not in read_all(connection)


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The files of a key and of a certificate for 127.0.0.1."""
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    directory = tmp_path_factory.mktemp("tls")
    key, file = directory / "key.pem", directory / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(file)]
    subprocess.run(command, check=True, capture_output=True)
    return str(key), str(file)


def test_https_with_and_without_certificates_of_clients(tmp_path: Path, certificate: Any) -> None:
    key, file = certificate
    options = {"ssl_keyfile": key, "ssl_certfile": file}
    trusting = ssl.create_default_context(cafile=file)
    with StandIn(tmp_path) as controller:
        with serve_gateway(controller, verify=trusting, **options) as gateway:
            assert gateway.get("/version").status_code == 200
            with pytest.raises(httpx.ConnectError):
                httpx.get(f"{gateway.url}/version")
        known = ssl.create_default_context(cafile=file)
        known.load_cert_chain(file, key)
        more = {**options, "ssl_ca_certs": file}
        with serve_gateway(controller, verify=known, **more) as gateway:
            assert gateway.get("/version").status_code == 200
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{gateway.url}/version", verify=trusting)
