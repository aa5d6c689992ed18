"""Engines on other machines: they need a key, and their process ids mean nothing here."""

import subprocess
import sys
from pathlib import Path

from loradock.cli.exit_codes import ExitCode
from loradock.messages import commands, reports
from loradock.messages.records import EngineLost
from loradock.messages.wire import COMMANDS, REPORTS
from loradock.processes.key_files import read_key_pair
from tests.support.parallel.processes import controller
from tests.support.simulation.command_runs import run
from tests.support.simulation.key_examples import allow, server_key
from tests.support.simulation.remote_examples import Remote, engine_address, free_address
from tests.support.simulation.shell_examples import RawClient, logged
from tests.support.waiting import HANG_S, wait_until


def test_a_remote_engine_is_attached_with_the_key_of_an_engine(tmp_path: Path) -> None:
    directory, address = tmp_path / "d", free_address()
    allow(directory, "client", "read")
    key = read_key_pair(allow(directory, "far", "engine"))
    with (
        controller(directory, listen=address) as process,
        Remote(engine_address(address), key, server_key(directory)) as engine,
    ):
        engine.connect()
        frame = REPORTS.encode(reports.EngineInventory("far", process.pid, "m", 3, 8 << 20))
        engine.socket.send(frame)
        assert engine.socket.poll(HANG_S * 1000), "no request for an inventory"
        assert isinstance(COMMANDS.decode(engine.socket.recv()).message, commands.RequestInventory)
        process.stop()


def answer(engine: Remote, engine_id: str, pid: int) -> None:
    """Answer a request for the inventory of a remote engine, which is then attached."""
    request = COMMANDS.decode(engine.socket.recv())
    while not isinstance(request.message, commands.RequestInventory):
        request = COMMANDS.decode(engine.socket.recv())
    inventory = reports.EngineInventory(engine_id, pid, "m", 3, 8 << 20, answers=request.seq)
    engine.socket.send(REPORTS.encode(inventory, request.epoch))


def test_a_process_with_the_id_of_a_remote_engine_has_nothing_to_do_with_it(
    tmp_path: Path,
) -> None:
    directory, address = tmp_path / "d", free_address()
    allow(directory, "client", "read")
    key = read_key_pair(allow(directory, "far", "engine"))
    other = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    with (
        controller(directory, listen=address),
        Remote(engine_address(address), key, server_key(directory)) as engine,
        RawClient(directory) as client,
    ):
        engine.connect()
        introduced = reports.EngineInventory("far", other.pid, "m", 3, 8 << 20)
        engine.socket.send(REPORTS.encode(introduced))
        answer(engine, "far", other.pid)
        wait_until(lambda: client.status().engine_id == "far")
        assert client.status().engine_pid == 0
        refused = run("engine", "restart", directory=directory)
        assert refused.exit_code == ExitCode.USAGE
        assert "on another machine" in refused.stderr
        assert other.poll() is None, "the command has ended an unrelated process"
        other.communicate(b"\n")
        # The end of a process that is watched is read in the same iteration as these requests.
        for _ in range(3):
            assert client.status().engine_id == "far"
        assert not [one for one in logged(directory) if isinstance(one, EngineLost)]
