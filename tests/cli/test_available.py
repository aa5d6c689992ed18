"""What lies below the roots: names, ranks, problems; patterns, and the automatic rank."""

import json

import pytest

from loradock.cli.available import Available, automatic_rank, available, matching
from loradock.cli.exit_codes import CommandError
from loradock.messages import requests as rq
from tests.support.simulation.command_runs import run


def write(root, path, config, weights=b"1234"):
    directory = root / path
    directory.mkdir(parents=True)
    (directory / "adapter_config.json").write_text(config)
    if weights:
        (directory / "adapter_model.safetensors").write_bytes(weights)


@pytest.fixture
def root(tmp_path):
    root = tmp_path / "adapters"
    write(root, "a", json.dumps({"r": 8, "rank_pattern": {"q": 24}}))
    write(root, "team/b", json.dumps({"r": 4}))
    write(root, "bare", json.dumps({"r": 4}), b"")
    write(root, "broken", "{")
    write(root, "ia3", json.dumps({"peft_type": "IA3"}))
    write(root, "a b", json.dumps({"r": 4}))
    (root / "empty").mkdir()
    return root


def test_each_adapter_has_its_rank_and_what_prevents_its_use(root):
    found = {one.name: one for one in available([root, root], 16)}
    assert found["team.b"] == Available("team.b", "team/b", 4, 4, "")
    assert found["a"].problem == "rank 24 exceeds --max-lora-rank 16"
    assert "no weights" in found["bare"].problem
    assert "can't be read" in found["broken"].problem
    assert "IA3" in found["ia3"].problem
    assert "no adapter name" in found["a b"].problem
    assert len(found) == 6


def test_the_automatic_rank_admits_all(root):
    assert automatic_rank([root]) == 32
    with pytest.raises(CommandError, match="found no adapter"):
        automatic_rank([root / "empty"])


def test_patterns_are_names_below_the_roots(root):
    found = available([root])
    assert matching(["x", "team*"], found) == {"x": "", "team.b": "team/b"}
    with pytest.raises(CommandError, match="matches 'z"):
        matching(["z*"], found)


def test_several_adapters_are_loaded_and_failures_are_counted(controller):
    def answer(request):
        return rq.AdapterDone(request.request_id, request.adapter, "cpu-cached")

    controller.answers[rq.LoadAdapter] = answer
    loaded = run("load", "x", "y", "--json", directory=controller.directory)
    assert loaded.exit_code == 0
    names = [json.loads(line)["adapter"] for line in loaded.stdout.splitlines()]
    assert names == ["x", "y"]
    refused = run("load", "with space", "z", directory=controller.directory)
    assert refused.exit_code == 2
    assert "1 of 2 adapters were not loaded: with space" in refused.stderr
    assert controller.requests(rq.LoadAdapter)[-1].adapter == "z"


def test_the_listing_works_without_a_server(root, tmp_path):
    words = ("adapters", "--available", "--adapter-root", str(root))
    shown = run(*words, directory=tmp_path)
    assert "team.b" in shown.stdout
    assert "broken: its adapter_config.json can't be read" in shown.stdout
    listed = json.loads(run(*words, "--json", directory=tmp_path).stdout)
    assert {one["name"]: one["state"] for one in listed}["team.b"] is None
