"""An adapter's own chat template and generation defaults, as trainers save them beside it."""

import itertools
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
from structlog.testing import capture_logs
from transformers import AutoTokenizer, GenerationConfig

from loradock.gateway.inference import templates
from loradock.messages import events as ev
from loradock.messages import requests as rq
from tests.support.gateway.outputs import only_generation
from tests.support.gateway.served import Adapters, model_directory, serve_gateway
from tests.support.simulation.standin_controller import StandIn, view
from tests.support.waiting import HANG_S, wait_until

PATH = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hi"}]
OF_MODEL = "<user>hi<assistant>"
OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
NUMBERS = itertools.count()
TOOLS = [{"type": "function", "function": {"name": "f"}}]


@pytest.fixture(scope="module")
def gateway(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A gateway that may read the directories `adapters/NAME` of its root."""
    directory = tmp_path_factory.mktemp("gw")
    model, root = model_directory(directory), directory / "root"
    config = {"temperature": 0.5, "top_k": 7, "eos_token_id": 258}
    (model / "generation_config.json").write_text(json.dumps(config))
    (root / "adapters").mkdir(parents=True)
    options: dict[str, Any] = {"model": str(model), "adapter_roots": (str(root),)}
    with (
        StandIn(directory) as controller,
        serve_gateway(controller, allow_runtime_lora_updating=True, **options) as served,
    ):
        gateway: Any = served
        gateway.model, gateway.root = model, root / "adapters"
        yield gateway


@pytest.fixture
def saved(gateway: Any) -> Iterator[Any]:
    """Return the directory of a new adapter, with the tokenizer that was trained with."""
    name = f"a{next(NUMBERS)}"
    gateway.name, gateway.adapter = name, gateway.root / name
    gateway.tokenizer = AutoTokenizer.from_pretrained(gateway.model)
    gateway.controller.adapters[name] = view(name)
    gateway.adapter.mkdir()
    yield gateway
    del gateway.controller.adapters[name]
    gateway.controller.received.clear()


def generate(served: Any, **more: Any) -> Any:
    """Return what one request for the adapter, or for `model`, makes the controller generate."""
    body = {"model": getattr(served, "name", None), "messages": HELLO} | more
    served.controller.received.clear()
    response = served.post(PATH, body)
    assert response.status_code == 200, response.text
    return only_generation(served)


def prompt(served: Any, **more: Any) -> Any:
    return bytes(generate(served, **more).prompt).decode()


def sampling(served: Any, **more: Any) -> Any:
    return generate(served, **more).sampling


@pytest.mark.parametrize("save_jinja_files", [True, False])
@pytest.mark.parametrize("template", [OWN, {"default": OWN, "tool_use": "{{ tools | length }}"}])
def test_an_adapters_own_template_prompts_its_chats(
    saved: Any, save_jinja_files: bool, template: Any
) -> None:
    saved.tokenizer.chat_template = template
    saved.tokenizer.save_pretrained(saved.adapter, save_jinja_files=save_jinja_files)
    assert (saved.adapter / "chat_template.jinja").exists() == save_jinja_files
    assert prompt(saved) == "[hi]"
    assert prompt(saved, tools=TOOLS, tool_choice="none") == ("[hi]" if template == OWN else "1")
    assert prompt(saved, model=None) == OF_MODEL
    assert prompt(saved, model=f"tiny-chat:{saved.name}") == "[hi]"


def test_the_format_of_calls_is_the_one_that_an_adapters_own_template_shows(saved: Any) -> None:
    saved.tokenizer.chat_template = "{% if tools %}<tool_call>{% endif %}" + OWN
    saved.tokenizer.save_pretrained(saved.adapter)
    assert prompt(saved, tools=TOOLS) == "<tool_call>[hi]"
    # That of the model shows none.
    assert saved.post(PATH, {"messages": HELLO, "tools": TOOLS}).status_code == 400


def test_what_is_tokenized_is_what_a_chat_sends(saved: Any) -> None:
    saved.tokenizer.chat_template = "{{ bos_token }}" + OWN
    saved.tokenizer.save_pretrained(saved.adapter)
    for model in (saved.name, None):
        tokens = saved.post("/tokenize", {"model": model, "messages": HELLO}).json()["tokens"]
        assert tuple(tokens) == generate(saved, model=model).prompt


def test_a_template_has_the_special_tokens_that_it_was_saved_with(saved: Any) -> None:
    saved.tokenizer.chat_template = "{{ eos_token }}{{ bos_token }}"
    saved.tokenizer.eos_token = "b"
    saved.tokenizer.save_pretrained(saved.adapter)
    assert generate(saved).prompt == tuple(saved.tokenizer.encode("b<|bos|>"))
    # The same template as the model's, with other tokens.
    saved.tokenizer.chat_template = (saved.model / "chat_template.jinja").read_text()
    assert prompt(saved, model=None) == OF_MODEL


def test_an_adapter_without_files_is_prompted_as_the_model(saved: Any) -> None:
    with capture_logs() as logs:
        assert prompt(saved) == OF_MODEL
    assert sampling(saved).temperature == 0.5
    assert not [entry for entry in logs if entry["log_level"] == "warning"]


def test_a_request_precedes_the_adapters_defaults_and_they_the_models(saved: Any) -> None:
    GenerationConfig(
        temperature=0.25, min_p=0.1, repetition_penalty=1.5, max_new_tokens=5, do_sample=True
    ).save_pretrained(saved.adapter)
    found = sampling(saved)
    assert (found.temperature, found.top_k, found.min_p) == (0.25, 7, 0.1)
    assert (found.repetition_penalty, found.max_tokens) == (1.5, 5)
    saved.controller.received.clear()
    saved.post("/v1/completions", {"model": saved.name, "prompt": "x"})
    assert only_generation(saved).sampling.temperature == 0.25
    found = sampling(saved, temperature=1.0, repetition_penalty=1.0, max_tokens=9, top_k=0, min_p=0)
    assert (found.temperature, found.top_k, found.min_p) == (1.0, 0, 0.0)
    assert (found.repetition_penalty, found.max_tokens) == (1.0, 9)
    found = sampling(saved, model=None)
    assert (found.temperature, found.top_k, found.repetition_penalty) == (0.5, 7, 1.0)


def test_an_output_ends_at_the_tokens_that_ended_it_in_training(saved: Any) -> None:
    saved.tokenizer.eos_token = "b"
    saved.tokenizer.save_pretrained(saved.adapter)
    GenerationConfig(eos_token_id=[258, 97]).save_pretrained(saved.adapter)
    # The engine knows 258 as the model's own.
    assert sampling(saved).stop_token_ids == (97, 98)
    assert sampling(saved, stop_token_ids=[5]).stop_token_ids == (5, 97, 98)
    assert sampling(saved, ignore_eos=True).stop_token_ids == ()
    assert sampling(saved, model=None).stop_token_ids == ()


@pytest.mark.parametrize(
    "config", ['{"temperature": "hot"}', '{"top_p": 0}', "[]", "{", '{"eos_token_id": -1}']
)
def test_wrong_defaults_are_reported_and_not_used(saved: Any, config: Any) -> None:
    (saved.adapter / "generation_config.json").write_text(config)
    with capture_logs() as logs:
        assert sampling(saved).temperature == 0.5
        assert sampling(saved).temperature == 0.5
    [entry] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert entry["adapter"] == saved.name
    assert "generation_config.json" in entry["reason"]


@pytest.mark.parametrize(
    ("name", "content", "match"),
    [
        ("chat_template.jinja", "{% for %}", "can't be read"),
        ("chat_template.jinja", "x" * (1 << 19), "bytes"),
        ("chat_template.jinja", b"\xff", "UTF-8"),
        ("tokenizer_config.json", '{"chat_template": [{"name": "rag"}]}', "named 'default'"),
        ("tokenizer_config.json", "{", "not JSON"),
        ("chat_template.jinja", "{{ raise_exception('no') }}", "refuses: no"),
        ("chat_template.jinja", "{{ cycler.__init__.__globals__ }}", "can't be applied"),
        ("chat_template.jinja", "{{ 'x' * 2000000 }}", "characters"),
    ],
)
def test_a_template_that_is_wrong_refuses_chats_of_its_adapter_alone(
    saved: Any, name: Any, content: Any, match: str
) -> None:
    data = content if isinstance(content, bytes) else content.encode()
    (saved.adapter / name).write_bytes(data)
    response = saved.post(PATH, {"model": saved.name, "messages": HELLO})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, "messages")
    assert match in error["message"]
    assert prompt(saved, model=None) == OF_MODEL
    body = {"model": saved.name, "prompt": "x"}
    assert saved.post("/v1/completions", body).status_code == 200


HOSTILE = [
    "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{{ messages[0].content * 10 ** 10 }}",
    "{{ 'x' * 10 ** 10 }}",
    "{% set n = namespace(s='x') %}{% for i in range(60) %}{% set n.s = n.s ~ n.s %}{% endfor %}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 9 ** (9 ** 9) }}",
    "{{ (messages | length + 8) ** (9 ** 9) }}",
    "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
]


@pytest.mark.parametrize("template", HOSTILE)
def test_a_hostile_template_ends_with_its_request(saved: Any, template: Any) -> None:
    (saved.adapter / "chat_template.jinja").write_text(template)
    response = saved.post(PATH, {"model": saved.name, "messages": HELLO})
    assert response.status_code == 400, response.text
    assert prompt(saved, model=None) == OF_MODEL
    # It costs as much again only after a rest.
    assert saved.post(PATH, {"model": saved.name, "messages": HELLO}).status_code == 400


def test_a_prompt_of_an_adapters_template_is_refused_as_one_of_the_models(saved: Any) -> None:
    (saved.adapter / "chat_template.jinja").write_text("{{ messages[0].content * 1000001 }}")
    body = {"model": saved.name, "messages": [{"role": "user", "content": "x"}]}
    error = saved.refused(PATH, body)
    assert error["code"] == "context_length_exceeded"
    assert "1000001 characters" in error["message"]


def test_others_are_served_while_a_template_runs(saved: Any) -> None:
    (saved.adapter / "chat_template.jinja").write_text(HOSTILE[0])
    answers = []
    body = {"model": saved.name, "messages": HELLO}
    thread = threading.Thread(target=lambda: answers.append(saved.post(PATH, body)))
    thread.start()
    assert prompt(saved, model=None) == OF_MODEL
    thread.join(HANG_S)
    assert answers[0].status_code == 400
    assert "processor time" in answers[0].json()["error"]["message"]


def test_a_template_is_refused_for_a_time_after_it_exceeded_a_bound_and_others_do_not(
    saved: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(templates, "RETRY_BACKOFF_S", 1e9)
    (saved.adapter / "chat_template.jinja").write_text(
        "{% if messages[0].content == 'loop' %}" + HOSTILE[0] + "{% endif %}ok"
    )
    assert prompt(saved) == "ok"
    loop = [{"role": "user", "content": "loop"}]
    refused = saved.post(PATH, {"model": saved.name, "messages": loop}).json()["error"]["message"]
    assert "processor time" in refused
    resting = saved.post(PATH, {"model": saved.name, "messages": HELLO}).json()["error"]["message"]
    assert "a moment ago" in resting
    other = saved.root / f"{saved.name}-other"
    other.mkdir()
    (other / "chat_template.jinja").write_text("other")
    saved.controller.adapters[other.name] = view(other.name)
    assert prompt(saved, model=other.name) == "other"
    del saved.controller.adapters[other.name]


def test_a_replaced_adapter_has_its_new_template(saved: Any) -> None:
    template = saved.adapter / "chat_template.jinja"
    template.write_text("one")
    assert prompt(saved) == "one"
    template.write_text("two")
    assert prompt(saved) == "one"
    known = view(saved.name, fingerprint="cd" * 16, adapter_id=2)
    saved.controller.adapters[saved.name] = known
    saved.controller.publish(ev.AdapterReplaced(saved.name, known.fingerprint))
    wait_until(lambda: prompt(saved) == "two")
    moved = saved.root / f"{saved.name}-moved"
    saved.adapter.rename(moved)
    known = msgspec.structs.replace(known, path=f"adapters/{moved.name}", adapter_id=3)
    (moved / "chat_template.jinja").write_text("three")
    saved.controller.adapters[saved.name] = known
    saved.controller.publish(ev.AdapterReplaced(saved.name, known.fingerprint))
    wait_until(lambda: prompt(saved) == "three")


def test_an_adapter_that_is_loaded_again_with_the_same_weights_has_its_new_template(
    saved: Any,
) -> None:
    Adapters(saved.controller)
    template = saved.adapter / "chat_template.jinja"
    template.write_text("one")
    assert prompt(saved) == "one"
    template.write_text("two")
    path = f"adapters/{saved.name}"
    body = {"lora_name": saved.name, "lora_path": path, "load_inplace": True}
    assert saved.post("/v1/load_lora_adapter", body).status_code == 200
    assert prompt(saved) == "two"
    template.write_text("three")
    saved.controller.publish(ev.AdapterAccepted(saved.name, "ab" * 16, 8, 100))
    wait_until(lambda: prompt(saved) == "three")
    for kind in (rq.LoadAdapter, rq.HoldAdapter, rq.RemoveAdapter):
        del saved.controller.answers[kind]


def test_concurrent_chats_have_the_templates_of_their_models(saved: Any) -> None:
    saved.tokenizer.chat_template = OWN
    saved.tokenizer.save_pretrained(saved.adapter)
    saved.controller.received.clear()
    wrong = []

    def chat(index: int) -> None:
        model = saved.name if index % 2 else "base"
        body = {"model": model if index % 2 else None, "messages": HELLO}
        response = saved.post(PATH, body)
        if response.status_code != 200:
            wrong.append(response.text)

    threads = [threading.Thread(target=chat, args=(index,)) for index in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG_S)
    assert wrong == []
    requests = saved.controller.requests(rq.Generate)
    assert len(requests) == 16
    for request in requests:
        expected = "[hi]" if request.adapter == saved.name else OF_MODEL
        assert bytes(request.prompt).decode() == expected


@pytest.mark.parametrize("kind", ["missing", "linked", "outside", "second name"])
def test_what_may_not_be_read_is_reported_once(saved: Any, kind: Any) -> None:
    outside = saved.root.parent.parent / f"outside-{saved.name}"
    outside.mkdir()
    (outside / "chat_template.jinja").write_text("secret")
    template = saved.adapter / "chat_template.jinja"
    if kind == "missing":
        saved.adapter.rmdir()
    elif kind == "linked":
        template.symlink_to(outside / "chat_template.jinja")
    elif kind == "outside":
        known = view(saved.name, path=str(outside))
        saved.controller.adapters[saved.name] = known
        saved.controller.publish(ev.AdapterReplaced(saved.name, "ab"))
        wait_until(lambda: saved.get("/v1/models").text.count(str(outside)))
    else:
        os.link(outside / "chat_template.jinja", template)
    with capture_logs() as logs:
        assert [prompt(saved), prompt(saved)] == [OF_MODEL] * 2
    [entry] = [entry for entry in logs if entry["log_level"] == "warning"]
    assert entry["adapter"] == saved.name
    assert "the model's chat template" in entry["reason"]


def test_a_gateway_without_roots_says_so_once(tmp_path: Path) -> None:
    model = model_directory(tmp_path)
    with (
        StandIn(tmp_path) as controller,
        capture_logs() as logs,
        serve_gateway(controller, model=str(model)) as served,
    ):
        for name in ("upper", "reverse"):
            assert prompt(served, model=name) == OF_MODEL
    [entry] = [entry for entry in logs if "adapter" in entry]
    assert "start the gateway with --adapter-root" in entry["event"]


def test_the_operators_template_precedes_the_adapters(tmp_path: Path) -> None:
    model, adapter = model_directory(tmp_path), tmp_path / "adapters" / "upper"
    adapter.mkdir(parents=True)
    (adapter / "chat_template.jinja").write_text(OWN)
    (adapter / "generation_config.json").write_text('{"temperature": 0.25}')
    (tmp_path / "chosen.jinja").write_text("chosen")
    options: dict[str, Any] = {"model": str(model), "adapter_roots": (str(tmp_path),)}
    options["chat_template"] = str(tmp_path / "chosen.jinja")
    with StandIn(tmp_path) as controller, serve_gateway(controller, **options) as served:
        assert prompt(served, model="upper") == "chosen"
        assert sampling(served, model="upper").temperature == 0.25
