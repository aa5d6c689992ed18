"""The files of `deploy/`: they parse, and name metrics, paths and options that exist."""

import json
import re
from pathlib import Path

import pytest
import yaml
from typer.main import get_command

from controller.cli.main import app

DEPLOY = Path(__file__).parents[2] / "deploy"
METRIC = re.compile(r"\b((?:loradock_|vllm:)\w+)")
COMMANDS = {
    "Dockerfile": "serve",
    "systemd/loradock.service": "serve",
    "systemd/loradock-gateway@.service": "gateway",
    "kubernetes/loradock.yaml": "serve",
}


def options_of(command):
    root = get_command(app)
    options = [*root.params, *root.commands[command].params]
    return {name for option in options for name in (*option.opts, *option.secondary_opts)}


@pytest.mark.parametrize(("name", "command"), COMMANDS.items())
def test_commands_have_these_options(name, command):
    text = (DEPLOY / name).read_text()
    if name == "Dockerfile":
        text = text.partition("ENTRYPOINT")[2]
    lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
    used = set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", "\n".join(lines)))
    assert used
    assert used <= options_of(command)


def expressions():
    alerts = yaml.safe_load((DEPLOY / "prometheus/alerts.yaml").read_text())
    for group in alerts["groups"]:
        for rule in group["rules"]:
            assert rule["annotations"]["summary"]
            yield rule["expr"]
    dashboard = json.loads((DEPLOY / "grafana/loradock.json").read_text())
    for panel in dashboard["panels"]:
        for target in panel["targets"]:
            yield target["expr"]


def test_alerts_and_dashboard_use_metrics_that_are_exposed(served):
    exposed = set(re.findall(r"^# TYPE (\S+)", served.get("/metrics").text, re.M))
    suffixes = ("", "_bucket", "_count", "_sum")
    names = {name + suffix for name in exposed for suffix in suffixes}
    used = {name for text in expressions() for name in METRIC.findall(text)}
    assert len(used) > 15
    assert used - names == set()


def test_expressions_have_balanced_brackets():
    for text in expressions():
        for opening, closing in ("()", "[]", "{}"):
            assert text.count(opening) == text.count(closing), text


def test_probes_are_public_endpoints(served):
    documents = list(yaml.safe_load_all((DEPLOY / "kubernetes/loradock.yaml").read_text()))
    [pod] = [one["spec"]["template"] for one in documents if one["kind"] == "StatefulSet"]
    [container] = pod["spec"]["containers"]
    probes = [container[f"{name}Probe"] for name in ("startup", "readiness", "liveness")]
    for path in [probe["httpGet"]["path"] for probe in probes]:
        assert "security" not in served.get("/openapi.json").json()["paths"][path]["get"]
    assert pod["metadata"]["annotations"]["prometheus.io/path"] == "/metrics"
