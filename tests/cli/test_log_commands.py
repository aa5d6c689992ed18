"""Tests of `serve`'s options, and of `replay`, `log verify` and `log repair`."""

import json

import msgspec
import pytest
from typer.testing import CliRunner

from loradock.cli import serve
from loradock.cli.exit_codes import ExitCode
from loradock.cli.main import app
from loradock.controller.core.controller import Controller
from loradock.controller.core.limits import RULES, SLOT_QUANTUM_MS, Limits, limits_to
from loradock.controller.log.segments import segment_paths
from loradock.controller.log.writer import Log
from loradock.controller.server import supervisor
from loradock.controller.server.config import ServeConfig, ServerConfig
from loradock.gateway.options import GatewayConfig
from loradock.messages.engine_options import EngineOptions
from loradock.messages.records import FORMAT, ControllerStarted, Header, Record
from loradock.messages.requests import LoadAdapter
from loradock.processes.subprocesses import python_arguments
from tests.support.plain_logs import reset_logs
from tests.support.simulation.log_examples import flip

LIMITS = Limits(slots_max=2, host_adapters_max=4)


def run(*arguments, directory):
    return CliRunner().invoke(app, ["--dir", str(directory), *arguments])


# serve


@pytest.fixture
def started(monkeypatch):
    """The configurations with which `serve` was called; it returns `started.status`."""

    class Started(list):
        status = 0

        def serve(self, config):
            self.append(config)
            return supervisor.Ended(self.status, "a reason" if self.status else "")

    calls = Started()
    monkeypatch.setattr(supervisor, "serve", calls.serve)
    monkeypatch.setattr(serve, "_check_start", lambda *_: None)
    yield calls
    reset_logs()


def test_serve_starts_with_the_defaults_of_the_server(started, tmp_path):
    result = run("serve", "--model", "m", directory=tmp_path)
    assert result.exit_code == 0, result.output
    assert started == [ServeConfig(ServerConfig(str(tmp_path), SERVED), "m")]


SERVED = Limits(slot_quantum_ms=SLOT_QUANTUM_MS)
OPTIONS = {
    "--slots": "3",
    "--host-adapters": "5",
    "--host-bytes": "6MiB",
    "--pinned-bytes": "7KiB",
    "--device-bytes": "1.5GiB",
    "--known-adapters": "11",
    "--requests": "12",
    "--answers": "13",
    "--answers-per-client": "15",
    "--answers-kept": "5.5",
    "--request-timeout": "1.5",
    "--generation-timeout": "2.5",
    "--operation-timeout": "3.5",
    "--rest": "4.5",
    "--digest-interval": "14",
    "--slot-quantum": "0.5",
    "--sync": "interval",
    "--sync-interval": "0.25",
    "--segment-bytes": "2MiB",
    "--snapshot-interval": "15",
    "--log-retention": "keep",
    "--log-keep-hours": "16",
    "--engine-timeout": "4",
    "--hang-timeout": "0.35",
    "--step-timeout": "5",
    "--policy": "lru",
    "--model": "m",
    "--adapter-root": "a",
    "--engine": "external",
    "--tensor-parallel-size": "2",
    "--listen": "tcp://127.0.0.1:4711",
    "--log-format": "json",
    "--log-level": "warning",
    "--http": "0.0.0.0:80",
    "--api-key": "secret",
}


def test_every_bound_is_an_option(started, tmp_path):
    limits = Limits(
        slots_max=3,
        host_adapters_max=5,
        host_bytes_max=6 << 20,
        pinned_bytes_max=7 << 10,
        device_bytes_max=3 << 29,
        known_adapters_max=11,
        requests_max=12,
        answers_max=13,
        answers_per_client_max=15,
        answers_kept_ms=5500,
        request_timeout_ms=1500,
        generation_timeout_ms=2500,
        operation_timeout_ms=3500,
        rest_ms=4500,
        digest_interval=14,
        slot_quantum_ms=500,
    )
    server = ServerConfig(
        *(str(tmp_path), limits, "lru", "interval", 250, 2 << 20, 4000, True),
        *("tcp://127.0.0.1:4711", {"image": "x=y"}, 15, "keep", 16, (("n", "p=q"),)),
    )
    defaults = ServeConfig(ServerConfig(""))
    arguments = [word for option in OPTIONS.items() for word in option]
    arguments += ["--adapter-root", "b", "--checked", "--max-lora-rank", "64"]
    arguments += ["--default-mm-lora", "image=x=y", "--adapter", "n=p=q"]
    result = run("serve", *arguments, directory=tmp_path)
    assert result.exit_code == 0, result.output
    options = EngineOptions(max_lora_rank=64, default_mm_loras=("image=x=y",))
    gateway = GatewayConfig(
        directory=str(tmp_path),
        log_format="json",
        host="0.0.0.0",
        port=80,
        model="m",
        api_keys=("secret",),
        adapter_roots=("a", "b"),
    )
    assert started == [
        ServeConfig(
            *(server, "m", ("a", "b"), "external", options, 2),
            hang_timeout_ms=350,
            step_timeout_ms=5000,
            log_format="json",
            log_level="warning",
            gateway=(*python_arguments("gateway"), msgspec.json.encode(gateway).decode()),
        )
    ]
    for changed, default in ((limits, Limits()), (server, defaults.server), (started[0], defaults)):
        for name in changed.__struct_fields__:
            only_one = name == "policy"
            assert only_one or getattr(changed, name) != getattr(default, name), name


def test_every_option_can_be_in_a_file(started, tmp_path):
    repeated = {"adapter-root": ["a", "b"], "default-mm-lora": ["image=x=y"], "adapter": ["n=p=q"]}
    values = {name.removeprefix("--"): text for name, text in OPTIONS.items()} | repeated
    lines = [f"{name} = {json.dumps(value)}" for name, value in values.items()]
    file = tmp_path / "serve.toml"
    file.write_text("\n".join([*lines, "checked = true", "max_lora_rank = 64", ""]))
    in_file = run("serve", "--config", str(file), directory=tmp_path)
    assert in_file.exit_code == 0, in_file.output
    words = [word for option in OPTIONS.items() for word in option]
    words += ["--adapter-root", "b", "--default-mm-lora", "image=x=y", "--adapter", "n=p=q"]
    words += ["--checked", "--max-lora-rank", "64"]
    assert run("serve", *words, directory=tmp_path).exit_code == 0
    assert started[0] == started[1]
    # The command line precedes the file.
    assert run("serve", "--config", str(file), "--slots", "4", directory=tmp_path).exit_code == 0
    assert started[2].server.limits.slots_max == 4


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("slot = 3", "'slot' is no option; did you mean 'slots'?"),
        ("nothing-like-it = 3", "is no option; `loradock serve --help` lists them"),
        ('dir = "d"', "the directory is named before the command"),
        ("[slots]", "'slots' is a table; a value is needed"),
        ("slots = ", "is not TOML"),
        ("slots = 0", "'--slots'"),
        ('host-bytes = "64M"', "use KiB, MiB"),
    ],
)
def test_a_wrong_file_is_explained(started, tmp_path, text, problem):
    file = tmp_path / "serve.toml"
    file.write_text(text + "\n")
    result = run("serve", "--model", "m", "--config", str(file), directory=tmp_path)
    assert result.exit_code == ExitCode.USAGE
    assert problem in " ".join(result.stderr.split())
    assert started == []
    missing = run("serve", "--config", str(tmp_path / "no.toml"), directory=tmp_path)
    assert "no.toml: No such file or directory" in missing.stderr


def test_serve_prints_its_configuration_as_json_and_exits_like_its_children(started, tmp_path):
    result = run("serve", "--model", "m", "--json", directory=tmp_path)
    assert json.loads(result.stdout)["server"]["limits"] == limits_to(SERVED)
    for status, exit_code in ((7, ExitCode.LOG), (2, ExitCode.USAGE), (99, ExitCode.FAILURE)):
        started.status = status
        result = run("serve", "--model", "m", "--json", directory=tmp_path)
        assert result.exit_code == exit_code
        assert json.loads(result.stderr.splitlines()[-1])["error"]["exit"] == exit_code


# replay, log verify, log repair


def write_log(directory, count, digests=True):
    """Write a log of `count` loads, each with the digest of the world before it."""
    controller = Controller(LIMITS, "lru")
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    with Log.open(directory / "log", header) as log:
        for number in range(1, count + 1):
            load = LoadAdapter(f"r-{number}", f"adapter-{number}")
            message = ControllerStarted(1) if number == 1 else load
            digest = controller.world.digest() if digests else "no such digest"
            log.append([Record(number, message, digest)], epoch=1)
            controller.handle(message, number)
    return controller


def test_replay_shows_the_adapters_and_compares_digests(tmp_path):
    controller = write_log(tmp_path, 5)
    person = run("replay", directory=tmp_path)
    assert person.exit_code == 0, person.output
    assert "adapter-2" in person.stdout
    for arguments in ((), (str(tmp_path),)):
        result = run("replay", *arguments, "--checked", "--json", directory=tmp_path)
        document = json.loads(result.stdout)
        assert document["digest"] == controller.world.digest()
        assert (document["inputs"], document["digests_compared"]) == (5, 5)
        assert document["divergence"] is None
        names = [view["adapter"] for view in document["adapters"]]
        assert names == [f"adapter-{number}" for number in range(2, 6)]


def test_replay_shows_an_earlier_moment(tmp_path):
    write_log(tmp_path, 5)
    document = json.loads(run("replay", "--until", "3", "--json", directory=tmp_path).stdout)
    assert document["inputs"] == 3
    assert [view["adapter"] for view in document["adapters"]] == ["adapter-2", "adapter-3"]


def test_replay_ends_with_a_divergence(tmp_path):
    write_log(tmp_path, 5, digests=False)
    result = run("replay", "--json", directory=tmp_path)
    assert result.exit_code == ExitCode.LOG
    assert json.loads(result.stdout)["divergence"]["seq"] == 1
    assert "before record 1 the digest was no such digest" in result.stderr


def test_an_intact_log_is_verified(tmp_path):
    write_log(tmp_path, 5)
    assert run("log", "verify", directory=tmp_path).exit_code == 0
    document = json.loads(run("log", "verify", "--json", directory=tmp_path).stdout)
    assert (document["records"], document["last_seq"], document["corruption"]) == (5, 5, None)
    repair = run("log", "repair", "--yes", "--json", directory=tmp_path)
    assert json.loads(repair.stdout) == {"corrupt": False, "repaired": False}
    assert repair.exit_code == 0


def corruption(directory):
    """Flip a bit in the middle of a log's only segment."""
    write_log(directory, 8)
    (path,) = segment_paths(directory / "log")
    flip(path, path.stat().st_size // 2)


def test_corruption_is_reported_and_cut_only_on_request(tmp_path):
    corruption(tmp_path)
    checked = run("log", "verify", "--json", directory=tmp_path)
    assert checked.exit_code == ExitCode.LOG
    seq = json.loads(checked.stdout)["corruption"]["seq"]
    assert run("replay", directory=tmp_path).exit_code == ExitCode.LOG

    plan = run("log", "repair", "--json", directory=tmp_path)
    assert plan.exit_code == ExitCode.LOG
    assert "cuts the log" in plan.stderr
    document = json.loads(plan.stdout)
    assert (document["corrupt"], document["repaired"], document["seq"]) == (True, False, seq)
    assert document["action"] == "cut"
    assert document["lost_bytes"] > 0
    assert run("log", "verify", directory=tmp_path).exit_code == ExitCode.LOG

    done = run("log", "repair", "--yes", "--json", directory=tmp_path)
    assert done.exit_code == 0
    document = json.loads(done.stdout)
    assert (document["corrupt"], document["repaired"]) == (False, True)
    verified = json.loads(run("log", "verify", "--json", directory=tmp_path).stdout)
    assert (verified["corruption"], verified["last_seq"]) == (None, seq - 1)
    assert list((tmp_path / "log").glob("*.corrupt"))


def test_a_log_in_use_is_not_repaired(tmp_path):
    corruption(tmp_path)
    header = Header(FORMAT, RULES, "lru", limits_to(LIMITS), 0)
    other = tmp_path / "other"
    with Log.open(other / "log", header):
        result = run("log", "repair", "--yes", directory=other)
    assert result.exit_code == ExitCode.REFUSED
    assert "another process writes this log" in result.stderr


@pytest.mark.parametrize("arguments", [("replay",), ("log", "verify"), ("log", "repair")])
def test_a_directory_without_a_log_is_an_error(tmp_path, arguments):
    result = run(*arguments, directory=tmp_path)
    assert result.exit_code == ExitCode.NOT_FOUND
    assert "there is no log at" in result.stderr
    assert "Traceback" not in result.output
