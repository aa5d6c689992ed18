"""The files of `deploy/`: they parse, and name metrics, paths and options that exist."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from typer.main import get_command

from loradock.cli.main import app
from loradock.fleet.setup import Member, etcd_command
from tests.support.gateway.served import Served
from tests.support.sources import LINKED

DEPLOY = Path(__file__).parents[2] / "deploy"
TRUE = shutil.which("true")
METRIC = re.compile(r"\b((?:loradock_|vllm:)\w+)")


def joined_lines(name: Any) -> Any:
    """Return a file's lines, those that a backslash continues as one, without comments."""
    lines = (DEPLOY / name).read_text().replace("\\\n", " ").splitlines()
    return [line for line in lines if not line.lstrip().startswith("#")]


def entrypoint() -> Any:
    [line] = [line for line in joined_lines("Dockerfile") if line.startswith("ENTRYPOINT")]
    return json.loads(line.removeprefix("ENTRYPOINT"))


def pod() -> Any:
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/loradock.yaml").read_text()))
    [found] = [one["spec"]["template"] for one in documents if one["kind"] == "StatefulSet"]
    return found


def fleet() -> Any:
    return list(yaml.safe_load_all((DEPLOY / "kubernetes/fleet.yaml").read_text()))


def container(kind: str, name: str) -> Any:
    [found] = [one for one in fleet() if (one["kind"], one["metadata"]["name"]) == (kind, name)]
    return found["spec"]["template"]["spec"]["containers"][0]


def unit(name: Any) -> Any:
    [line] = [line for line in joined_lines(f"systemd/{name}") if line.startswith("ExecStart=")]
    return shlex.split(line.removeprefix("ExecStart=").replace("%i", "8001"))


COMMANDS = {
    "Dockerfile": entrypoint,
    "kubernetes": lambda: [*entrypoint(), *pod()["spec"]["containers"][0]["args"]],
    "service": lambda: unit("loradock.service"),
    "gateway": lambda: unit("loradock-gateway@.service"),
    "front": lambda: unit("loradock-front.service"),
    "dock": lambda: [*entrypoint(), *container("StatefulSet", "loradock")["args"]],
    "picker": lambda: container("Deployment", "loradock-picker")["command"],
}


@pytest.mark.parametrize("name", COMMANDS)
def test_commands_are_accepted(name: Any) -> None:
    command_of: Any = COMMANDS[name]
    program, *arguments = command_of()
    assert Path(program).name == "loradock"
    root: Any = get_command(app)
    context: Any = root.make_context(program, arguments)
    words = [*context._protected_args, *context.args]
    command, rest = words[0], words[1:]
    # An unknown option or a wrong value raises.
    found, parent = root.commands[command], context
    while rest and rest[0] in getattr(found, "commands", {}):
        parent = found.make_context(command, rest, parent=parent)
        command, *rest = rest
        found = found.commands[command]
    found.make_context(command, rest, parent=parent)


def expressions() -> Iterator[Any]:
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            yield rule["expr"]
    dashboard = json.loads((DEPLOY / "grafana/loradock.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_alerts_and_dashboard_use_metrics_that_are_exposed(served: Served) -> None:
    exposed = set(re.findall(r"^# TYPE (\S+)", served.get("/metrics").text, re.M))
    suffixes = ("", "_bucket", "_count", "_sum")
    names = {name + suffix for name in exposed for suffix in suffixes}
    used = {name for text in expressions() for name in METRIC.findall(text)}
    assert len(used) > 15
    assert used - names == set()


def test_the_image_has_all_that_the_package_is_built_from() -> None:
    copied: dict[str, str] = {}
    for line in joined_lines("Dockerfile"):
        if line.startswith("COPY "):
            *sources, target = line.split()[1:]
            copied |= dict.fromkeys(sources, target)
    assert all((DEPLOY.parent / source).exists() for source in copied)
    project = tomllib.loads((DEPLOY.parent / "pyproject.toml").read_text())
    packages = ("loradock", *LINKED)
    files = [project["project"]["readme"], *project["project"]["license-files"]]
    needed = {*packages, *files, "pyproject.toml", "setup.py"}
    # The example that a wheel has.
    assert {*needed, "examples/tiny"} <= copied.keys()


def test_the_image_is_built_from_what_it_copies_alone() -> None:
    kept = re.findall(r"^!(.*)$", (DEPLOY.parent / ".dockerignore").read_text(), re.M)
    copied = [line.split()[1:-1] for line in joined_lines("Dockerfile") if line.startswith("COPY ")]
    assert sorted(kept) == sorted(source for sources in copied for source in sources)


def test_the_steps_make_the_user_and_the_files_of_the_unit() -> None:
    steps = (DEPLOY / "README.md").read_text()
    lines = [line for line in joined_lines("systemd/loradock.service") if "=" in line]
    options = dict(line.split("=", 1) for line in lines)
    words = unit("loradock.service")
    environment = Path(words[0]).parent.parent
    for step in (
        f"useradd --system --home-dir /var/lib/{options['StateDirectory']} .* {options['User']}",
        f"python3 -m venv {environment}",
        f"cp -r .* {words[words.index('--model') + 1]}",
        f"cp -r .* {words[words.index('--adapter-root') + 1]}",
        f"install -m 0600 /dev/null {options['EnvironmentFile']}",
        f"{words[0]} --dir {words[words.index('--dir') + 1]} ready",
    ):
        assert re.search(rf"^\$ .*{step}", steps, re.M), step


def test_systemd_accepts_the_units(tmp_path: Path) -> None:
    command = shutil.which("systemd-analyze")
    if command is None:
        pytest.skip("systemd-analyze is not installed; it is in Debian's package systemd")
    # The command's path is that of another machine, and a template needs an instance.
    for file in (DEPLOY / "systemd").iterdir():
        name = file.name.replace("@.", "@8001.")
        (tmp_path / name).write_text(
            file.read_text().replace("/opt/loradock/bin/loradock", str(TRUE))
        )
    units = sorted(tmp_path.iterdir())
    result = subprocess.run(
        [command, "verify", "--man=no", *units], capture_output=True, text=True, check=False
    )
    assert (result.returncode, len(units)) == (0, 3), result.stderr
    assert not [line for line in result.stderr.splitlines() if "loradock" in line]


def test_kubernetes_accepts_the_manifest() -> None:
    checker = pytest.importorskip("kubernetes_validate", reason="see `make manifests`")
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/loradock.yaml").read_text()))
    for document in [*documents, *fleet()]:
        # A kind of the Inference Extension is not among the schemas: the next test has it.
        if document["kind"] != "InferencePool":
            checker.validate(document, "1.31", strict=True)
    # The image's user.
    [line] = [line for line in joined_lines("Dockerfile") if line.startswith("USER ")]
    assert pod()["spec"]["securityContext"]["runAsUser"] == int(line.split()[1])


def test_the_pool_of_the_fleet_names_its_docks_and_its_picker() -> None:
    [pool] = [one for one in fleet() if one["kind"] == "InferencePool"]
    assert pool["spec"].keys() == {"selector", "targetPorts", "endpointPickerRef"}
    [docks] = [one for one in fleet() if one["metadata"]["name"] == "loradock" and one != pool]
    labels = docks["spec"]["template"]["metadata"]["labels"]
    assert pool["spec"]["selector"]["matchLabels"] == labels
    ports = container("StatefulSet", "loradock")["ports"]
    assert [one["number"] for one in pool["spec"]["targetPorts"]] == [ports[0]["containerPort"]]
    picker = pool["spec"]["endpointPickerRef"]
    [service] = [
        one
        for one in fleet()
        if (one["kind"], one["metadata"]["name"]) == ("Service", picker["name"])
    ]
    assert service["spec"]["ports"][0]["port"] == picker["port"]["number"]
    # The etcd of the manifest is the one that `fleet init` writes.
    members = [Member(f"etcd-{number}.etcd", 2379) for number in range(3)]
    own, keys = members[0], Path("/etc/loradock")
    command = etcd_command(members, own, keys, Path("/var/lib/etcd/data"), "t")
    flags = {word.partition("=")[0] for word in command[1:]} - {"--initial-cluster-token"}
    written = container("StatefulSet", "etcd")["command"][1:]
    assert {word.partition("=")[0] for word in written} == flags


def promtool(*arguments: Any, **options: Any) -> Any:
    """Run Prometheus' own checker; skips the test where it is not installed."""
    command = shutil.which("promtool")
    if command is None:
        pytest.skip("promtool is not installed; it is in Debian's package prometheus")
    return subprocess.run(
        [command, *arguments], capture_output=True, text=True, check=False, **options
    )


RAY = """
def remote(**options):
    assert options == {"num_gpus": 1, "max_restarts": -1, "max_task_retries": -1}
    class Method:
        def __init__(self, call): self.remote = call
    def actor(cls):
        made = cls()
        made.serve = Method(made.serve)
        cls.remote = lambda: made
        return cls
    return actor
class util:
    get_node_ip_address = staticmethod(lambda: "127.0.0.1")
def init(): pass
def get(_): pass
"""


def test_ray_starts_docks_with_the_command_and_places_them_anew(tmp_path: Path) -> None:
    (tmp_path / "ray.py").write_text(RAY)
    shown = tmp_path / "shown"
    dock = [sys.executable, "-c", f"import sys; open({str(shown)!r}, 'w').write(repr(sys.argv))"]
    script = tmp_path / "dock"
    script.write_text(f'#!/bin/sh\nexec {shlex.join(dock)} "$@"\n')
    script.chmod(0o700)
    command = [
        sys.executable,
        str(DEPLOY / "ray/docks.py"),
        "1",
        str(script),
        "serve",
        "--join",
        "f",
    ]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    # The actor ends with its dock.
    assert (done.returncode, done.stderr) == (1, "")
    _, option, _, *rest, address = ast.literal_eval(shown.read_text())
    assert (option, rest) == ("--dir", ["serve", "--join", "f", "--http"])
    assert address.startswith("127.0.0.1:")


def test_prometheus_accepts_the_alert_rules() -> None:
    result = promtool("check", "rules", str(DEPLOY / "prometheus/alerts.yaml"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_the_scrape_configuration() -> None:
    result = promtool("check", "config", str(DEPLOY / "prometheus/prometheus.yml"))
    assert result.returncode == 0, result.stdout + result.stderr


FIRING = {
    "LoradockDown": 'up{job="pods", instance="a"} 1x5 0x10 | loradock_synced{job="pods", '
    'instance="a"} 1x5 _x10',
    "LoradockNotReady": 'loradock_ready{instance="a"} 0x15',
    "LoradockLogNotWritable": 'loradock_log_writable{instance="a"} 0x15',
    "LoradockDiskFilling": 'loradock_disk_free_bytes{instance="a"} 5e8x15',
    "LoradockEngineDown": 'loradock_engine_up{instance="a"} 0x15',
}
"""An alert -> the series, one value a minute, with which it fires after a quarter of an hour."""


@pytest.mark.parametrize("alert", FIRING)
def test_an_alert_fires(tmp_path: Path, alert: str) -> None:
    given = [one.rsplit("} ", 1) for one in FIRING[alert].split(" | ")]
    series = [{"series": f"{name}}}", "values": values} for name, values in given]
    expr = f'count by (alertname) (ALERTS{{alertname="{alert}", alertstate="firing"}})'
    expected = [{"labels": f'{{alertname="{alert}"}}', "value": 1}]
    test = {
        "interval": "1m",
        "input_series": series,
        "promql_expr_test": [{"expr": expr, "eval_time": "15m", "exp_samples": expected}],
    }
    rules = str(DEPLOY / "prometheus/alerts.yaml")
    (tmp_path / "test.yaml").write_text(yaml.safe_dump({"rule_files": [rules], "tests": [test]}))
    result = promtool("test", "rules", str(tmp_path / "test.yaml"))
    assert result.returncode == 0, result.stdout + result.stderr


def test_prometheus_accepts_the_metrics(served: Served) -> None:
    served.post("/v1/completions", {"model": "upper", "prompt": "p"})
    result = promtool("check", "metrics", input=served.get("/metrics").text)
    # A colon is what it complains of in the names that are vLLM's; 3: there are complaints.
    complaints = [line for line in result.stderr.splitlines() if not line.startswith("vllm:")]
    assert (complaints, result.returncode in (0, 3)) == ([], True)


def test_expressions_have_balanced_brackets() -> None:
    for text in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing), text


def test_probes_are_public_endpoints(served: Served) -> None:
    [container] = pod()["spec"]["containers"]
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    for path in [probe["httpGet"]["path"] for probe in probes]:
        assert "security" not in served.get("/openapi.json").json()["paths"][path]["get"]
    assert pod()["metadata"]["annotations"]["prometheus.io/path"] == "/metrics"
