"""The recipes of CONTRIBUTING.md: their code is run, and what it makes is used."""

import json
import re
import sys
import tomllib
import types
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from loradock.cli.context import Settings
from loradock.controller.core.controller import Controller
from loradock.controller.core.eviction import POLICIES
from loradock.controller.core.limits import RULES, Limits, limits_to
from loradock.controller.core.rankings import Fifo
from loradock.controller.log import policies
from loradock.controller.log.format import LogForeign
from loradock.controller.log.policies import PolicyUnknownError, check_policy, known_policies
from loradock.controller.log.replay import replay
from loradock.controller.log.writer import Log
from loradock.engine.kernels import choose_kernels
from loradock.engine.layers import WRAPPERS, wrapper_of
from loradock.engine.punica import LoRAMapping, PunicaWrapper
from loradock.engine.residency.arena import Arena
from loradock.engine.residency.staging import ModuleShape
from loradock.messages.records import FORMAT, ControllerStarted, Header, Record
from loradock.testing import check_eviction_policy
from tests.support.simulation.deployment import WrongRanking
from tests.support.simulation.standin_controller import StandIn
from tests.support.sources import ROOT


def blocks(title: str, language: str = "python") -> list[str]:
    """Return the blocks of code below a title of the document."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    section = re.split(r"^## ", text, flags=re.M)
    [found] = [part for part in section if part.startswith(title)]
    return re.findall(rf"```{language}\n(.*?)```", found, flags=re.S)


def made_by(title: str) -> dict[str, Any]:
    """Run the code below a title; return its names."""
    names: dict[str, Any] = {"__name__": "recipe"}
    for block in blocks(title):
        exec(block, names)
    return names


@pytest.fixture
def plugin(monkeypatch: pytest.MonkeyPatch) -> str:
    """The policy of the recipe, installed as its entry point states; its name."""
    [text] = blocks("An eviction policy", "toml")
    [(name, value)] = tomllib.loads(text)["project"]["entry-points"]["loradock.policies"].items()
    name_of_module, _, function = value.partition(":")
    module = types.ModuleType(name_of_module)
    setattr(module, function, made_by("An eviction policy")[function])
    monkeypatch.setitem(sys.modules, name_of_module, module)
    installed = EntryPoints([EntryPoint(name, value, policies.POLICY_GROUP)])
    monkeypatch.setattr(policies, "entry_points", installed.select)
    yield name
    POLICIES.pop(name, None)


def test_a_log_of_a_plugins_policy_is_replayed_with_it_only(
    plugin: str, tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert known_policies() == sorted({*POLICIES, plugin})
    check_policy(plugin)
    header = Header(FORMAT, RULES, plugin, limits_to(Limits()), 0)
    digest = Controller(Limits(), plugin).world.digest()
    with Log(tmp_path, header) as log:
        log.append([Record(1, ControllerStarted(1), digest)], epoch=1)
    del POLICIES[plugin]
    assert replay(tmp_path).controller.policy_name == plugin
    del POLICIES[plugin]
    monkeypatch.setattr(policies, "entry_points", lambda **only: EntryPoints())
    with pytest.raises(
        LogForeign, match="'least-used' is not installed; known are adaptive, cheapest-first"
    ):
        replay(tmp_path)


@pytest.mark.parametrize(
    "value", ["missing_module:f", "json:missing", "json:__name__", "json:JSONDecoder"]
)
def test_a_plugin_that_can_not_be_used_is_refused(
    value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    installed = EntryPoints([EntryPoint("broken", value, policies.POLICY_GROUP)])
    monkeypatch.setattr(policies, "entry_points", installed.select)
    with pytest.raises(PolicyUnknownError, match="can't be"):
        check_policy("broken")
    assert "broken" not in POLICIES


@pytest.mark.parametrize("name", sorted(POLICIES))
def test_each_policy_keeps_the_laws(name: str) -> None:
    check_eviction_policy(POLICIES[name])


def counting() -> Any:
    """A policy with a state of its own."""
    calls = []

    def choose(candidates):
        calls.append(1)
        found = list(candidates)
        return found[len(calls) % len(found)] if found else None

    return choose


def marking(candidates):
    """A policy that changes what it chooses."""
    victim = next(candidates, None)
    if victim is not None:
        victim.counters.hits += 1
    return victim


class Forgetful(Fifo):
    """A ranking whose snapshots lack a number."""

    NUMBERS = ("stamp", "uses")
    uses = 0

    def use(self, adapter_id: int, size_bytes: int, cost_ns: int) -> None:
        self.uses += 1

    def restore(self, state: Any) -> None:
        super().restore(state)
        self.uses = 0


@pytest.mark.parametrize(
    ("policy", "law"),
    [
        (counting(), "another choice"),
        (marking, "changed"),
        (lambda candidates: object(), "no candidate"),
        (WrongRanking, "no candidate"),
        (Forgetful, "its state is not all"),
    ],
)
def test_a_policy_that_breaks_a_law_is_found(policy, law: str) -> None:
    with pytest.raises(AssertionError, match=law):
        check_eviction_policy(policy)


@torch.no_grad()
def test_the_wrapped_layer_adds_the_deltas_of_its_adapters() -> None:
    made = made_by("A wrapped layer")
    torch.manual_seed(1)
    layer = made["GatedLinear"](4, 3)
    wrapper = wrapper_of(layer, table=(made["RULE"], *WRAPPERS))
    assert wrapper is made["GatedLinearWithLoRA"]
    wrapped = wrapper(layer)
    wrapped.create_lora_weights(
        Arena(2, [ModuleShape("m", 4, 3, 0)], 1 << 16, torch.float32, "cpu"), [0]
    )
    punica = PunicaWrapper(torch.device("cpu"), 2, choose_kernels("cpu"))
    wrapped.set_mapping(punica)
    a, b, x = torch.randn(2, 4), torch.randn(3, 2), torch.randn(2, 4)
    wrapped.set_lora(1, a, b)
    punica.update_metadata(LoRAMapping([0, 7], [0, 7]), [None, 7])
    expected = 2 * (x @ layer.weight.T)
    expected[1] += x[1] @ a.T @ b.T
    assert torch.allclose(wrapped(x), expected, atol=1e-5)


def test_the_command_prints_its_answer(tmp_path) -> None:
    app = made_by("A client command")["app"]

    @app.callback()
    def main(ctx: typer.Context) -> None:
        ctx.obj = Settings(str(tmp_path))

    with StandIn(tmp_path):
        shown = CliRunner().invoke(app, ["epoch", "--json"])
    assert shown.exit_code == 0, shown.output
    assert json.loads(shown.stdout)["epoch"] == 1
    assert "how often it was started" in CliRunner().invoke(app, ["epoch", "--help"]).output
