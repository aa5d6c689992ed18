"""Tests of the controller's directory, its socket paths, and whether it is served."""

import asyncio
import contextlib
import socket
import threading

import pytest

from loradock.client import AsyncClient, Client, sockets
from loradock.client.sockets import (
    connection_to,
    runtime_directory,
    silence_reason,
    unserved_reason,
)
from loradock.messages.addresses import SOCKET_PATH_BYTES_MAX, endpoint
from loradock.messages.errors import EngineGone
from tests.support.simulation.standin_controller import StandIn
from tests.support.waiting import HANG_S


def test_the_directory_is_the_argument_or_the_variable_or_the_default(monkeypatch, tmp_path):
    monkeypatch.delenv("LORADOCK_DIR", raising=False)
    assert str(runtime_directory()) == ".loradock"
    monkeypatch.setenv("LORADOCK_DIR", str(tmp_path))
    assert runtime_directory() == tmp_path
    assert str(runtime_directory("elsewhere")) == "elsewhere"
    assert connection_to(tmp_path).events == f"ipc://{tmp_path}/run/events.sock"


def test_a_socket_path_that_is_too_long_is_refused(tmp_path):
    longest = "d" * (SOCKET_PATH_BYTES_MAX - len("/run/requests.sock"))
    assert endpoint(runtime_directory(longest), "requests.sock")
    with pytest.raises(ValueError, match=r"has 108 bytes and Unix allows 107.*shorter"):
        Client(longest + "d")


def test_a_directory_is_served_while_a_controller_listens(tmp_path):
    assert unserved_reason(connection_to(tmp_path)) == "no socket there"
    with StandIn(tmp_path):
        assert not unserved_reason(connection_to(tmp_path))
    assert unserved_reason(connection_to(tmp_path)) == "nothing listens on its socket"
    silence = silence_reason(connection_to(tmp_path))
    assert silence.startswith(f"no LoRADock server answers at {tmp_path} (nothing listens")
    assert f"start one: loradock --dir {tmp_path} serve" in silence
    (tmp_path / "file").touch()
    assert unserved_reason(connection_to(tmp_path / "file")) == "Not a directory"


def test_clients_refuse_a_directory_of_other_files_at_once(tmp_path):
    (tmp_path / "adapter_config.json").touch()
    with pytest.raises(EngineGone, match=f"no LoRADock server answers at {tmp_path}"):
        Client(tmp_path)

    async def open_client() -> None:
        async with AsyncClient(tmp_path):
            pass

    with pytest.raises(EngineGone, match=f"no LoRADock server answers at {tmp_path}"):
        asyncio.run(open_client())


def test_clients_wait_for_the_files_of_a_first_start_and_then_refuse(monkeypatch, tmp_path):
    monkeypatch.setattr(sockets, "FIRST_START_S", 0.05)
    for absent in (tmp_path, tmp_path / "none"):
        with pytest.raises(EngineGone, match=f"no LoRADock server answers at {absent} .*start one"):
            Client(absent)
    monkeypatch.setattr(sockets, "FIRST_START_S", HANG_S)
    begin = threading.Timer(0.1, (tmp_path / "none" / "run").mkdir, kwargs={"parents": True})
    begin.start()
    Client(tmp_path / "none").close()
    begin.join()


def test_a_listener_with_a_full_queue_serves_its_directory(tmp_path):
    (tmp_path / "run").mkdir()
    with socket.socket(socket.AF_UNIX) as listener, contextlib.ExitStack() as connections:
        listener.bind(str(tmp_path / "run" / "requests.sock"))
        listener.listen(0)
        for _ in range(2):
            connection = connections.enter_context(socket.socket(socket.AF_UNIX))
            connection.setblocking(False)
            with contextlib.suppress(BlockingIOError):
                connection.connect(listener.getsockname())
        assert not unserved_reason(connection_to(tmp_path))
