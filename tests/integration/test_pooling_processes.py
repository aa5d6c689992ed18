"""Embedding and classifying end to end: a client, a controller and an engine, each a process."""

from pathlib import Path
from types import SimpleNamespace

import openai
import pytest
import torch

from loradock.client import Client, NotServed
from loradock.messages.views import PoolingTask
from tests.support.engine.serve_process import serve, status_once
from tests.support.gateway.served import serve_gateway
from tests.support.models.pooling_examples import (
    ADAPTERS,
    CLASSIFIERS,
    EMBEDDERS,
    TEXTS,
    PoolingExample,
    save_adapters,
)
from tests.support.parallel.processes import controller, engine
from tests.support.waiting import HANG_S

NAMES = (None, *ADAPTERS)


@torch.no_grad()
def expected(model: torch.nn.Module, task: PoolingTask) -> list[list[float]]:
    """Return each text's result alone, with mean pooling."""
    outputs = [model(input_ids=torch.tensor([text])) for text in TEXTS]
    if task == "classify":
        return [output.logits[0].softmax(-1).tolist() for output in outputs]
    return [output.last_hidden_state[0].mean(0).tolist() for output in outputs]


@pytest.mark.parametrize(
    ("task", "example"),
    [("embed", EMBEDDERS[0]), ("classify", CLASSIFIERS[2])],
    ids=["embed", "classify"],
)
def test_a_client_gets_what_peft_computes(
    task: PoolingTask, example: PoolingExample, tmp_path: Path
) -> None:
    models = save_adapters(example, tmp_path / "adapters")
    wanted = {name: expected(model, task) for name, model in models.items()}
    wanted[None] = expected(example.make(), task)
    directory, saved = tmp_path / "dir", example.save(tmp_path / "model")
    with (
        controller(directory) as process,
        engine(directory, (tmp_path / "adapters",), model=saved),
        Client(directory, timeout_s=HANG_S) as client,
    ):
        for name in ADAPTERS:
            client.load(name)
        for _ in range(2):
            for name in NAMES:
                check(client, task, name, wanted[name])
            # The second round requests from a controller that restored this state from its log.
            process.kill()
            process.start()
        if task == "embed":
            check_over_http(directory, wanted)
        with pytest.raises(NotServed, match=f"served to {task}, not to generate"):
            client.generate((1, 2)).text()
        names = [type(item.event).__name__ for item in client.events(since=0, follow=False)]
        rounds = 3 if task == "embed" else 2
        assert names.count("PoolingFinished") == rounds * len(NAMES)


def check_over_http(directory: Path, wanted: dict[str | None, list[list[float]]]) -> None:
    """Compare what the `openai` client gets from a gateway."""
    with (
        serve_gateway(SimpleNamespace(directory=directory)) as gateway,
        openai.OpenAI(base_url=f"{gateway.url}/v1", api_key="none", timeout=HANG_S) as client,
    ):
        for name, rows in wanted.items():
            inputs = [list(text) for text in TEXTS]
            answer = client.embeddings.create(model=name or "", input=inputs)
            assert answer.usage.prompt_tokens == sum(map(len, TEXTS))
            found = torch.tensor([item.embedding for item in answer.data])
            torch.testing.assert_close(found, torch.tensor(rows), rtol=1e-5, atol=1e-6)


def test_two_ranks_classify_with_adapters_heads_as_peft(tmp_path: Path) -> None:
    example = CLASSIFIERS[2]
    models = save_adapters(example, tmp_path / "adapters", task_type="SEQ_CLS")
    options = ("--device", "cpu", "--max-loras", "2", "--tensor-parallel-size", "2")
    options += ("--fully-sharded-loras", "--adapter-root", str(tmp_path / "adapters"))
    directory, saved = tmp_path / "dir", example.save(tmp_path / "model")
    with (
        serve(directory, *options, model=saved),
        Client(directory, timeout_s=HANG_S) as client,
    ):
        status_once(directory, lambda status: bool(status.engine_id))
        for name, model in models.items():
            client.load(name)
            check(client, "classify", name, expected(model, "classify"))
        check(client, "classify", None, expected(example.make(), "classify"))


def check(client: Client, task: PoolingTask, name: str | None, wanted: list[list[float]]) -> None:
    """Compare the result of one request with all texts."""
    if task == "embed":
        result = client.embed(TEXTS, name)
        rows = result.vectors
    else:
        scored = client.classify(TEXTS, name)
        result, rows = scored, scored.scores
        assert scored.labels == ("good", "bad", "ugly")
    assert (result.adapter, result.input_tokens) == (name, sum(map(len, TEXTS)))
    torch.testing.assert_close(torch.tensor(rows), torch.tensor(wanted), rtol=1e-5, atol=1e-6)
